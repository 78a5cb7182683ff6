-- Look at lanes, all at one moment: how full they are, what is in force, where they stand. Changes nothing.
--
-- KEYS[1]  base of the queue's keys
-- ARGV[1]  now   ms; '' = the server's clock
-- ARGV[2]  lane  and more lanes
-- RETURNS  { now (ms), then per lane nineteen: ready, in flight, place on the ring or '', time in `waiting` (ms) or '',
--            1 in the index of lanes, 1 in that of configured ones, own settings (flat list);
--            in force: weight, limit or '', rate (tokens/period_ms) or '', burst, max_size or '', 1 paused;
--            time (ms) until which throttle and rate hold it or '', the throttle's alone or '';
--            of the next message: born (ms) or '', its eta as written or ''; tag of the last message or '';
--            ms that throttle, allowed and work still live (list; -1 for ever, -2 absent) }
-- ERRORS   none
-- COST     O(log n) per lane
--@include clock settings ring

local function text(format, value) return value and string.format(format, value) or '' end

local now, q = now_ms(ARGV[1]), queue_state()
local seen = { string.format('%.0f', now) }
local function add(value) seen[#seen + 1] = value end

for i = 2, #ARGV do
  local lane = ARGV[i]
  local s = lane_settings(q, lane)
  local ready = K.ready .. lane
  local head, last = redis.call('ZRANGE', ready, 0, 0)[1], redis.call('ZRANGE', ready, -1, -1)[1]
  local record = head and redis.call('HGET', K.message, head)
  local envelope = record and redis.call('HGET', K.envelope, head)
  add(redis.call('ZCARD', ready))
  add(redis.call('SCARD', K.flight .. lane))
  add(redis.call('ZSCORE', K.ring, lane) or '')
  add(redis.call('ZSCORE', K.waiting, lane) or '')
  add(redis.call('ZSCORE', K.lanes, lane) and 1 or 0)
  add(redis.call('ZSCORE', K.configured, lane) and 1 or 0)
  add(redis.call('HGETALL', K.settings .. lane))
  add(text('%.17g', s.weight))
  add(text('%.0f', s.limit))
  add(s.rate and (redis.call('HGET', K.settings .. lane, 'rate') or q.rate) or '')
  add(text('%.17g', s.burst))
  add(text('%.0f', s.max_size))
  add(s.paused and 1 or 0)
  add(text('%.0f', blocked_until(s, lane, now)))
  add(redis.call('GET', K.throttle .. lane) or '')
  add(record and string.match(record, '^%S+ %S+ %S+ %S+ %S+ (%S+) ') or '')
  add(envelope and string.match(envelope, '"eta":%s*"([^"]*)"') or '')
  add(last or '')
  add({ redis.call('PTTL', K.throttle .. lane), redis.call('PTTL', K.allowed .. lane),
    redis.call('PTTL', K.work .. lane) })
end
return seen
