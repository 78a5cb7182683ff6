-- Put lanes where they belong, and the wake token with them. Right on sound data too.
--
-- KEYS[1]  base of the queue's keys
-- ARGV[1]  now   ms; '' = the server's clock
-- ARGV[2]  lane  and more lanes, or none: then only the wake token
-- RETURNS  need 0|1
-- ERRORS   none
-- COST     O(log n) per lane, and for each of at most 1,000 lanes with settings
--@include clock record settings ring wake touch

begin_writes()
local now, q = now_ms(ARGV[1]), queue_state()
-- A keeper who is a minute late is gone: the role is open, and that is need.
if q.keeper and q.keeper_until + 60000 < now then leave_role(q) end
for i = 2, #ARGV do
  local lane = ARGV[i]
  for _, key in ipairs({ K.throttle, K.allowed, K.work }) do
    if redis.call('PTTL', key .. lane) == -1 then redis.call('PEXPIRE', key .. lane, 3600000) end
  end
  if redis.call('EXISTS', K.settings .. lane) == 1 then
    redis.call('ZADD', K.configured, 0, lane)
  else
    redis.call('ZREM', K.configured, lane)
  end
  place(q, lane, now)
end
-- The weights on the ring are counted anew, if few lanes have one of their own.
local own = redis.call('ZRANGE', K.configured, 0, 1000)
if #own <= 1000 then
  q.own_lanes, q.own_weight = 0, 0
  for _, lane in ipairs(own) do
    if redis.call('ZSCORE', K.ring, lane) then weigh(q, lane_settings(q, lane), 1) end
  end
end
redis.call('LTRIM', K.wake, 0, 0)
local need = rearm(q)
touch(q)
return need
