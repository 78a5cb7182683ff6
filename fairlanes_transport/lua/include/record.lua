-- A message's record, packed in one hash field: nine values, blank between, the lane last (it may hold blanks).
--   attempt   claims so far; never falls while the message lives
--   failures  expiries and rejects with requeue
--   priority  0 (first) to 9
--   score     order in its lane: priority * 2^49 + arrival; 0 until the message is first ready
--   cost      what a claim charges its lane
--   born      ms, when it was enqueued
--   slot      1: acked early, only its place among the running ones is kept
--   token     of the last claim; '-' before the first
--   lane      tenant
local RECORD = '^(%d+) (%d+) (%d+) (%d+) (%S+) (%d+) (%d) (%S+) (.*)$'

local function load_record(tag)
  local raw = redis.call('HGET', K.message, tag)
  if not raw then return nil end
  local attempt, failures, priority, score, cost, born, slot, token, lane = string.match(raw, RECORD)
  return {
    attempt = tonumber(attempt), failures = tonumber(failures), priority = tonumber(priority),
    score = tonumber(score), cost = tonumber(cost), born = tonumber(born), slot = slot == '1',
    token = token, lane = lane,
  }
end

local function save_record(tag, r)
  -- The lane is appended: %s of string.format ends at a zero byte.
  redis.call('HSET', K.message, tag, string.format('%.0f %.0f %.0f %.0f %.17g %.0f %s ', r.attempt, r.failures,
    r.priority, r.score, r.cost, r.born, r.slot and '1' or '0') .. r.token .. ' ' .. r.lane)
end

-- forget(tag): nothing of the message remains but what the caller has taken out of the sorted sets.
local function forget(tag)
  redis.call('HDEL', K.message, tag)
  redis.call('HDEL', K.envelope, tag)
  redis.call('HDEL', K.body, tag)
end

local function count(total, by)
  if by > 0 then redis.call('HINCRBY', K.totals, total, by) end
end
