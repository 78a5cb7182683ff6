-- Take one lane off the ring for a while.
--
-- KEYS[1]  base of the queue's keys
-- ARGV[1]  now      ms; '' = the server's clock
-- ARGV[2]  lane     tenant
-- ARGV[3]  period   ms from now; 0 with `shorten` ends the throttle
-- ARGV[4]  shorten  1: an end that lies later moves to this one; 0: the later end stays
-- RETURNS  ms from now until the throttle ends
-- ERRORS   FLARG the period is no number of ms from 0 to 2^40 (34 years)
-- COST     O(log n) of the ring
--@include clock record settings ring wake touch

local period = tonumber(ARGV[3])
if not period or not (period >= 0 and period <= 2 ^ 40) then
  return redis.error_reply(string.format('FLARG period: %q', ARGV[3]))
end

begin_writes()
local now, q, lane = now_ms(ARGV[1]), queue_state(), ARGV[2]
begin_life(q)
local standing = tonumber(redis.call('GET', K.throttle .. lane) or 0) - now
period = math.floor(ARGV[4] == '1' and period or math.max(period, standing))
-- Which lanes are throttled is known for as long as one is: a queue that is deleted forgets it.
redis.call('ZREM', K.throttled, lane, unpack(redis.call('ZRANGEBYSCORE', K.throttled, '-inf', now, 'LIMIT', 0, 100)))
if period > 0 then
  redis.call('ZADD', K.throttled, now + period, lane)
  redis.call('PEXPIRE', K.throttled, string.format('%.0f', math.max(period, redis.call('PTTL', K.throttled))))
  redis.call('SET', K.throttle .. lane, string.format('%.0f', now + period), 'PX', string.format('%.0f', period))
else
  redis.call('DEL', K.throttle .. lane)
end
place(q, lane, now)
rearm(q)
touch(q)
return period
