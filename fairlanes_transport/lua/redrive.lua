-- Dead letters become ready again, each at the place that it had in its lane: attempt + 1, failures 0.
--
-- The attempt goes up so that nobody who held the message before it died can acknowledge it now.
--
-- KEYS[1]  base of the queue's keys
-- ARGV[1]  now  ms; '' = the server's clock
-- ARGV[2]  tag  and more tags
-- RETURNS  number of messages redriven; a tag that is not dead is passed over
-- ERRORS   none
-- COST     O(log n) per message
--@include clock record settings ring wake touch

begin_writes()
local now, q, redriven = now_ms(ARGV[1]), queue_state(), 0
for i = 2, #ARGV do
  local tag = ARGV[i]
  local r = load_record(tag)
  if r and redis.call('ZREM', K.dead, tag) == 1 then
    redis.call('ZREM', K.untold, tag)
    redis.call('HDEL', K.reasons, tag)
    r.attempt, r.failures, r.token = r.attempt + 1, 0, '-'
    save_record(tag, r)
    make_ready(q, tag, r)
    place(q, r.lane, now)
    redriven = redriven + 1
  end
end
count('redriven', redriven)
rearm(q)
touch(q)
return redriven
