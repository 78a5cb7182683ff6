-- Move the deadlines of leases, and of running slots, that are still held.
--
-- KEYS[1]  base of the queue's keys
-- ARGV[1]  now      ms; '' = the server's clock
-- ARGV[2]  lease    ms from now to the new deadline
-- ARGV[3]  tag      and then, per message, three in all: tag, attempt, token
-- ARGV[4]  attempt
-- ARGV[5]  token
-- RETURNS  per message 1 done, 0 stale, -1 gone
-- ERRORS   none
-- COST     O(log n) per message
--@include clock record settings touch fence grace

begin_writes()
local now, q = now_ms(ARGV[1]), queue_state()
local deadline = now + tonumber(ARGV[2])
see(q, tonumber(ARGV[2]), now)
local answers = {}
for i = 3, #ARGV, 3 do
  local tag, attempt, token = ARGV[i], ARGV[i + 1], ARGV[i + 2]
  local answer = check_fence(tag, attempt, token)
  if answer == -1 then
    local r = load_record(tag)
    if r and r.attempt == tonumber(attempt) and r.token == token then answer = 1 end
  end
  if answer == 1 then redis.call('ZADD', K.leases, 'XX', deadline, tag) end
  answers[#answers + 1] = answer
end
touch(q)
return answers
