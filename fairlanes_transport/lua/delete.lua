-- Delete the queue and everything in it; a consumer's later ack finds it gone.
--
-- The first step takes all messages, settings and throttles away at once. What is left are keys of lanes that nobody
-- finds; the next calls remove them, also on behalf of whoever declares the queue.
--
-- KEYS[1]  base of the queue's keys
-- ARGV[1]  if_empty  1: only if it holds no ready, leased or delayed message
-- ARGV[2]  taken     1: an earlier call has taken the queue away; only remove what is left
-- RETURNS  1 deleted, 0 call again, 2 taken away: call again with `taken`, -1 not empty
-- ERRORS   none
-- COST     O(100) per call; memory is freed in the background
--@include clock settings ruin

begin_writes()
local more = clear_ruin()
if ARGV[2] == '1' then return 1 - more end
if more == 1 then return 0 end
if ARGV[1] == '1' and redis.call('HLEN', K.message) > redis.call('ZCARD', K.dead) then return -1 end
local q = queue_state()
for from, to in pairs({
  [q.expires > 0 and K.ends or K.lanes] = K.ruinlanes, [K.configured] = K.ruinconfigured, [K.throttled] = K.ruinthrottled,
}) do
  if redis.call('EXISTS', from) == 1 then
    redis.call('RENAME', from, to)
    redis.call('SET', K.ruin, q.life or '')
    -- Nobody has to come back for the lanes of a queue that ends: they end too.
    if q.expires > 0 then redis.call('PEXPIRE', K.ruin, string.format('%.0f', math.max(1, redis.call('PTTL', to)))) end
  end
end
redis.call('UNLINK', K.queue, K.totals, K.ring, K.kept, K.reserved, K.waiting, K.lanes, K.message, K.envelope, K.body,
  K.leases, K.delayed, K.dead, K.untold, K.reasons, K.finished, K.previous, K.wake, K.ends)
return clear_ruin() == 1 and 2 or 1
