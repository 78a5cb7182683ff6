-- Give delayed messages another due time; one that is due by now becomes ready at once.
--
-- KEYS[1]  base of the queue's keys
-- ARGV[1]  now  ms; '' = the server's clock
-- ARGV[2]  tag  and then, per message, two in all: tag, due
-- ARGV[3]  due  ms since the epoch; 0 = at once
-- RETURNS  number of messages found delayed; others are passed over
-- ERRORS   none
-- COST     O(log n) per message
--@include clock record settings ring wake touch

begin_writes()
local now, q, found = now_ms(ARGV[1]), queue_state(), 0
for i = 2, #ARGV, 2 do
  local tag, due = ARGV[i], tonumber(ARGV[i + 1])
  local r = load_record(tag)
  if r and redis.call('ZREM', K.delayed, tag) == 1 then
    found = found + 1
    if due > now then
      redis.call('ZADD', K.delayed, due, tag)
      schedule(q, due)
    else
      make_ready(q, tag, r)
      place(q, r.lane, now)
    end
  end
end
rearm(q)
touch(q)
return found
