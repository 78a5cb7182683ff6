-- Store a message: in its lane, or in `delayed` when it is due later.
--
-- A known id is left alone: a publish whose reply was lost may be tried again. The payload is the first write:
-- a full server refuses the whole call, and nothing is swept here.
--
-- KEYS[1]  base of the queue's keys
-- ARGV[1]  now         ms; '' = the server's clock
-- ARGV[2]  tag         the message's id
-- ARGV[3]  lane        tenant
-- ARGV[4]  priority    0 (first) to 9
-- ARGV[5]  due         ms since the epoch; 0 = at once
-- ARGV[6]  cost        what a claim charges the lane; 0.01 to 1000
-- ARGV[7]  must_exist  1: refuse if the queue was never declared or has expired
-- ARGV[8]  admit       1: let it in though the lane is full: a running task sends it
-- ARGV[9]  envelope    JSON
-- ARGV[10]  body       bytes
-- ARGV[11]  ends       ms; a queue that is not there ends after so long without use; 0 or left out = never
-- RETURNS  1 stored, 0 known already
-- ERRORS   FLARG an argument is empty, no number or out of range; FLFULL the lane holds max_size ready messages;
--          FLABSENT no such queue (must_exist)
-- COST     O(log n) of the lane and of the ring
--@include clock record settings ring wake touch finished

if redis.replicate_commands then redis.replicate_commands() end
local now, tag, lane = now_ms(ARGV[1]), ARGV[2], ARGV[3]
local priority, due, cost = tonumber(ARGV[4]), tonumber(ARGV[5]), tonumber(ARGV[6])
if tag == '' or lane == '' or not (priority and priority >= 0 and priority <= 9 and priority % 1 == 0)
  or not (due and due > -2 ^ 53 and due < 2 ^ 53) or not (cost and cost >= 0.01 and cost <= 1000) then
  return redis.error_reply(string.format('FLARG tag %q, lane %q, priority %s, due %s, cost %s', tag, lane, ARGV[4],
    ARGV[5], ARGV[6]))
end
if ARGV[7] == '1' and redis.call('EXISTS', K.queue) == 0 then
  return redis.error_reply('FLABSENT the queue does not exist')
end
if redis.call('HEXISTS', K.message, tag) == 1 or is_finished(tag) then
  -- Something is written, so that who waits for replicas or the disk waits for the first try too.
  begin_writes()
  count('repeated', 1)
  return 0
end
local q = queue_state()
if (ARGV[11] or '0') ~= '0' and not q.declared and redis.call('EXISTS', K.queue) == 0 then
  new_life(q)
  q.expires = tonumber(ARGV[11])
  redis.call('HSET', K.queue, 'expires', ARGV[11])
else
  begin_life(q)
end
local max_size = lane_settings(q, lane).max_size
if max_size and ARGV[8] ~= '1' then
  local size = redis.call('ZCARD', K.ready .. lane)
  if size >= max_size then
    return redis.error_reply(string.format('FLFULL %.0f %.0f', size, max_size))
  end
end

redis.call('HSET', K.body, tag, ARGV[10])
redis.call('HSET', K.envelope, tag, ARGV[9])
local r = {
  attempt = 0, failures = 0, priority = priority, score = 0, cost = cost, born = now,
  slot = false, token = '-', lane = lane,
}
if cost ~= 1 and not q.costs then
  redis.call('HSET', K.queue, 'costs', '1')
  q.costs = true
end
if due > now then
  save_record(tag, r)
  redis.call('ZADD', K.delayed, due, tag)
  schedule(q, due)
else
  make_ready(q, tag, r)
  offer(q, lane, now)
end
count('enqueued', 1)
rearm(q)
touch(q)
return 1
