-- Hand back messages that were not started: each returns to the place it had, and no failure is counted.
--
-- KEYS[1]  base of the queue's keys
-- ARGV[1]  now      ms; '' = the server's clock
-- ARGV[2]  tag      and then, per message, three in all: tag, attempt, token
-- ARGV[3]  attempt
-- ARGV[4]  token
-- RETURNS  per message 1 done, 0 stale, -1 gone
-- ERRORS   none
-- COST     O(log n) per message
--@include clock record settings ring wake touch fence

begin_writes()
local now, q = now_ms(ARGV[1]), queue_state()
local answers, done = {}, 0
for i = 2, #ARGV, 3 do
  local tag = ARGV[i]
  local answer, r = check_fence(tag, ARGV[i + 1], ARGV[i + 2])
  if answer == 1 then
    end_lease(tag, r)
    make_ready(q, tag, r)
    place(q, r.lane, now)
    done = done + 1
  end
  answers[#answers + 1] = answer
end
count('released', done)
rearm(q)
touch(q)
return answers
