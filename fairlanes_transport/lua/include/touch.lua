-- The end of a queue with x-expires. The queue's own keys end together; every use gives what it has made that end,
-- and moves it when a twentieth of the time has gone by. A lane's keys end later, and are moved in steps: `ends`
-- holds when. So one call does little, whatever the number of lanes, and the queue never outlives a lane.

-- Lanes whose end one call moves.
local ENDS_AT_ONCE = 250

-- new_life(q): the lanes' keys get names that no earlier life of the queue has used.
local function new_life(q)
  local time = redis.call('TIME')
  q.life = string.format('%.0f', time[1] * 1000000 + time[2])
  redis.call('HSET', K.queue, 'life', q.life)
  enter_life(q.life)
  q.lanes = {}
end

-- begin_life(q): before the first key of a lane, in a queue that nobody has declared.
local function begin_life(q)
  if not q.declared and not q.life and redis.call('EXISTS', K.ruin) == 1 then new_life(q) end
end

-- keep_lane(lane, at): the lane's keys end at `at` (ms); what has no keys is forgotten.
local function keep_lane(lane, at)
  local kept = 0
  for _, kind in ipairs({ K.ready, K.flight, K.settings }) do
    kept = kept + redis.call('PEXPIREAT', kind .. lane, string.format('%.0f', at))
  end
  if kept > 0 then
    redis.call('ZADD', K.ends, at, lane)
  else
    redis.call('ZREM', K.ends, lane)
  end
end

-- touch(q, changed): the queue is used. `changed`: its time is new.
local function touch(q, changed)
  if q.expires == 0 then return end
  local clock = redis.call('TIME')
  local time = clock[1] * 1000 + math.floor(clock[2] / 1000)
  -- The queue is used once in `expires` at least, and then 250 lanes are moved: so lanes live for longer the more
  -- there are.
  local span = math.ceil(q.expires * (2.2 + redis.call('ZCARD', K.ends) / 125))
  for lane in pairs(q.lanes) do
    local at = tonumber(redis.call('ZSCORE', K.ends, lane) or 0)
    keep_lane(lane, at > time + q.expires * 1.1 and at or time + span)
  end
  local left = redis.call('PTTL', K.queue)
  if changed or left < q.expires then
    -- Not ZRANGEBYSCORE: who only publishes has no right to it.
    local due = redis.call('ZRANGE', K.ends, 0, ENDS_AT_ONCE - 1, 'WITHSCORES')
    for i = 1, #due, 2 do
      if tonumber(due[i + 1]) > time + span * 0.6 then break end
      keep_lane(due[i], time + span)
    end
    left = math.ceil(q.expires * 1.05)
    local first = redis.call('ZRANGE', K.ends, 0, 0, 'WITHSCORES')[2]
    if first then left = math.max(1, math.min(left, tonumber(first) - time)) end
    redis.call('PEXPIRE', K.queue, string.format('%.0f', left))
  end
  for _, key in ipairs({ K.totals, K.ring, K.kept, K.reserved, K.waiting, K.lanes, K.configured, K.message, K.envelope, K.body, K.leases,
    K.delayed, K.dead, K.untold, K.reasons, K.wake, K.ends }) do
    redis.call('PEXPIRE', key, string.format('%.0f', left))
  end
end
