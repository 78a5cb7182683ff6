-- A message failed: it comes back after its backoff, or becomes a dead letter.
--
-- KEYS[1]  base of the queue's keys
-- ARGV[1]  now      ms; '' = the server's clock
-- ARGV[2]  tag
-- ARGV[3]  attempt
-- ARGV[4]  token
-- ARGV[5]  requeue  1: count a failure and come back, until the failures are used up; 0: dead at once
-- ARGV[6]  reason   text, kept with a dead letter
-- ARGV[7]  policy   what happens to failures (include failure)
-- RETURNS  1 done, 3 done and its failures are used up: its sender is to be told (untold.lua), 0 stale, -1 gone
-- ERRORS   none
-- COST     O(log n)
--@include clock record settings ring wake touch failure fence

begin_writes()
local now, tag = now_ms(ARGV[1]), ARGV[2]
local q, policy = queue_state(), parse_policy(ARGV[7])
local answer, r = check_fence(tag, ARGV[3], ARGV[4])
if answer == 1 then
  end_lease(tag, r)
  if ARGV[5] == '1' then
    r.failures = r.failures + 1
    if fail(q, tag, r, backoff(policy, r.failures), ARGV[6], policy, now) then answer = 3 end
  else
    bury(tag, r, ARGV[6], policy, now)
  end
  place(q, r.lane, now)
  count('rejected', 1)
end
rearm(q)
touch(q)
return answer
