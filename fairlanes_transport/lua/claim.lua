-- Claim up to `max` messages, each lane in its turn: every one becomes a lease, and its attempt goes up.
--
-- First what time has brought is swept (expired leases, due messages, throttles and rates that have ended), and a
-- changed default is brought to the next 100 lanes.
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
-- RETURNS  { need 0|1, and 2 more if the queue was not declared, and 4 more if the senders of dead letters are to be told
--            (untold.lua); ms until the timekeeper claims again or -1,
--            then per message: tag, attempt, failures, lane, born (ms), envelope, body }
-- ERRORS   none
-- COST     O(max * log n); one lookup when the queue is empty
--@include clock record settings ring wake touch failure sweep waits grace turn walk

begin_writes()
local q = queue_state()
if not q.walk and redis.call('EXISTS', K.ring, K.leases, K.delayed, K.waiting, K.dead) == 0 then
  -- Nothing is here: nobody keeps its time, or what is delayed from now on would rely on somebody who does not come.
  if q.keeper or q.deputy then
    redis.call('HDEL', K.queue, 'keeper', 'keeper_until', 'deputy', 'deputy_until')
  end
  touch(q)
  return { q.declared and 0 or 2, -1 }
end

local now, max, deadline = now_ms(ARGV[1]), tonumber(ARGV[2]), nil
local policy = parse_policy(ARGV[7])
deadline = now + tonumber(ARGV[3])
see(q, tonumber(ARGV[3]), now)
sweep_expired(q, policy, now)
local untold = 0
if redis.call('EXISTS', K.delayed, K.waiting, K.dead) == 0 then
  q.timeless = true
else
  sweep_due(q, now)
  trim_dead(policy, now)
  if (first_time(K.untold) or math.huge) <= now then untold = 4 end
end

walk_on(q, now)

-- take(q, lane, s, at): the lane's next message and its record; and what the lane has paid too much for it. A message
-- that is dearer than the one that was paid for is paid first, and not taken.
local function take(q, lane, s, at)
  if not (q.costs or q.by_time) then
    local tag = redis.call('ZPOPMIN', K.ready .. lane)[1]
    return tag, tag and load_record(tag), 0
  end
  local paid, tag = reserved(q, lane), redis.call('ZRANGE', K.ready .. lane, 0, 0)[1]
  local r = tag and load_record(tag)
  if r and q.by_time then r.cost = paid end
  if r and r.cost > paid then
    pay_more(q, s, lane, at, paid, r.cost)
    return nil, nil, nil
  end
  if tag then redis.call('ZREM', K.ready .. lane, tag) end
  return tag, r, r and paid - r.cost or 0
end

local claimed, waits = { 0, -1 }, {}
local taken, dearer = 0, 0
while taken < max and dearer < 64 and not q.paused do
  local lane, at = ring_head(q)
  if not lane then break end
  local s = lane_settings(q, lane)
  -- A default limit may have become lower since the lane was placed.
  local full = s.limit and redis.call('SCARD', K.flight .. lane) >= s.limit
  local tag, r, credit = nil, nil, 0
  if not full then tag, r, credit = take(q, lane, s, at) end
  if r then
    r.attempt, r.token = r.attempt + 1, ARGV[4]
    save_record(tag, r)
    redis.call('ZADD', K.leases, deadline, tag)
    redis.call('SADD', K.flight .. lane, tag)
    if s.rate then spend_start(s, lane, now) end
    next_turn(q, s, lane, at, credit, now)
    taken = taken + 1
    local envelope = redis.call('HGET', K.envelope, tag) or ''
    note_wait(waits, r, envelope, now)
    for _, value in ipairs({ tag, r.attempt, r.failures, lane, string.format('%.0f', r.born), envelope,
      redis.call('HGET', K.body, tag) or '' }) do
      claimed[#claimed + 1] = value
    end
  elseif credit then
    place(q, lane, now)
  else
    dearer = dearer + 1
  end
end
count('claimed', taken)
for total, by in pairs(waits) do count(total, by) end
local will_park = ARGV[6] == '1' or (ARGV[6] == '2' and taken < max)
claimed[2] = keep_time(q, ARGV[5], will_park, now)
claimed[1] = rearm(q) + (q.declared and 0 or 2) + untold
touch(q)
return claimed
