-- Delete the queue and everything in it, a piece per call; a consumer's later ack finds it gone.
--
-- KEYS[1]  base of the queue's keys
-- ARGV[1]  if_empty  1: only if it holds no ready, leased or delayed message
-- RETURNS  1 deleted, 0 more to do: call again, -1 not empty
-- ERRORS   none
-- COST     O(100) per call; memory is freed in the background
--@include clock record

begin_writes()
if ARGV[1] == '1' and redis.call('HLEN', K.message) > redis.call('ZCARD', K.dead) then return -1 end
local pieces = {
  { K.lanes, { K.ready, K.flight, K.throttle, K.allowed, K.work } },
  { K.waiting, { K.throttle, K.allowed, K.work } },
  { K.configured, { K.settings, K.throttle, K.allowed, K.work } },
}
for _, piece in ipairs(pieces) do
  local lanes = redis.call('ZRANGE', piece[1], 0, 99)
  for _, lane in ipairs(lanes) do
    for _, kind in ipairs(piece[2]) do redis.call('UNLINK', kind .. lane) end
    redis.call('ZREM', piece[1], lane)
  end
  if #lanes == 100 then return 0 end
end
redis.call('UNLINK', K.queue, K.totals, K.ring, K.kept, K.reserved, K.waiting, K.lanes, K.configured, K.message, K.envelope,
  K.body, K.leases, K.delayed, K.dead, K.reasons, K.finished, K.wake)
return 1
