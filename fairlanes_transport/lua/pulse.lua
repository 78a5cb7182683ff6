-- Look at the queue as a whole, all at one moment. Changes nothing.
--
-- KEYS[1]  base of the queue's keys
-- ARGV[1]  now  ms; '' = the server's clock
-- RETURNS  { now (ms), ring, waiting, lanes, configured, records, envelopes, bodies, leased (with running slots),
--            delayed, dead, reasons, wake tokens, the queue's hash (flat list), the totals (flat list) }
-- ERRORS   none
-- COST     O(1)
--@include clock

local seen = { string.format('%.0f', now_ms(ARGV[1])) }
for _, look in ipairs({
  { 'ZCARD', K.ring }, { 'ZCARD', K.waiting }, { 'ZCARD', K.lanes }, { 'ZCARD', K.configured },
  { 'HLEN', K.message }, { 'HLEN', K.envelope }, { 'HLEN', K.body },
  { 'ZCARD', K.leases }, { 'ZCARD', K.delayed }, { 'ZCARD', K.dead }, { 'HLEN', K.reasons },
  { 'LLEN', K.wake }, { 'HGETALL', K.queue }, { 'HGETALL', K.totals },
}) do
  seen[#seen + 1] = redis.call(look[1], look[2])
end
return seen
