-- Sweep: expired leases come back, due messages become ready, old dead letters go. Every claim does it too.
--
-- KEYS[1]  base of the queue's keys
-- ARGV[1]  now     ms; '' = the server's clock
-- ARGV[2]  policy  what happens to failures (include failure)
-- RETURNS  { expired leases, due messages }; 100 of each at most
-- ERRORS   none
-- COST     O(100 * log n)
--@include clock record settings ring wake touch failure sweep

begin_writes()
local now = now_ms(ARGV[1])
local q, policy = queue_state(), parse_policy(ARGV[2])
local swept = { sweep_expired(q, policy, now), sweep_due(q, now) }
trim_dead(policy, now)
rearm(q)
touch(q)
return swept
