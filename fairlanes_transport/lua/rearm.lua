-- A consumer that leaves: it gives the timekeeper's role back, and a token that it popped and cannot use.
--
-- KEYS[1]  base of the queue's keys
-- ARGV[1]  consumer  id; '' = no role to give back
-- RETURNS  need 0|1
-- ERRORS   none
-- COST     O(1)
--@include clock record settings ring wake touch

begin_writes()
local q = queue_state()
if ARGV[1] ~= '' then keep_time(q, ARGV[1], false, 0) end
local need = rearm(q)
touch(q)
return need
