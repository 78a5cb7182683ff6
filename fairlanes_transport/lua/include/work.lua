-- Fairness by time: a lane is charged the worker time that its tasks really took.

-- A lane that took far more than was estimated waits for it, but not for longer than this many seconds of work.
local DEBT_CAP = 300
-- How much one task moves the mean of its lane, and of the queue.
local LANE_SHARE, QUEUE_SHARE = 0.2, 0.05

-- true_up(q, r, spent): a task has ended after `spent` ms of worker time; it was charged an estimate at its
-- claim. The lane's place on the ring moves by the difference; a lane that is not on it remembers the difference
-- for an hour, as debt for when it joins.
local function true_up(q, r, spent)
  if not q.by_time or not spent or spent <= 0 then return end
  local seconds, key, s = spent / 1000, K.work .. r.lane, lane_settings(q, r.lane)
  local known = redis.call('HMGET', key, 'mean', 'debt')
  local mean = tonumber(known[1] or seconds)
  q.mean = q.mean + QUEUE_SHARE * (seconds - q.mean)
  redis.call('HSET', key, 'mean', string.format('%.17g', mean + LANE_SHARE * (seconds - mean)))
  redis.call('HSET', K.queue, 'mean', string.format('%.17g', q.mean))
  local more, vt = seconds - r.cost, redis.call('ZSCORE', K.ring, r.lane)
  if vt then
    redis.call('ZADD', K.ring, math.max(q.vt, tonumber(vt) + more / s.weight), r.lane)
  else
    local debt = math.max(-DEBT_CAP, math.min(DEBT_CAP, tonumber(known[2] or 0) + more))
    redis.call('HSET', key, 'debt', string.format('%.17g', debt))
  end
  redis.call('PEXPIRE', key, 3600000)
end
