-- What happens to a message that failed. `policy` is one argument, seven numbers with blanks between:
-- backoff base (ms), factor, cap (ms), max_failures (0 = never dead), dead_letter_max, dead_letter_ttl (ms),
-- and a random number in [0, 1) for the jitter (a script has none of its own).
local function parse_policy(text)
  local base, factor, cap, max_failures, dead_max, dead_ttl, random =
    string.match(text, '^(%S+) (%S+) (%S+) (%S+) (%S+) (%S+) (%S+)$')
  return {
    base = tonumber(base), factor = tonumber(factor), cap = tonumber(cap),
    max_failures = tonumber(max_failures), dead_max = tonumber(dead_max), dead_ttl = tonumber(dead_ttl),
    random = tonumber(random),
  }
end

-- backoff(policy, failures): ms to wait after failure number `failures`: base * factor^(n-1), capped, of which
-- the upper half is random, so that what failed together does not come back together.
local function backoff(policy, failures)
  -- The growth may be infinite, and 0 times that is no number.
  if policy.base == 0 then return 0 end
  local full = math.min(policy.cap, policy.base * policy.factor ^ (failures - 1))
  policy.random = (policy.random + 0.6180339887498949) % 1
  return math.floor(full * (0.5 + policy.random / 2))
end

-- trim_dead(policy, now): dead letters beyond their number or age go, at most 100 per call, and are counted.
local function trim_dead(policy, now)
  local excess = math.min(100, redis.call('ZCARD', K.dead) - policy.dead_max)
  local tags = {}
  if excess > 0 then tags = redis.call('ZRANGE', K.dead, 0, excess - 1) end
  if #tags == 0 then
    tags = redis.call('ZRANGEBYSCORE', K.dead, '-inf', now - policy.dead_ttl, 'LIMIT', 0, 100)
  end
  for _, tag in ipairs(tags) do
    redis.call('ZREM', K.dead, tag)
    redis.call('ZREM', K.untold, tag)
    redis.call('HDEL', K.reasons, tag)
    forget(tag)
  end
  count('trimmed', #tags)
end

-- bury(tag, r, reason, policy, now): the message becomes a dead letter.
local function bury(tag, r, reason, policy, now)
  save_record(tag, r)
  redis.call('ZADD', K.dead, now, tag)
  redis.call('HSET', K.reasons, tag, reason)
  count('died', 1)
  trim_dead(policy, now)
end

-- fail(q, tag, r, wait, reason, policy, now): count a failure; the message comes back after `wait` ms (0: now),
-- or dies when its failures are used up, and its sender is to be told: then it returns true. The caller has ended its
-- lease and places its lane.
local function fail(q, tag, r, wait, reason, policy, now)
  if policy.max_failures > 0 and r.failures >= policy.max_failures then
    redis.call('ZADD', K.untold, now, tag)
    bury(tag, r, reason, policy, now)
    return true
  end
  save_record(tag, r)
  if wait <= 0 then
    make_ready(q, tag, r)
  else
    redis.call('ZADD', K.delayed, now + wait, tag)
    schedule(q, now + wait)
  end
end
