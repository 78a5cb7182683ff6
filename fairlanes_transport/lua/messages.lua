-- Look where messages are, all at one moment. Changes nothing; only the doctor needs it.
--
-- KEYS[1]  base of the queue's keys
-- ARGV[1]  tag   and then, per message, two in all: tag, lane
-- ARGV[2]  lane  in which the tag was found, or that its envelope names
-- RETURNS  per message ten: record or '', order among the ready of the record's lane or '', the same in the lane
--          that was given or '', lease's deadline (ms) or '', due time (ms) or '', time of death (ms) or '',
--          1 in flight in the record's lane, 1 in flight in the given lane, 1 has an envelope, 1 has a body
-- ERRORS   none
-- COST     O(log n) per message
--@include record settings

queue_state()
local seen = {}
local function add(value) seen[#seen + 1] = value end

for i = 1, #ARGV, 2 do
  local tag, given = ARGV[i], ARGV[i + 1]
  local r = load_record(tag)
  local lane = r and r.lane or given
  add(redis.call('HGET', K.message, tag) or '')
  add(redis.call('ZSCORE', K.ready .. lane, tag) or '')
  add(redis.call('ZSCORE', K.ready .. given, tag) or '')
  add(redis.call('ZSCORE', K.leases, tag) or '')
  add(redis.call('ZSCORE', K.delayed, tag) or '')
  add(redis.call('ZSCORE', K.dead, tag) or '')
  add(redis.call('SISMEMBER', K.flight .. lane, tag))
  add(redis.call('SISMEMBER', K.flight .. given, tag))
  add(redis.call('HEXISTS', K.envelope, tag))
  add(redis.call('HEXISTS', K.body, tag))
end
return seen
