-- Remove ready and delayed messages by their tags. What somebody holds, or what is dead, is left alone.
--
-- KEYS[1]  base of the queue's keys
-- ARGV[1]  now  ms; '' = the server's clock
-- ARGV[2]  tag  and more tags
-- RETURNS  per tag 1 removed, 0 leased or dead, -1 no such message
-- ERRORS   none
-- COST     O(log n) per message
--@include clock record settings ring wake touch

begin_writes()
local now, q, answers, removed = now_ms(ARGV[1]), queue_state(), {}, 0
for i = 2, #ARGV do
  local tag = ARGV[i]
  local r = load_record(tag)
  if not r then
    answers[i - 1] = -1
  elseif redis.call('ZREM', K.ready .. r.lane, tag) + redis.call('ZREM', K.delayed, tag) == 0 then
    answers[i - 1] = 0
  else
    answers[i - 1] = 1
    removed = removed + 1
    forget(tag)
    place(q, r.lane, now)
  end
end
count('cancelled', removed)
rearm(q)
touch(q)
return answers
