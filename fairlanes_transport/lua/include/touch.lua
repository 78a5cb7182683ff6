-- The end of a queue that ends when it is not used.

-- touch(q, changed): a queue with x-expires ends when it is not used, all of it at one moment. Every use gives what
-- it has made that end; the end itself lies a little later than asked for, so that it has to be moved only when a
-- twentieth of the time has gone by. `changed`: `expires` is new; 0 takes the end away. (Of more than 10,000 lanes
-- the rest keeps its old end.)
local function touch(q, changed)
  if q.expires == 0 and not changed then return end
  local left = redis.call('PTTL', K.queue)
  local move = changed or left < q.expires
  if move then left = math.ceil(q.expires * 1.05) end
  local keys = { K.totals, K.ring, K.waiting, K.lanes, K.configured, K.message, K.envelope, K.body, K.leases,
    K.delayed, K.dead, K.reasons, K.finished, K.wake }
  local function add(lane)
    for _, kind in ipairs({ K.ready, K.flight, K.settings }) do keys[#keys + 1] = kind .. lane end
  end
  if move then
    keys[#keys + 1] = K.queue
    for _, index in ipairs({ K.lanes, K.configured }) do
      for _, lane in ipairs(redis.call('ZRANGE', index, 0, 9999)) do add(lane) end
    end
  else
    for lane in pairs(q.lanes) do add(lane) end
  end
  for _, key in ipairs(keys) do
    if q.expires > 0 then
      redis.call('PEXPIRE', key, left)
    elseif key ~= K.finished then
      redis.call('PERSIST', key)
    end
  end
end
