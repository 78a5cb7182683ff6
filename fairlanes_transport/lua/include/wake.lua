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

-- next_time(q, now): when the next timed thing falls due: a message, a throttle or rate, a lease; or nil.
local function next_time(q, now)
  local next_at
  for _, key in ipairs(q.timeless and { K.leases } or { K.delayed, K.waiting, K.leases }) do
    local at = first_time(key)
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

-- rearm(q): make the token present if and only if there is need; returns 1 if there is.
local function rearm(q)
  local need = not q.paused and (redis.call('EXISTS', K.ring) == 1
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

-- touch(q, changed): a queue with x-expires ends when it is not used, all of it at one moment. Every use gives what
-- it has made that end; the end itself lies a little later than asked for, so that it has to be moved only when a
-- twentieth of the time has gone by. `changed`: `expires` is new; 0 takes the end away. (Of more than 10,000 lanes
-- the rest keeps its old end.)
local function touch(q, changed)
  if q.expires == 0 and not changed then return end
  local left = redis.call('PTTL', K.queue)
  local move = changed or left < q.expires
  if move then left = math.ceil(q.expires * 1.05) end
  local keys = { K.totals, K.ring, K.waiting, K.lanes, K.configured, K.message, K.envelope, K.body, K.leases,
    K.delayed, K.dead, K.reasons, K.finished, K.wake }
  local function add(lane)
    for _, kind in ipairs({ K.ready, K.flight, K.settings }) do keys[#keys + 1] = kind .. lane end
  end
  if move then
    keys[#keys + 1] = K.queue
    for _, index in ipairs({ K.lanes, K.configured }) do
      for _, lane in ipairs(redis.call('ZRANGE', index, 0, 9999)) do add(lane) end
    end
  else
    for lane in pairs(q.lanes) do add(lane) end
  end
  for _, key in ipairs(keys) do
    if q.expires > 0 then
      redis.call('PEXPIRE', key, left)
    elseif key ~= K.finished then
      redis.call('PERSIST', key)
    end
  end
end
