-- A task has ended whose message was acked early: its running slot is free.
--
-- KEYS[1]  base of the queue's keys
-- ARGV[1]  now       ms; '' = the server's clock
-- ARGV[2]  tag       and then, per task, four in all: tag, attempt, token, spent
-- ARGV[3]  attempt
-- ARGV[4]  token
-- ARGV[5]  spent     ms of worker time that the task took; 0 = not known
-- RETURNS  need 0|1
-- ERRORS   none
-- COST     O(log n) per task
--@include clock record settings ring wake touch work

begin_writes()
local now, q = now_ms(ARGV[1]), queue_state()
for i = 2, #ARGV, 4 do
  local tag = ARGV[i]
  local r = load_record(tag)
  if r and r.slot and r.attempt == tonumber(ARGV[i + 1]) and r.token == ARGV[i + 2] then
    end_lease(tag, r)
    forget(tag)
    place(q, r.lane, now)
    true_up(q, r, tonumber(ARGV[i + 3]))
  end
end
local need = rearm(q)
touch(q)
return need
