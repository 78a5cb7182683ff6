-- check_fence(tag, attempt, token): 1 and the record if this pair holds a live lease; 0 stale: somebody else
-- holds it now, or nobody; -1 gone: finished already.
local function check_fence(tag, attempt, token)
  local r = load_record(tag)
  if not r or r.slot then return -1 end
  if r.attempt ~= tonumber(attempt) or r.token ~= token or not redis.call('ZSCORE', K.leases, tag) then
    return 0
  end
  return 1, r
end
