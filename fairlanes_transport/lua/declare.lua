-- Declare the queue: it exists from now on, with the defaults of its lanes, and its end if it has one.
--
-- A queue that holds more than 250 lanes cannot be given an end later; it stays without one.
--
-- KEYS[1]  base of the queue's keys
-- ARGV[1]  now      ms; '' = the server's clock
-- ARGV[2]  expires  ms without use until the queue is gone; 0 = never
-- ARGV[3]  field    and then, per default, two in all: field, value ('' = not set)
-- ARGV[4]  value    as for configure; fairness: count or time
-- RETURNS  { 1 the queue is new | 0, 1 call again: something is left to do | 0, 1 it could not be given an end | 0 }
-- ERRORS   FLARG a default is unknown, or a value out of range; nothing was changed
-- COST     O(number of defaults); when one has changed, O(log n) for each of at most 100 lanes; claims go on
--@include clock checks record settings ring wake touch ruin walk

for i = 3, #ARGV, 2 do
  local refused = refusal(ARGV[i], ARGV[i + 1], OF_A_QUEUE)
  if refused then return refused end
end

begin_writes()
local existed, expires, refused = redis.call('EXISTS', K.queue), tonumber(ARGV[2]), 0
local more = clear_ruin()
local q = queue_state()
local changed = q.expires ~= expires

-- adopt(lane): a lane of a queue that had no end gets the names, and the end, of one that has.
local function adopt(lane, old)
  for part, from in pairs(old) do
    if redis.call('EXISTS', from .. lane) == 1 then redis.call('RENAME', from .. lane, K[part] .. lane) end
  end
  lane_settings(q, lane)
end

if q.expires == 0 and expires > 0 and redis.call('ZCARD', K.lanes) + redis.call('ZCARD', K.configured) > ENDS_AT_ONCE then
  expires, changed, refused = 0, false, 1
elseif q.expires == 0 and expires > 0 then
  local old = { ready = K.ready, flight = K.flight, settings = K.settings, throttle = K.throttle, allowed = K.allowed,
    work = K.work }
  new_life(q)
  for _, index in ipairs({ K.lanes, K.configured }) do
    for _, lane in ipairs(redis.call('ZRANGE', index, 0, ENDS_AT_ONCE - 1)) do adopt(lane, old) end
  end
elseif q.expires > 0 and expires == 0 then
  local lanes = redis.call('ZRANGE', K.ends, 0, ENDS_AT_ONCE - 1)
  for _, lane in ipairs(lanes) do
    for _, kind in ipairs({ K.ready, K.flight, K.settings }) do redis.call('PERSIST', kind .. lane) end
    redis.call('ZREM', K.ends, lane)
  end
  if #lanes == ENDS_AT_ONCE then
    touch(q)
    return { 0, 1, 0 }
  end
  for _, key in ipairs({ K.queue, K.totals, K.ring, K.kept, K.reserved, K.waiting, K.lanes, K.configured, K.message, K.envelope, K.body,
    K.leases, K.delayed, K.dead, K.untold, K.reasons, K.wake }) do
    redis.call('PERSIST', key)
  end
else
  begin_life(q)
end
redis.call('HSET', K.queue, 'expires', ARGV[2] ~= '0' and string.format('%.0f', expires) or '0')
-- Default -> what the lanes' places have to follow; the strongest counts.
local KINDS = { max_size = '', weight = 'turns', fairness = 'anew' }
local kind
for i = 3, #ARGV, 2 do
  local old = redis.call('HGET', K.queue, ARGV[i])
  if (old or '') ~= ARGV[i + 1] then
    local wanted = KINDS[ARGV[i]] or 'place'
    if wanted ~= '' and kind ~= 'anew' and not (wanted == 'place' and kind) then kind = wanted end
    if ARGV[i + 1] == '' then
      redis.call('HDEL', K.queue, ARGV[i])
    else
      redis.call('HSET', K.queue, ARGV[i], ARGV[i + 1])
    end
  end
end
-- What lanes have paid stays written when lanes are charged by messages again.
if kind == 'anew' then redis.call('HSET', K.queue, 'costs', '1') end
local used = q.lanes
q = queue_state()
if kind and redis.call('EXISTS', K.lanes) == 1 then
  begin_walk(q, kind)
  walk_on(q, now_ms(ARGV[1]))
  rearm(q)
end
for lane in pairs(used) do q.lanes[lane] = q.lanes[lane] or lane_settings(q, lane) end
touch(q, changed)
return { 1 - existed, more, refused }
