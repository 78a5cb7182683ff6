-- Set and unset what an operator configures of one lane; it acts on the backlog at once.
--
-- A new weight moves a lane that waits for its turn at once: the rest of its way is stretched by old / new. A new rate
-- or burst leaves the lane the starts that it has.
--
-- KEYS[1]  base of the queue's keys
-- ARGV[1]  now    ms; '' = the server's clock
-- ARGV[2]  lane   tenant
-- ARGV[3]  field  and then, per setting, two in all: field, value
-- ARGV[4]  value  '' = unset, so that the queue's default is in force; or
--                 weight 0.001 to 1000; limit, max_size whole, >= 1, or 'none' whatever the default;
--                 rate tokens/period_ms or 'none'; burst 1 to 1,000,000; paused 1
-- RETURNS  number of settings that the lane has now
-- ERRORS   FLARG a field is unknown, or a value out of range; nothing was changed
-- COST     O(log n) of the ring
--@include clock checks record settings ring wake touch

for i = 3, #ARGV, 2 do
  local refused = refusal(ARGV[i], ARGV[i + 1], OF_A_LANE)
  if refused then return refused end
end

begin_writes()
local now, q, lane = now_ms(ARGV[1]), queue_state(), ARGV[2]
begin_life(q)
local old = lane_settings(q, lane)
-- How many starts the lane could make at once.
local starts = old.rate and redis.call('EXISTS', K.allowed .. lane) == 1
  and math.min(old.burst, old.burst - (next_start(old, lane, now) - now) * old.rate)
local tag = tonumber(redis.call('ZSCORE', K.ring, lane))
if tag then weigh(q, old, -1) end

for i = 3, #ARGV, 2 do
  if ARGV[i + 1] == '' then
    redis.call('HDEL', K.settings .. lane, ARGV[i])
  else
    redis.call('HSET', K.settings .. lane, ARGV[i], ARGV[i + 1])
  end
end
local left = redis.call('HLEN', K.settings .. lane)
if left > 0 then
  redis.call('ZADD', K.configured, 0, lane)
else
  redis.call('ZREM', K.configured, lane)
end

q.lanes[lane] = nil
local new = lane_settings(q, lane)
if not new.rate then
  redis.call('DEL', K.allowed .. lane)
elseif starts and (new.rate ~= old.rate or new.burst ~= old.burst) then
  save_start(new, lane, now + (new.burst - math.min(starts, new.burst)) / new.rate, now)
end
if tag then weigh(q, new, 1) end
if new.weight ~= old.weight then
  local lap, at, cost = kept(lane)
  if tag then
    local lead = math.ceil(ahead(q, tag) * old.weight / new.weight)
    redis.call('ZADD', K.ring, (q.vt + math.min(LEAD, lead)) % CIRCLE, lane)
  elseif lap and ticks_to(q, lap, at) > 0 then
    at = q.vt + math.min(LEAD, math.ceil(ticks_to(q, lap, at) * old.weight / new.weight))
    keep(q, lane, q.lap + math.floor(at / CIRCLE), at % CIRCLE, cost)
  end
end
place(q, lane, now)
rearm(q)
touch(q)
return left
