-- Finish messages: each is gone if the fence (attempt, token) is the current one.
--
-- An ack that comes after the deadline but before another claim counts, wherever the message then is (not
-- from dead): it saves a duplicate.
--
-- KEYS[1]  base of the queue's keys
-- ARGV[1]  now        ms; '' = the server's clock
-- ARGV[2]  consumer   id of the consumer, for the timekeeper's role
-- ARGV[3]  will_park  1: after this call the consumer will park if there is no need
-- ARGV[4]  tag        and then, per message, five in all: tag, attempt, token, keep_slot, spent
-- ARGV[5]  attempt
-- ARGV[6]  token
-- ARGV[7]  keep_slot  1: the task still runs; keep its slot if the lane has a limit or is charged by time
-- ARGV[8]  spent      ms of worker time that the task took; 0 = not known, or it still runs
-- RETURNS  { need 0|1, and 2 more if the queue was not declared, ms until the timekeeper claims again or -1, then per message 2 done and its slot kept,
--            1 done, 0 stale, -1 gone }
-- ERRORS   none
-- COST     O(log n) per message
--@include clock record settings ring wake touch work remember

begin_writes()
local now, q = now_ms(ARGV[1]), queue_state()
local gone, emptied, handled = {}, {}, {}

local function ack(tag, attempt, token, keep_slot, spent)
  local r = load_record(tag)
  if not r or handled[tag] then return -1 end
  local current = r.attempt == attempt and r.token == token
  if r.slot then
    -- Acked already. If it is the same claim, the reply was lost: it is told again, or the slot is freed.
    if not current then return -1 end
    if keep_slot then return 2 end
    end_lease(tag, r)
    gone[#gone + 1], handled[tag] = tag, true
    offer(q, r.lane, now)
    true_up(q, r, spent)
    return 1
  end
  if not current then return 0 end
  local leased = redis.call('ZSCORE', K.leases, tag)
  if not leased and redis.call('ZREM', K.ready .. r.lane, tag) + redis.call('ZREM', K.delayed, tag) == 0 then
    return 0
  end
  if leased and keep_slot and (q.by_time or lane_settings(q, r.lane).limit) then
    r.slot = true
    save_record(tag, r)
  else
    if leased then end_lease(tag, r) end
    gone[#gone + 1], handled[tag] = tag, true
    -- A lane that is on the ring has lost what it had ready, perhaps.
    if leased then offer(q, r.lane, now) else place(q, r.lane, now) end
    true_up(q, r, spent)
  end
  emptied[#emptied + 1] = tag
  return r.slot and 2 or 1
end

local answers = { 0, -1 }
for i = 4, #ARGV, 5 do
  answers[#answers + 1] = ack(ARGV[i], tonumber(ARGV[i + 1]), ARGV[i + 2], ARGV[i + 3] == '1',
    tonumber(ARGV[i + 4]))
end
if #gone > 0 then redis.call('HDEL', K.message, unpack(gone)) end
if #emptied > 0 then
  redis.call('HDEL', K.envelope, unpack(emptied))
  redis.call('HDEL', K.body, unpack(emptied))
  remember(q, emptied, now)
  count('acked', #emptied)
end
answers[2] = keep_time(q, ARGV[2], ARGV[3] == '1' and redis.call('EXISTS', K.ring) == 0, now)
answers[1] = rearm(q) + (q.declared and 0 or 2)
touch(q)
return answers
