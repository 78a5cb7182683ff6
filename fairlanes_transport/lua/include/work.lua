-- Fairness by time: a lane is charged the worker time that its tasks really took.

-- How much one task moves the mean of its lane, and of the queue.
local LANE_SHARE, QUEUE_SHARE = 0.2, 0.05

-- true_up(q, r, spent): a task has ended after `spent` ms of worker time; it was charged an estimate at its
-- claim. The lane's place moves by the difference: on the ring, or where it is kept, or, if the lane is empty, what
-- it owes; that is forgotten after an hour.
local function true_up(q, r, spent)
  if not q.by_time or not spent or spent <= 0 then return end
  local lane, seconds, key, s = r.lane, spent / 1000, K.work .. r.lane, lane_settings(q, r.lane)
  local known = redis.call('HMGET', key, 'mean', 'lap', 'tag')
  local mean = tonumber(known[1] or seconds)
  q.mean = q.mean + QUEUE_SHARE * (seconds - q.mean)
  redis.call('HSET', key, 'mean', string.format('%.17g', mean + LANE_SHARE * (seconds - mean)))
  redis.call('HSET', K.queue, 'mean', string.format('%.17g', q.mean))
  local more = seconds - r.cost
  local ticks = more > 0 and step(more, s.weight) or more < 0 and -step(-more, s.weight) or 0
  local tag = tonumber(redis.call('ZSCORE', K.ring, lane))
  local lap, at, cost = kept(lane)
  if tag then
    redis.call('ZADD', K.ring, (q.vt + math.max(0, math.min(LEAD, ahead(q, tag) + ticks))) % CIRCLE, lane)
  elseif lap then
    keep(q, lane, lap + math.floor((at + ticks) / CIRCLE), (at + ticks) % CIRCLE, cost)
  else
    local ends = tonumber(known[3] or q.vt) + ticks
    redis.call('HSET', key, 'lap', string.format('%.0f', tonumber(known[2] or q.lap) + math.floor(ends / CIRCLE)),
      'tag', string.format('%.0f', ends % CIRCLE))
  end
  redis.call('PEXPIRE', key, 3600000)
end
