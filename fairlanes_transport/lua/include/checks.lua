-- within(n, bounds): whether the number is within bounds of the loader's table BOUNDS.
local function within(n, bounds)
  return n and n >= bounds[1] and n <= bounds[2] and (not bounds[3] or n == math.floor(n))
end

-- decimal(text): the number that is written in plain digits, or nil.
local function decimal(text)
  return string.match(text, '^%d[%d.eE+-]*$') and tonumber(text)
end

-- is_valid(field, text): whether the setting may have this value; '' unsets it.
local function is_valid(field, text)
  if text == '' or (text == 'none' and MAY_BE_NONE[field]) then return true end
  if CHOICES[field] then return CHOICES[field][text] end
  if field ~= 'rate' then return within(decimal(text), BOUNDS[field]) end
  local tokens, period = string.match(text, '^(%S+)/(%S+)$')
  tokens, period = decimal(tokens or ''), decimal(period or '')
  return tokens and period and within(tokens / period, BOUNDS.rate)
end

-- refusal(field, text, known): the error reply for a setting that is not among `known` (OF_A_LANE or OF_A_QUEUE), or
-- whose value is out of bounds; nil if it may be stored.
local function refusal(field, text, known)
  if known[field] and is_valid(field, text) then return nil end
  return redis.error_reply(string.format('FLARG setting %s: %q', field, text))
end
