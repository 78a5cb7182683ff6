-- Grace after a stop: while the server was away, nobody could renew a lease.

-- see(q, lease, now): the queue is in use. If it was not for two thirds of a lease (ms), those who live extend theirs
-- before any is taken. A clock that steps back is no stop.
local function see(q, lease, now)
  local gap = q.seen and now - q.seen
  if gap and gap > lease * 2 / 3 then
    q.grace = now + math.min(5000, math.floor(lease / 6))
    redis.call('HSET', K.queue, 'grace', string.format('%.0f', q.grace))
  end
  if not gap or gap < 0 or gap > lease / 12 then
    redis.call('HSET', K.queue, 'seen', string.format('%.0f', now))
  end
end
