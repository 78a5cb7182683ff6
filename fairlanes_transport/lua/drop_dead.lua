-- Dead letters are dropped for good.
--
-- KEYS[1]  base of the queue's keys
-- ARGV[1]  tag  and more tags
-- RETURNS  number of messages dropped; a tag that is not dead is passed over
-- ERRORS   none
-- COST     O(log n) per message
--@include clock record settings touch

begin_writes()
local dropped = 0
for _, tag in ipairs(ARGV) do
  if redis.call('ZREM', K.dead, tag) == 1 then
    redis.call('ZREM', K.untold, tag)
    redis.call('HDEL', K.reasons, tag)
    forget(tag)
    dropped = dropped + 1
  end
end
count('purged', dropped)
touch(queue_state())
return dropped
