-- Look at a page of the lanes that hold messages, in the order of their names: how full, how heavy, waiting since
-- when. Changes nothing.
--
-- KEYS[1]  base of the queue's keys
-- ARGV[1]  now    ms; '' = the server's clock
-- ARGV[2]  after  where the last page ended; '' = from the first lane
-- ARGV[3]  limit  lanes on the page
-- RETURNS  { now (ms), where the page ended or '' if it is the last, then per lane that has ready messages six: its
--            name, ready, weight in force, 1 paused; of the next message: born (ms) or '', its eta as written or '' }
-- ERRORS   none
-- COST     O(limit * log n); about 10 us per lane
--@include clock settings

local now, q, limit = now_ms(ARGV[1]), queue_state(), tonumber(ARGV[3])
local names = redis.call('ZRANGEBYLEX', K.lanes, ARGV[2] == '' and '-' or '(' .. ARGV[2], '+', 'LIMIT', 0, limit)
local seen = { string.format('%.0f', now), #names == limit and names[limit] or '' }
for _, lane in ipairs(names) do
  local ready = redis.call('ZCARD', K.ready .. lane)
  if ready > 0 then
    local s = lane_settings(q, lane)
    local head = redis.call('ZRANGE', K.ready .. lane, 0, 0)[1]
    local record = redis.call('HGET', K.message, head)
    local envelope = record and redis.call('HGET', K.envelope, head)
    for _, value in ipairs({
      lane, ready, string.format('%.17g', s.weight), s.paused and 1 or 0,
      record and string.match(record, '^%S+ %S+ %S+ %S+ %S+ (%S+) ') or '',
      envelope and string.match(envelope, '"eta":%s*"([^"]*)"') or '',
    }) do
      seen[#seen + 1] = value
    end
  end
end
return seen
