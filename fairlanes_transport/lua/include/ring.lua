-- The ring: which lanes can be served now, and in which order. `place` is the only way on and off it.

-- A lane joins this little before the place of one that had its turn at the same moment: so it is served
-- first where virtual times tie, and nobody is served twice before a lane that waits once.
local JOIN = 1 - 2 ^ -20

-- leave_role(q): nobody keeps the time any more.
local function leave_role(q)
  redis.call('HDEL', K.queue, 'keeper', 'keeper_until')
  q.keeper = false
end

-- schedule(q, at): something falls due at `at` (ms). A keeper who would wake later is none.
local function schedule(q, at)
  q.timeless = false
  if q.keeper and at < q.keeper_until then leave_role(q) end
end

-- tokens_at(s, lane, now): what the lane's rate bucket holds.
local function tokens_at(s, lane, now)
  local v = redis.call('HMGET', K.bucket .. lane, 'tokens', 'at')
  if not v[1] then return s.burst end
  return math.min(s.burst, tonumber(v[1]) + math.max(0, now - tonumber(v[2])) * s.rate)
end

-- spend_token(s, lane, now): a claim takes one token; the bucket ends by itself when it would be full.
local function spend_token(s, lane, now)
  local left = tokens_at(s, lane, now) - 1
  redis.call('HSET', K.bucket .. lane, 'tokens', string.format('%.17g', left), 'at', string.format('%.0f', now))
  redis.call('PEXPIRE', K.bucket .. lane, string.format('%.0f', math.ceil((s.burst - left) / s.rate) + 1000))
end

-- blocked_until(s, lane, now): the time (ms) at which throttle and rate let the lane back, or nil.
local function blocked_until(s, lane, now)
  local at = tonumber(redis.call('GET', K.throttle .. lane) or 0)
  if s.rate then
    local tokens = tokens_at(s, lane, now)
    -- The bucket refills in fractions: what is a token up to rounding is a token.
    if tokens < 1 - 1e-9 then at = math.max(at, now + math.ceil((1 - tokens) / s.rate)) end
  end
  return at > now and at or nil
end

-- turn(q, s, lane): what one turn costs the lane in virtual time when it joins.
local function turn(q, s, lane)
  if not q.by_time then return 1 / s.weight end
  local work = redis.call('HMGET', K.work .. lane, 'mean', 'debt')
  redis.call('HDEL', K.work .. lane, 'debt')
  return math.max(0, tonumber(work[1] or q.mean) + tonumber(work[2] or 0)) / s.weight
end

-- place(q, lane, now): put the lane where it belongs: on the ring, in `waiting`, or on neither.
local function place(q, lane, now)
  local s = lane_settings(q, lane)
  local ready = redis.call('ZCARD', K.ready .. lane)
  local flight = (s.limit or ready == 0) and redis.call('SCARD', K.flight .. lane) or 0
  local servable = ready > 0 and not s.paused and not (s.limit and flight >= s.limit)
  local blocked = servable and blocked_until(s, lane, now)
  if servable and not blocked then
    redis.call('ZREM', K.waiting, lane)
    if not redis.call('ZSCORE', K.ring, lane) then
      -- Virtual time starts over when the ring has been empty.
      if redis.call('EXISTS', K.ring) == 0 then
        q.vt = 0
        redis.call('HSET', K.queue, 'vt', 0)
      end
      redis.call('ZADD', K.ring, q.vt + turn(q, s, lane) * JOIN, lane)
    end
  else
    redis.call('ZREM', K.ring, lane)
    if blocked then
      redis.call('ZADD', K.waiting, blocked, lane)
      schedule(q, blocked)
    else
      redis.call('ZREM', K.waiting, lane)
    end
  end
  if ready + flight > 0 then
    redis.call('ZADD', K.lanes, 0, lane)
  else
    redis.call('ZREM', K.lanes, lane)
  end
end

-- next_turn(q, s, lane, vt, now): a lane on the ring was served; its next turn is at `vt`, if it can have one.
local function next_turn(q, s, lane, vt, now)
  local servable = redis.call('ZCARD', K.ready .. lane) > 0
    and not (s.limit and redis.call('SCARD', K.flight .. lane) >= s.limit)
  local blocked = servable and s.rate and blocked_until(s, lane, now)
  if servable and not blocked then
    redis.call('ZADD', K.ring, vt, lane)
  else
    redis.call('ZREM', K.ring, lane)
    if blocked then
      redis.call('ZADD', K.waiting, blocked, lane)
      schedule(q, blocked)
    end
  end
end

-- offer(q, lane, now): the lane has one more ready, or one less in flight; on the ring, that changes nothing.
local function offer(q, lane, now)
  if not redis.call('ZSCORE', K.ring, lane) then place(q, lane, now) end
end

-- make_ready(q, tag, r): into its lane, at the place it had or, the first time, at the end of its priority.
-- The caller places the lane.
local function make_ready(q, tag, r)
  if r.score == 0 then
    r.score = r.priority * 2 ^ 49 + redis.call('HINCRBY', K.queue, 'arrivals', 1)
    save_record(tag, r)
  end
  redis.call('ZADD', K.ready .. r.lane, r.score, tag)
end

-- end_lease(tag, r): the message, or the running slot, is no longer in flight. The caller places the lane.
local function end_lease(tag, r)
  redis.call('SREM', K.flight .. r.lane, tag)
  return redis.call('ZREM', K.leases, tag) == 1
end
