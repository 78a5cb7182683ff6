-- A changed default is brought to the lanes in steps that anybody continues; a walk that has begun is need.

-- rewind(q, lane, anew): a lane on the ring, or one that kept its place, comes after one turn at most of
-- what a turn costs now. `anew`: by another measure, so the turn is paid for anew.
local function rewind(q, lane, anew)
  local s = lane_settings(q, lane)
  local tag = tonumber(redis.call('ZSCORE', K.ring, lane))
  if tag then
    local cost = anew and head_cost(q, lane) or reserved(q, lane)
    redis.call('ZADD', K.ring, (q.vt + math.min(ahead(q, tag), step(cost, s.weight))) % CIRCLE, lane)
    return reserve(q, lane, cost)
  end
  local lap, at, cost = kept(lane)
  if not lap then return end
  if anew then cost = head_cost(q, lane) end
  at = q.vt + math.min(ticks_to(q, lap, at), step(cost, s.weight))
  keep(q, lane, q.lap + math.floor(at / CIRCLE), at % CIRCLE, cost)
end

-- walk_on(q, now): the next 100 lanes.
local function walk_on(q, now)
  if not q.walk then return end
  local kind, from = string.match(q.walk, '^(%a+)(.*)$')
  local lanes = redis.call('ZRANGEBYLEX', K.lanes, from, '+', 'LIMIT', 0, 100)
  for _, lane in ipairs(lanes) do
    if kind ~= 'place' then rewind(q, lane, kind == 'anew') end
    place(q, lane, now)
  end
  if #lanes < 100 then
    q.walk = false
    redis.call('HDEL', K.queue, 'walk')
  else
    q.walk = kind .. '(' .. lanes[100]
    redis.call('HSET', K.queue, 'walk', q.walk)
  end
end
