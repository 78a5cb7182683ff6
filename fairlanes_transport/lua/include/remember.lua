-- How what was finished is remembered (include finished).
local FIVE_MINUTES, MOST = 300000, 100000

-- remember(q, tags, now): these are finished.
local function remember(q, tags, now)
  local span = q.expires > 0 and math.min(q.expires, FIVE_MINUTES) or FIVE_MINUTES
  if now - q.finished_since >= FIVE_MINUTES or redis.call('SCARD', K.finished) >= MOST then
    redis.call('UNLINK', K.previous)
    if redis.call('EXISTS', K.finished) == 1 then
      redis.call('RENAME', K.finished, K.previous)
      redis.call('PEXPIRE', K.previous, span)
    end
    redis.call('HSET', K.queue, 'finished_since', string.format('%.0f', now))
  end
  redis.call('SADD', K.finished, unpack(tags))
  redis.call('PEXPIRE', K.finished, span)
end
