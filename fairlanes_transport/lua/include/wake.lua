-- The wake protocol: one token while there is need, and one consumer who keeps the time.

-- first_time(key): the lowest score of a sorted set of times, or nil.
local function first_time(key)
  local head = redis.call('ZRANGE', key, 0, 0, 'WITHSCORES')
  return head[2] and tonumber(head[2])
end

-- A keeper that is dead is missed by its deputy, this many ms after it should have claimed.
local GRACE = 50

-- assign(q, role, consumer, at): the consumer has the role until `at`.
local function assign(q, role, consumer, at)
  redis.call('HSET', K.queue, role, consumer, role .. '_until', string.format('%.0f', at))
  q[role], q[role .. '_until'] = consumer, at
end

-- leave_deputy(q, consumer): it is the deputy no more, if it was.
local function leave_deputy(q, consumer)
  if q.deputy == consumer then redis.call('HDEL', K.queue, 'deputy', 'deputy_until') end
end

-- in_grace(q, now): no lease is taken yet (include grace).
local function in_grace(q, now) return q.grace > now and q.grace <= now + 5000 end

-- next_time(q, now): when the next timed thing falls due: a message, a throttle or rate, a lease; or nil.
local function next_time(q, now)
  local next_at
  for _, key in ipairs(q.timeless and { K.leases } or { K.delayed, K.waiting, K.leases }) do
    local at = first_time(key)
    if at and key == K.leases and in_grace(q, now) then at = math.max(at, q.grace) end
    if at and (not next_at or at < next_at) then next_at = at end
  end
  return next_at and math.max(next_at, now)
end

-- keep_time(q, consumer, will_park, now): a consumer that is about to park takes the timekeeper's role if it
-- is free or its holder is overdue, or else the deputy's, who looks whether the keeper has claimed; one that
-- stays busy gives both back. Returns in how many ms the consumer has to claim again, or -1: it has no role.
local function keep_time(q, consumer, will_park, now)
  if not will_park then
    if q.keeper == consumer then leave_role(q) end
    leave_deputy(q, consumer)
    return -1
  end
  if q.keeper and q.keeper ~= consumer and q.keeper_until + GRACE > now then
    if q.deputy and q.deputy ~= consumer and q.deputy_until + GRACE > now then return -1 end
    assign(q, 'deputy', consumer, q.keeper_until + GRACE)
    return q.deputy_until - now
  end
  leave_deputy(q, consumer)
  local next_at = next_time(q, now)
  if not next_at then
    if q.keeper then leave_role(q) end
    return -1
  end
  assign(q, 'keeper', consumer, next_at)
  return next_at - now
end

-- rearm(q): what a script ends with. The ring's state is saved, and the token is present if and only if there is need;
-- returns 1 if there is.
local function rearm(q)
  save_ring(q)
  local need = not q.paused and (q.walk or redis.call('EXISTS', K.ring) == 1
    or (not q.keeper and not q.timeless and redis.call('EXISTS', K.delayed, K.waiting) > 0))
  local armed = redis.call('EXISTS', K.wake) == 1
  if need and not armed then
    redis.call('RPUSH', K.wake, '1')
  elseif armed and not need then
    -- Not DEL: who only publishes needs no right to delete keys.
    redis.call('LTRIM', K.wake, 1, 0)
  end
  return need and 1 or 0
end
