-- Give a queue that had no end one: the keys of its lanes get the names, and the end, of those of a queue that has.
--
-- KEYS[1]  base of the queue's keys
-- ARGV[1]  expires  ms without use until the queue is gone
-- RETURNS  1 done, 0 nothing to do: the queue has an end, or too many lanes
-- ERRORS   none
-- COST     O(lanes), 250 of them at most
--@include clock settings touch

begin_writes()
local q = queue_state()
local lanes = redis.call('ZCARD', K.lanes) + redis.call('ZCARD', K.configured)
if q.expires > 0 or lanes > ENDS_AT_ONCE then return 0 end
local old = { ready = K.ready, flight = K.flight, settings = K.settings, throttle = K.throttle, allowed = K.allowed,
  work = K.work }
new_life(q)
for _, index in ipairs({ K.lanes, K.configured }) do
  for _, lane in ipairs(redis.call('ZRANGE', index, 0, -1)) do
    for part, from in pairs(old) do
      if redis.call('EXISTS', from .. lane) == 1 then redis.call('RENAME', from .. lane, K[part] .. lane) end
    end
    lane_settings(q, lane)
  end
end
redis.call('HSET', K.queue, 'expires', ARGV[1])
q.expires = tonumber(ARGV[1])
touch(q, true)
return 1
