-- What time has brought: at most 100 of each kind per call; if more is due, the next time is now.

-- sweep_expired(q, policy, now): leases whose deadline has passed. The first failure comes back at once, later
-- ones after their backoff; a running slot is freed and nothing is redelivered.
local function sweep_expired(q, policy, now)
  if in_grace(q, now) then return 0 end
  local tags = redis.call('ZRANGEBYSCORE', K.leases, '-inf', now, 'LIMIT', 0, 100)
  local expired, freed = 0, 0
  for _, tag in ipairs(tags) do
    local r = load_record(tag)
    if r then
      end_lease(tag, r)
      if r.slot then
        forget(tag)
        freed = freed + 1
      else
        r.failures = r.failures + 1
        expired = expired + 1
        fail(q, tag, r, r.failures > 1 and backoff(policy, r.failures) or 0, 'lease expired', policy, now)
      end
      place(q, r.lane, now)
    else
      redis.call('ZREM', K.leases, tag)
    end
  end
  count('expired', expired)
  count('freed', freed)
  return expired + freed
end

-- sweep_due(q, now): delayed messages that are due become ready; lanes whose throttle has ended, or whose rate
-- has a token again, return to the ring.
local function sweep_due(q, now)
  local tags = redis.call('ZRANGEBYSCORE', K.delayed, '-inf', now, 'LIMIT', 0, 100)
  local lanes = {}
  for _, tag in ipairs(tags) do
    redis.call('ZREM', K.delayed, tag)
    local r = load_record(tag)
    if r then
      make_ready(q, tag, r)
      lanes[#lanes + 1] = r.lane
    end
  end
  for _, lane in ipairs(redis.call('ZRANGEBYSCORE', K.waiting, '-inf', now, 'LIMIT', 0, 100)) do
    lanes[#lanes + 1] = lane
  end
  local placed = {}
  for _, lane in ipairs(lanes) do
    if not placed[lane] then place(q, lane, now) end
    placed[lane] = true
  end
  return #tags
end
