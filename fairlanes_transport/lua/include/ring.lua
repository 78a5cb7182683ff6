-- The ring: the lanes that can be served now, in the order of their next turn. `place` is the only way on and off it.
--
-- A lane's tag is the virtual time at which its next message, paid for beforehand, is served: whole ticks on a circle,
-- so that nothing is rounded and nothing ends. `vt` is the tag that was served last, `lap` counts its rounds, and
-- `last` is the base that was given last: each base is later than the one before, so that first come is first served.
local UNIT, CIRCLE, LEAD = 2 ^ 28, 2 ^ 52, 2 ^ 51

-- step(cost, weight): ticks that a turn costs. Rounded up: who has twice the weight never pays less than half.
local function step(cost, weight)
  return math.max(1, math.min(LEAD, math.ceil(cost * UNIT / weight)))
end

-- ahead(q, tag): ticks from the virtual time to the tag of a lane on the ring.
local function ahead(q, tag) return (tag - q.vt) % CIRCLE end

-- next_base(q): the later of the virtual time and one tick after the last base.
local function next_base(q)
  local base = (q.last + 1) % CIRCLE
  q.last = ahead(q, base) >= LEAD and q.vt or base
  return q.last
end

-- save_ring(q): write what has changed of the ring's state.
local function save_ring(q)
  local changed
  for name, old in pairs(q.stored) do
    if q[name] ~= old then
      changed = changed or {}
      changed[#changed + 1], changed[#changed + 2] = name, string.format('%.0f', q[name])
      q.stored[name] = q[name]
    end
  end
  if changed then redis.call('HSET', K.queue, unpack(changed)) end
end

-- weigh(q, s, sign): a lane comes on the ring (1) or leaves it (-1). Of those with a weight of their own the number and
-- the sum, in thousandths, are kept; the others have the default.
local function weigh(q, s, sign)
  if not s.own_weight then return end
  q.own_lanes = q.own_lanes + sign
  q.own_weight = q.own_weight + sign * math.floor(s.weight * 1000 + 0.5)
end

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

-- What a lane with work may be late (ms) and make up for, and the shortest time that a rate holds a lane: so there is
-- no timer per message.
local CARRY, NAP = 100, 20

-- next_start(s, lane, now, idle): the time (ms) by which all starts of the lane so far are paid for at its rate. Kept
-- near `now`: an idle lane saves nothing beyond its burst, and a clock that steps back stops nobody.
local function next_start(s, lane, now, idle)
  local at = redis.call('GET', K.allowed .. lane)
  local slack = (s.burst - 1) / s.rate
  local carry = at and not idle and math.max(0, CARRY - slack) or 0
  return math.max(math.min(tonumber(at or 0), now + s.burst / s.rate), now - carry)
end

-- save_start(s, lane, at, now): it ends by itself when it says nothing any more.
local function save_start(s, lane, at, now)
  redis.call('SET', K.allowed .. lane, string.format('%.17g', at), 'PX',
    string.format('%.0f', math.ceil(math.max(0, at - now)) + 1000))
end

-- spend_start(s, lane, now): a claim takes one start.
local function spend_start(s, lane, now)
  save_start(s, lane, next_start(s, lane, now) + 1 / s.rate, now)
end

-- blocked_until(s, lane, now, idle): the time (ms) at which throttle and rate let the lane back, or nil.
local function blocked_until(s, lane, now, idle)
  local at = tonumber(redis.call('GET', K.throttle .. lane) or 0)
  if s.rate then
    -- Rates are fractions: a hundredth of a millisecond is rounding.
    local free = math.ceil(next_start(s, lane, now, idle) - (s.burst - 1) / s.rate - 0.01)
    if free > now then at = math.max(at, free, s.rate * NAP < 1 and 0 or now + NAP) end
  end
  return at > now and at or nil
end

-- head_cost(q, lane): what the lane's next message costs; by time, what its messages take on average.
local function head_cost(q, lane)
  if q.by_time then return tonumber(redis.call('HGET', K.work .. lane, 'mean') or q.mean) end
  if not q.costs then return 1 end
  local tag = redis.call('ZRANGE', K.ready .. lane, 0, 0)[1]
  local r = tag and load_record(tag)
  return r and r.cost or 1
end

-- reserved(q, lane): the cost that is in the lane's tag.
local function reserved(q, lane)
  if not (q.costs or q.by_time) then return 1 end
  return tonumber(redis.call('HGET', K.reserved, lane) or 1)
end

-- reserve(q, lane, cost): 1 is not written.
local function reserve(q, lane, cost)
  if not (q.costs or q.by_time) then return end
  if cost == 1 then
    redis.call('HDEL', K.reserved, lane)
  else
    redis.call('HSET', K.reserved, lane, string.format('%.17g', cost))
  end
end

-- ticks_to(q, lap, tag): ticks from the virtual time to a tag that was kept; below 0 when it has passed.
local function ticks_to(q, lap, tag) return (lap - q.lap) * CIRCLE + tag - q.vt end

-- lap_of(q, tag): in which round of the virtual time a tag of the ring lies.
local function lap_of(q, tag) return tag < q.vt and q.lap + 1 or q.lap end

-- keep(q, lane, lap, tag, cost): the lane leaves with work: it will come back where it is now.
local function keep(q, lane, lap, tag, cost)
  redis.call('HSET', K.kept, lane, string.format('%.0f %.0f %.17g', lap, tag, cost))
end

-- kept(lane): round, tag and cost of a lane that left with work; or nil.
local function kept(lane)
  local text = redis.call('HGET', K.kept, lane)
  if not text then return nil end
  local lap, tag, cost = string.match(text, '^(%S+) (%S+) (%S+)$')
  return tonumber(lap), tonumber(tag), tonumber(cost)
end

-- owed(q, lane): ticks that an empty lane still owes from tasks that took longer than was charged.
local function owed(q, lane)
  if not q.by_time then return 0 end
  local clock = redis.call('HMGET', K.work .. lane, 'lap', 'tag')
  if not clock[1] then return 0 end
  redis.call('HDEL', K.work .. lane, 'lap', 'tag')
  return math.max(0, ticks_to(q, tonumber(clock[1]), tonumber(clock[2])))
end

-- join(q, s, lane): on the ring, one turn from now; or at the place that it kept, but not before now.
local function join(q, s, lane)
  local cost, base = head_cost(q, lane), next_base(q)
  local lead = step(cost, s.weight)
  local lap, tag, paid = kept(lane)
  if lap then
    redis.call('HDEL', K.kept, lane)
    lead = ticks_to(q, lap, tag) - ahead(q, base) + lead - step(paid, s.weight)
  else
    lead = lead + owed(q, lane)
  end
  redis.call('ZADD', K.ring, (base + math.max(0, math.min(LEAD, lead))) % CIRCLE, lane)
  reserve(q, lane, cost)
  weigh(q, s, 1)
end

-- leave_ring(q, s, lane): off the ring; its reservation goes with it.
local function leave_ring(q, s, lane)
  if redis.call('ZREM', K.ring, lane) == 0 then return end
  if q.costs or q.by_time then redis.call('HDEL', K.reserved, lane) end
  weigh(q, s, -1)
end

-- place(q, lane, now, off): put the lane where it belongs: on the ring, in `waiting`, or on neither. `off`: it is
-- known not to be on the ring.
local function place(q, lane, now, off)
  local s = lane_settings(q, lane)
  local ready = redis.call('ZCARD', K.ready .. lane)
  local flight = (s.limit or ready == 0) and redis.call('SCARD', K.flight .. lane) or 0
  local servable = ready > 0 and not s.paused and not (s.limit and flight >= s.limit)
  -- Saved, as a bound that follows a clock that has stepped back would hold the lane until the clock is there again.
  if servable and s.rate then save_start(s, lane, next_start(s, lane, now, ready == 1), now) end
  local blocked = servable and blocked_until(s, lane, now)
  local tag = not off and tonumber(redis.call('ZSCORE', K.ring, lane))
  if servable and not blocked then
    redis.call('ZREM', K.waiting, lane)
    if not tag then join(q, s, lane) end
  else
    if tag then
      if ready > 0 then keep(q, lane, lap_of(q, tag), tag, reserved(q, lane)) end
      leave_ring(q, s, lane)
    elseif ready == 0 then
      redis.call('HDEL', K.kept, lane)
    end
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

-- offer(q, lane, now): the lane has one more ready, or one less in flight; on the ring, that changes nothing.
local function offer(q, lane, now)
  if not redis.call('ZSCORE', K.ring, lane) then place(q, lane, now, true) end
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
