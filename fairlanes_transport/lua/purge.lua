-- Remove ready and delayed messages, a piece per call. What arrived after the purge began survives.
--
-- KEYS[1]  base of the queue's keys
-- ARGV[1]  now       ms; '' = the server's clock
-- ARGV[2]  lane      only this one; '' = all
-- ARGV[3]  before    `arrivals` when the purge began; '' = this call begins it
-- ARGV[4]  born      ms, when the purge began; '' = now
-- ARGV[5]  after     where the last call stopped among the lanes; '' = at the first
-- ARGV[6]  passed    delayed messages that the last calls looked at and left
-- ARGV[7]  most      messages per call
-- RETURNS  { removed, before, born, after, passed, 1 done | 0 call again with these }
-- ERRORS   none
-- COST     O(most * log n)
--@include clock record settings ring wake touch

begin_writes()
local now, q = now_ms(ARGV[1]), queue_state()
local only, passed, most = ARGV[2], tonumber(ARGV[6]), tonumber(ARGV[7])
local before = tonumber(ARGV[3]) or tonumber(redis.call('HGET', K.queue, 'arrivals') or 0)
local born = tonumber(ARGV[4]) or now
local after, removed, looked, done = ARGV[5], 0, 0, 1

-- purge_lane(lane): priority by priority, as the arrival number is the low part of the order.
local function purge_lane(lane)
  for priority = 0, 9 do
    local low = priority * 2 ^ 49
    local tags = redis.call('ZRANGEBYSCORE', K.ready .. lane, low, string.format('%.0f', low + before),
      'LIMIT', 0, most - removed)
    for _, tag in ipairs(tags) do
      redis.call('ZREM', K.ready .. lane, tag)
      forget(tag)
    end
    removed = removed + #tags
    if removed >= most then break end
  end
  place(q, lane, now)
end

-- Lanes are visited in the order of their names; `after` is the last one that is finished.
while removed < most and looked < 100 and after ~= '\255' do
  local from = after == '' and '-' or '(' .. after
  local lane = only ~= '' and only or redis.call('ZRANGEBYLEX', K.lanes, from, '+', 'LIMIT', 0, 1)[1]
  if not lane then
    after = '\255'
  else
    purge_lane(lane)
    if removed < most then after = only ~= '' and '\255' or lane end
  end
  looked = looked + 1
end
-- Then the delayed ones. They have no arrival number yet: those go that were there when the purge began.
if after ~= '\255' or removed > 0 then
  done = 0
else
  local tags = redis.call('ZRANGE', K.delayed, passed, passed + most - 1)
  for _, tag in ipairs(tags) do
    local r = load_record(tag)
    if r and r.born <= born and (only == '' or r.lane == only) then
      redis.call('ZREM', K.delayed, tag)
      forget(tag)
      removed = removed + 1
    end
  end
  passed = passed + #tags - removed
  if #tags == most then done = 0 end
end
count('purged', removed)
rearm(q)
touch(q)
return { removed, string.format('%.0f', before), string.format('%.0f', born), after, passed, done }
