-- now_ms(given): milliseconds since the epoch by the server's clock; a test may give the time instead.
local function now_ms(given)
  if given ~= '' then return tonumber(given) end
  local time = redis.call('TIME')
  return time[1] * 1000 + math.floor(time[2] / 1000)
end

-- begin_writes(): the first write of every script but enqueue. A server that is full checks for memory at a
-- script's first write only, and lets a delete through; so acks and claims work when nothing else does.
-- (Redis 6.2 with lua-replicate-commands no also needs the effects to be replicated, not the script.)
local function begin_writes()
  if redis.replicate_commands then redis.replicate_commands() end
  redis.call('HDEL', K.queue, '')
end
