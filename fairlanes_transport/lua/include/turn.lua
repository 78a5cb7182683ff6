-- Turns: whose it is, and what it costs. Only a claim takes them.

-- ring_head(q): the lane whose turn it is, and its tag: the first from the virtual time on, round the circle.
local function ring_head(q)
  local head = redis.call('ZRANGEBYSCORE', K.ring, q.vt, '+inf', 'WITHSCORES', 'LIMIT', 0, 1)
  if not head[1] then head = redis.call('ZRANGE', K.ring, 0, 0, 'WITHSCORES') end
  return head[1], tonumber(head[2])
end

-- pay_more(q, s, lane, tag, paid, cost): the lane's next message is dearer than the one it has paid for.
local function pay_more(q, s, lane, tag, paid, cost)
  local more = ahead(q, tag) + step(cost, s.weight) - step(paid, s.weight)
  redis.call('ZADD', K.ring, (q.vt + math.min(LEAD, more)) % CIRCLE, lane)
  reserve(q, lane, cost)
end

-- next_turn(q, s, lane, tag, credit, now): the lane at `tag` was served, and pays for its next message; `credit` is
-- cost that it had paid too much. One that empties has paid and is forgotten.
local function next_turn(q, s, lane, tag, credit, now)
  if tag < q.vt then q.lap = q.lap + 1 end
  q.vt = tag
  if redis.call('ZCARD', K.ready .. lane) == 0 then
    leave_ring(q, s, lane)
    if q.by_time then
      redis.call('HSET', K.work .. lane, 'lap', string.format('%.0f', q.lap), 'tag', string.format('%.0f', tag))
      redis.call('PEXPIRE', K.work .. lane, 3600000)
    end
    return
  end
  local cost = head_cost(q, lane)
  local lead = step(cost, s.weight) - (credit > 0 and step(credit, s.weight) or 0)
  local at = (next_base(q) + math.max(0, lead)) % CIRCLE
  local full = s.limit and redis.call('SCARD', K.flight .. lane) >= s.limit
  local blocked = not full and s.rate and blocked_until(s, lane, now)
  if not full and not blocked then
    redis.call('ZADD', K.ring, at, lane)
    reserve(q, lane, cost)
    return
  end
  keep(q, lane, lap_of(q, at), at, cost)
  leave_ring(q, s, lane)
  if blocked then
    redis.call('ZADD', K.waiting, blocked, lane)
    schedule(q, blocked)
  end
end
