-- Put messages where they belong: each with its payload in exactly one set. Right on sound data too.
--
-- What can still run is kept, rather once too often than lost: a lost record is made anew from the lane that was
-- given, a record in no set becomes ready, and of several sets the first of leased, ready, delayed, dead counts.
-- What has lost its payload is removed, and counted as purged.
--
-- KEYS[1]  base of the queue's keys
-- ARGV[1]  now   ms; '' = the server's clock
-- ARGV[2]  tag   and then, per message, two in all: tag, lane
-- ARGV[3]  lane  in which the tag was found, or that its envelope names
-- RETURNS  per message 1 kept, 0 removed
-- ERRORS   none
-- COST     O(log n) per message
--@include clock record settings ring wake touch

-- leave(lane, tag, but): out of every set but the one of that name.
local function leave(lane, tag, but)
  if but ~= 'ready' then redis.call('ZREM', K.ready .. lane, tag) end
  if but ~= 'delayed' then redis.call('ZREM', K.delayed, tag) end
  if but ~= 'leased' then
    redis.call('ZREM', K.leases, tag)
    redis.call('SREM', K.flight .. lane, tag)
  end
  if but ~= 'dead' then
    redis.call('ZREM', K.dead, tag)
    redis.call('ZREM', K.untold, tag)
    redis.call('HDEL', K.reasons, tag)
  end
end

-- where(lane, tag): the set that counts, or nil.
local function where(lane, tag)
  if redis.call('ZSCORE', K.leases, tag) then return 'leased' end
  if redis.call('ZSCORE', K.ready .. lane, tag) then return 'ready' end
  if redis.call('ZSCORE', K.delayed, tag) then return 'delayed' end
  return redis.call('ZSCORE', K.dead, tag) and 'dead' or nil
end

begin_writes()
local now, q, answers, removed = now_ms(ARGV[1]), queue_state(), {}, 0

-- new_record(tag, lane): a lease on a lost record cannot be acknowledged by anybody, so it is none.
local function new_record(tag, lane)
  local score = tonumber(redis.call('ZSCORE', K.ready .. lane, tag) or 0)
  redis.call('ZREM', K.leases, tag)
  redis.call('SREM', K.flight .. lane, tag)
  return {
    attempt = 0, failures = 0, priority = math.max(0, math.min(9, math.floor(score / 2 ^ 49))), score = score,
    cost = 1, born = now, slot = false, token = '-', lane = lane,
  }
end

local function repair(tag, given)
  local r = load_record(tag)
  local payload = redis.call('HEXISTS', K.envelope, tag) + redis.call('HEXISTS', K.body, tag) == 2
  local lane = r and r.lane or given
  if not (r and r.lane) and payload then
    r = new_record(tag, given)
    save_record(tag, r)
  end
  if lane ~= given then
    redis.call('ZREM', K.ready .. given, tag)
    redis.call('SREM', K.flight .. given, tag)
    place(q, given, now)
  end
  local set = where(lane, tag)
  -- A running slot is a lease and nothing else.
  local kept = r and r.lane and (r.slot and set == 'leased' or payload and not r.slot)
  if not kept then
    leave(lane, tag)
    if redis.call('HEXISTS', K.message, tag) == 1 and not (r and r.slot) then removed = removed + 1 end
    forget(tag)
  else
    leave(lane, tag, set or 'ready')
    if set == 'leased' then redis.call('SADD', K.flight .. lane, tag) end
    if not set then make_ready(q, tag, r) end
    if r.slot then
      redis.call('HDEL', K.envelope, tag)
      redis.call('HDEL', K.body, tag)
    end
  end
  place(q, lane, now)
  return kept and 1 or 0
end

for i = 2, #ARGV, 2 do answers[#answers + 1] = repair(ARGV[i], ARGV[i + 1]) end
count('purged', removed)
rearm(q)
touch(q)
return answers
