-- What is left of a deleted queue: the keys of its lanes, which nobody finds any more.

-- clear_ruin(): remove the keys of some lanes; 1: there are more.
local function clear_ruin()
  local life = redis.call('GET', K.ruin)
  if not life then return 0 end
  local tail = life == '' and ':' or '@' .. life .. ':'
  for _, index in ipairs({ K.ruinlanes, K.ruinconfigured, K.ruinthrottled }) do
    local lanes = redis.call('ZRANGE', index, 0, 99)
    for _, lane in ipairs(lanes) do
      for _, part in ipairs({ 'ready', 'flight', 'settings', 'throttle', 'allowed', 'work' }) do
        redis.call('UNLINK', K.base .. part .. tail .. lane)
      end
      redis.call('ZREM', index, lane)
    end
    if #lanes == 100 then return 1 end
  end
  redis.call('DEL', K.ruin)
  return 0
end
