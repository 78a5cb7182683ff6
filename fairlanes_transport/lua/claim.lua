-- Claim up to `max` messages, each lane in its turn: every one becomes a lease, and its attempt goes up.
--
-- First what time has brought is swept (expired leases, due messages, throttles and rates that have ended).
--
-- KEYS[1]  base of the queue's keys
-- ARGV[1]  now        ms; '' = the server's clock
-- ARGV[2]  max        messages at most; 0 = only sweep and keep the time
-- ARGV[3]  lease      ms until the deadline
-- ARGV[4]  token      unique for this call; with the attempt it is the fence
-- ARGV[5]  consumer   id of the claimer, for the timekeeper's role
-- ARGV[6]  will_park  1: after this call the consumer will park if there is no need; 2: if it gets fewer
--                     than `max`; 0: it will not
-- ARGV[7]  policy     what happens to failures (include failure)
-- RETURNS  { need 0|1, and 2 more if the queue was not declared, ms until the timekeeper claims again or -1,
--            then per message: tag, attempt, failures, lane, born (ms), envelope, body }
-- ERRORS   none
-- COST     O(max * log n); one lookup when the queue is empty
--@include clock record settings ring wake touch failure sweep waits grace

begin_writes()
if redis.call('EXISTS', K.ring, K.leases, K.delayed, K.waiting, K.dead) == 0 then
  -- Nothing is here: nobody keeps its time, or what is delayed from now on would rely on somebody who does not come.
  local q = queue_state()
  if q.keeper or q.deputy then
    redis.call('HDEL', K.queue, 'keeper', 'keeper_until', 'deputy', 'deputy_until')
  end
  touch(q)
  return { q.declared and 0 or 2, -1 }
end

-- charge(q, r): the cost of serving the message, in virtual time for a weight of 1.
local function charge(q, r)
  if not q.by_time then return r.cost end
  r.cost = tonumber(redis.call('HGET', K.work .. r.lane, 'mean') or q.mean)
  return r.cost
end

local now, max, deadline = now_ms(ARGV[1]), tonumber(ARGV[2]), nil
local q, policy = queue_state(), parse_policy(ARGV[7])
deadline = now + tonumber(ARGV[3])
see(q, tonumber(ARGV[3]), now)
sweep_expired(q, policy, now)
if redis.call('EXISTS', K.delayed, K.waiting, K.dead) == 0 then
  q.timeless = true
else
  sweep_due(q, now)
  trim_dead(policy, now)
end

local claimed, waits = { 0, -1 }, {}
local taken = 0
while taken < max and not q.paused do
  local head = redis.call('ZRANGE', K.ring, 0, 0, 'WITHSCORES')
  local lane = head[1]
  if not lane then break end
  local s = lane_settings(q, lane)
  -- A default limit may have become lower since the lane was placed.
  local full = s.limit and redis.call('SCARD', K.flight .. lane) >= s.limit
  local tag = not full and redis.call('ZPOPMIN', K.ready .. lane)[1]
  local r = tag and load_record(tag)
  if r then
    r.attempt, r.token = r.attempt + 1, ARGV[4]
    q.vt = tonumber(head[2])
    local next_at = q.vt + charge(q, r) / s.weight
    save_record(tag, r)
    redis.call('ZADD', K.leases, deadline, tag)
    redis.call('SADD', K.flight .. lane, tag)
    if s.rate then spend_token(s, lane, now) end
    next_turn(q, s, lane, next_at, now)
    taken = taken + 1
    local envelope = redis.call('HGET', K.envelope, tag) or ''
    note_wait(waits, r, envelope, now)
    for _, value in ipairs({ tag, r.attempt, r.failures, lane, string.format('%.0f', r.born), envelope,
      redis.call('HGET', K.body, tag) or '' }) do
      claimed[#claimed + 1] = value
    end
  else
    place(q, lane, now)
  end
end
if taken > 0 then redis.call('HSET', K.queue, 'vt', string.format('%.17g', q.vt)) end
count('claimed', taken)
for total, by in pairs(waits) do count(total, by) end
local will_park = ARGV[6] == '1' or (ARGV[6] == '2' and taken < max)
claimed[2] = keep_time(q, ARGV[5], will_park, now)
claimed[1] = rearm(q) + (q.declared and 0 or 2)
touch(q)
return claimed
