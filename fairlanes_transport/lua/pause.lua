-- Pause or resume the queue: a paused one is not claimed from, and keeps its ring.
--
-- KEYS[1]  base of the queue's keys
-- ARGV[1]  paused  1 | 0
-- RETURNS  need 0|1
-- ERRORS   none
-- COST     O(1)
--@include clock record settings ring wake touch

begin_writes()
if ARGV[1] == '1' then
  redis.call('HSET', K.queue, 'paused', '1')
else
  redis.call('HDEL', K.queue, 'paused')
end
local q = queue_state()
local need = rearm(q)
touch(q)
return need
