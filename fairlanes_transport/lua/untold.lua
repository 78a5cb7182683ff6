-- Take a dead letter whose sender has not been told, until its time is over; and forget one that has been told.
--
-- Who takes one and does not come back leaves it to another: after `lease`, or, if that is later, when as much time
-- as since its death has passed again. So what cannot be told is tried less and less often.
--
-- KEYS[1]  base of the queue's keys
-- ARGV[1]  now    ms; '' = the server's clock
-- ARGV[2]  lease  ms until somebody else may take it
-- ARGV[3]  told   tag of one whose sender has been told; '' = none
-- RETURNS  { tag, lane, failures, reason, envelope, body }; {} if there is none
-- ERRORS   none
-- COST     O(log n); entries that are dead letters no more go, 100 at most
--@include clock record settings touch

begin_writes()
local now, taken = now_ms(ARGV[1]), {}
if ARGV[3] ~= '' then redis.call('ZREM', K.untold, ARGV[3]) end
for _, tag in ipairs(redis.call('ZRANGEBYSCORE', K.untold, '-inf', now, 'LIMIT', 0, 100)) do
  local died, r = tonumber(redis.call('ZSCORE', K.dead, tag) or ''), load_record(tag)
  if died and r and r.lane then
    redis.call('ZADD', K.untold, now + math.max(tonumber(ARGV[2]), now - died), tag)
    taken = { tag, r.lane, r.failures, redis.call('HGET', K.reasons, tag) or '',
      redis.call('HGET', K.envelope, tag) or '', redis.call('HGET', K.body, tag) or '' }
    break
  end
  redis.call('ZREM', K.untold, tag)
end
touch(queue_state())
return taken
