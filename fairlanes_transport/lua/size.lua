-- How many messages the queue holds, by state.
--
-- KEYS[1]  base of the queue's keys
-- RETURNS  { ready, leased (with running slots), delayed, dead }
-- ERRORS   none
-- COST     O(1)

local leased, delayed, dead = redis.call('ZCARD', K.leases), redis.call('ZCARD', K.delayed),
  redis.call('ZCARD', K.dead)
return { redis.call('HLEN', K.message) - leased - delayed - dead, leased, delayed, dead }
