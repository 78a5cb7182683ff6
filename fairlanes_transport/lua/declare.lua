-- Declare the queue: it exists from now on, with the defaults of its lanes, and its end if it has one.
--
-- KEYS[1]  base of the queue's keys
-- ARGV[1]  now      ms; '' = the server's clock
-- ARGV[2]  expires  ms without use until the queue is gone; 0 = never
-- ARGV[3]  field    and then, per default, two in all: field, value ('' = not set)
-- ARGV[4]  value
-- RETURNS  1 the queue is new, 0 it was there
-- ERRORS   none
-- COST     O(number of defaults); when one has changed, O(log n) for each of at most 100 lanes; claims go on
--@include clock record settings ring wake walk

begin_writes()
local existed = redis.call('EXISTS', K.queue)
local changed = (redis.call('HGET', K.queue, 'expires') or '0') ~= ARGV[2]
redis.call('HSET', K.queue, 'expires', ARGV[2])
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
local q = queue_state()
if kind and redis.call('EXISTS', K.lanes) == 1 then
  begin_walk(q, kind)
  walk_on(q, now_ms(ARGV[1]))
  rearm(q)
end
touch(q, changed)
return 1 - existed
