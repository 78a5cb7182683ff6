-- What was finished is remembered, so that a publish whose reply was lost does not run again: for five minutes at
-- least, unless more than MOST messages are finished within them. Two sets take turns.
-- is_finished(tag): it was finished a short while ago.
local function is_finished(tag)
  return redis.call('SISMEMBER', K.finished, tag) == 1 or redis.call('SISMEMBER', K.previous, tag) == 1
end
