-- The wake protocol: one token while there is need, and one consumer who keeps the time.

-- first_time(key): the lowest score of a sorted set of times, or nil.
local function first_time(key)
  local head = redis.call('ZRANGE', key, 0, 0, 'WITHSCORES')
  return head[2] and tonumber(head[2])
end

-- keep_time(q, consumer, will_park, now): a consumer that is about to park takes the timekeeper's role if it
-- is free or its holder is overdue; one that stays busy gives it back. Returns in how many ms the keeper has
-- to claim again, or -1: not the keeper.
local function keep_time(q, consumer, will_park, now)
  local mine = q.keeper == consumer
  if not will_park then
    if mine then leave_role(q) end
    return -1
  end
  if q.keeper and not mine and q.keeper_until >= now then return -1 end
  local next_at
  for _, key in ipairs({ K.delayed, K.waiting, K.leases }) do
    local at = first_time(key)
    if at and (not next_at or at < next_at) then next_at = at end
  end
  if not next_at then
    if q.keeper then leave_role(q) end
    return -1
  end
  next_at = math.max(next_at, now)
  redis.call('HSET', K.queue, 'keeper', consumer, 'keeper_until', string.format('%.0f', next_at))
  q.keeper, q.keeper_until = consumer, next_at
  return next_at - now
end

-- rearm(q): make the token present if and only if there is need; returns 1 if there is.
local function rearm(q)
  local need = not q.paused and (redis.call('EXISTS', K.ring) == 1
    or (not q.keeper and redis.call('EXISTS', K.delayed, K.waiting) > 0))
  local armed = redis.call('EXISTS', K.wake) == 1
  if need and not armed then
    redis.call('RPUSH', K.wake, '1')
  elseif armed and not need then
    redis.call('DEL', K.wake)
  end
  return need and 1 or 0
end

-- touch(q): a queue with x-expires ends when it is not used; every use moves its end.
local function touch(q)
  if q.expires == 0 then return end
  local keys = { K.totals, K.ring, K.waiting, K.lanes, K.configured, K.message, K.envelope, K.body, K.leases,
    K.delayed, K.dead, K.reasons, K.finished, K.wake, K.queue }
  for _, lane in ipairs(redis.call('ZRANGE', K.lanes, 0, 99)) do
    keys[#keys + 1] = K.ready .. lane
    keys[#keys + 1] = K.flight .. lane
  end
  for _, key in ipairs(keys) do redis.call('PEXPIRE', key, q.expires) end
end
