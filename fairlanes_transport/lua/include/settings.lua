-- enter_life(life): spell the lanes' keys of this life of the queue. A queue that ends, and one that is declared
-- before all of a deleted one is removed, has a life of its own, so that nothing of the last one comes back.
local function enter_life(life)
  if not life then return end
  for _, part in ipairs({ 'ready', 'flight', 'settings', 'throttle', 'allowed', 'work' }) do
    if K[part] then K[part] = K.base .. part .. '@' .. life .. ':' end
  end
end

-- queue_state(): one read of what most scripts need to know of the queue. `timeless`: it was seen that no message
-- is delayed, and no lane waits for a time.
local function queue_state()
  local v = redis.call('HMGET', K.queue, 'vt', 'paused', 'keeper', 'keeper_until', 'expires', 'fairness',
    'weight', 'limit', 'rate', 'burst', 'max_size', 'mean', 'deputy', 'deputy_until', 'last', 'lap', 'own_lanes',
    'own_weight', 'costs', 'walk', 'life', 'finished_since', 'seen', 'grace')
  enter_life(v[21])
  local q = {
    vt = tonumber(v[1] or 0), paused = v[2] == '1', keeper = v[3], keeper_until = tonumber(v[4] or 0),
    expires = tonumber(v[5] or 0), by_time = v[6] == 'time', mean = tonumber(v[12] or 1),
    weight = v[7], limit = v[8], rate = v[9], burst = v[10], max_size = v[11],
    deputy = v[13], deputy_until = tonumber(v[14] or 0), timeless = false, lanes = {},
    last = tonumber(v[15] or 0), lap = tonumber(v[16] or 0), own_lanes = tonumber(v[17] or 0),
    own_weight = tonumber(v[18] or 0), costs = v[19] == '1', walk = v[20],
    declared = v[5] ~= false, life = v[21] or nil, finished_since = tonumber(v[22] or 0), seen = tonumber(v[23] or nil),
    grace = tonumber(v[24] or 0),
  }
  q.stored = { vt = q.vt, last = q.last, lap = q.lap, own_lanes = q.own_lanes, own_weight = q.own_weight }
  return q
end

-- lane_settings(q, lane): the lane's own settings over the queue's defaults, read once per script run.
-- A value that is not a number ('none') means: no such bound here, whatever the default.
local function lane_settings(q, lane)
  local known = q.lanes[lane]
  if known then return known end
  local v = redis.call('HMGET', K.settings .. lane, 'weight', 'limit', 'rate', 'burst', 'max_size', 'paused')
  local tokens, period = string.match(v[3] or q.rate or '', '^(%S+)/(%S+)$')
  local s = {
    weight = tonumber(v[1] or q.weight or 1), own_weight = v[1] and true or false,
    limit = tonumber(v[2] or q.limit or ''),
    burst = tonumber(v[4] or q.burst or '') or 1, max_size = tonumber(v[5] or q.max_size or ''),
    rate = tokens and tonumber(tokens) / tonumber(period), paused = v[6] == '1',
  }
  q.lanes[lane] = s
  return s
end
