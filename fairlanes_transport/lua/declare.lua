-- Declare the queue: it exists from now on, with the defaults of its lanes, and its end if it has one.
--
-- A queue that holds more than 250 lanes cannot be given an end later; it stays without one.
--
-- KEYS[1]  base of the queue's keys
-- ARGV[1]  expires  ms without use until the queue is gone; 0 = never
-- ARGV[2]  field    and then, per default, two in all: field, value ('' = not set)
-- ARGV[3]  value    as for configure; fairness: count or time
-- RETURNS  { 1 the queue is new | 0, what is left to do before it is declared: 0 nothing, 1 call again, 2 call adopt and
--            then again; 1 it could not be given an end | 0; 1 something of a deleted one is left to remove | 0 }
-- ERRORS   FLARG a default is unknown, or a value out of range; nothing was changed
-- COST     O(number of defaults); a default that has changed is brought to the lanes by the claims that follow
--@include clock checks record settings ring wake touch change

for i = 2, #ARGV, 2 do
  local refused = refusal(ARGV[i], ARGV[i + 1], OF_A_QUEUE)
  if refused then return refused end
end

begin_writes()
local existed, expires, refused = redis.call('EXISTS', K.queue), tonumber(ARGV[1]), 0
local q = queue_state()
local changed = q.expires ~= expires

if q.expires == 0 and expires > 0 then
  local lanes = redis.call('ZCARD', K.lanes) + redis.call('ZCARD', K.configured)
  if lanes > ENDS_AT_ONCE then
    expires, changed, refused = 0, false, 1
  elseif lanes > 0 then
    return { 0, 2, 0, 0 }
  else
    new_life(q)
  end
elseif q.expires > 0 and expires == 0 then
  local lanes = redis.call('ZRANGE', K.ends, 0, ENDS_AT_ONCE - 1)
  for _, lane in ipairs(lanes) do
    for _, kind in ipairs({ K.ready, K.flight, K.settings }) do redis.call('PERSIST', kind .. lane) end
    redis.call('ZREM', K.ends, lane)
  end
  if #lanes == ENDS_AT_ONCE then
    touch(q)
    return { 0, 1, 0, 0 }
  end
  for _, key in ipairs({ K.queue, K.totals, K.ring, K.kept, K.reserved, K.waiting, K.lanes, K.configured, K.message, K.envelope, K.body,
    K.leases, K.delayed, K.dead, K.untold, K.reasons, K.wake }) do
    redis.call('PERSIST', key)
  end
else
  begin_life(q)
end
redis.call('HSET', K.queue, 'expires', string.format('%.0f', expires))
-- Default -> what the lanes' places have to follow; the strongest counts.
local KINDS = { max_size = '', weight = 'turns', fairness = 'anew' }
local kind
for i = 2, #ARGV, 2 do
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
  rearm(q)
end
for lane in pairs(used) do q.lanes[lane] = q.lanes[lane] or lane_settings(q, lane) end
touch(q, changed)
return { 1 - existed, 0, refused, redis.call('EXISTS', K.ruin) }
