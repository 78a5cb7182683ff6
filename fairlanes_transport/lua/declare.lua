-- Declare the queue: it exists from now on, with the defaults of its lanes, and its end if it has one.
--
-- KEYS[1]  base of the queue's keys
-- ARGV[1]  now      ms; '' = the server's clock
-- ARGV[2]  expires  ms without use until the queue is gone; 0 = never
-- ARGV[3]  field    and then, per default, two in all: field, value ('' = not set)
-- ARGV[4]  value    as for configure; fairness: count or time
-- RETURNS  1 the queue is new, 0 it was there
-- ERRORS   FLARG a default is unknown, or a value out of range; nothing was changed
-- COST     O(number of defaults); when one has changed, O(log n) for each of at most 1,000 lanes
--@include clock checks record settings ring wake touch

for i = 3, #ARGV, 2 do
  local refused = refusal(ARGV[i], ARGV[i + 1], OF_A_QUEUE)
  if refused then return refused end
end

begin_writes()
local existed = redis.call('EXISTS', K.queue)
local changed = (redis.call('HGET', K.queue, 'expires') or '0') ~= ARGV[2]
redis.call('HSET', K.queue, 'expires', ARGV[2])
local replaced = false
for i = 3, #ARGV, 2 do
  local old = redis.call('HGET', K.queue, ARGV[i])
  if (old or '') ~= ARGV[i + 1] then
    replaced = true
    if ARGV[i + 1] == '' then
      redis.call('HDEL', K.queue, ARGV[i])
    else
      redis.call('HSET', K.queue, ARGV[i], ARGV[i + 1])
    end
  end
end
local q = queue_state()
if replaced then
  local now = now_ms(ARGV[1])
  for _, lane in ipairs(redis.call('ZRANGE', K.lanes, 0, 999)) do place(q, lane, now) end
  rearm(q)
end
touch(q, changed)
return 1 - existed
