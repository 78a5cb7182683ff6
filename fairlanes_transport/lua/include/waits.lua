-- How long messages waited, from their publication to their first claim: a histogram among the totals, so that
-- nothing of a lane remains. Field `wait_le_N` counts waits of at most N ms that are above the bound before,
-- `wait_le_inf` the longest, `wait_ms` is the sum of all. (Bounds as in lanes/meter.py.)
local WAIT_BOUNDS = { 50, 100, 250, 500, 1000, 2500, 5000, 10000, 30000, 60000, 300000, 1800000 }

-- note_wait(waits, r, envelope, now): the record is claimed. Once per message, and not if it has an eta: those wait
-- on purpose, and when they became ready is not known.
local function note_wait(waits, r, envelope, now)
  if r.attempt > 1 or string.find(envelope, '"eta":%s*"') then return end
  local wait, field = math.max(0, now - r.born), 'wait_le_inf'
  for _, bound in ipairs(WAIT_BOUNDS) do
    if wait <= bound then
      field = 'wait_le_' .. bound
      break
    end
  end
  waits[field] = (waits[field] or 0) + 1
  waits.wait_ms = (waits.wait_ms or 0) + wait
end
