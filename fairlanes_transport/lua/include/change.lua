-- A default has changed: who claims brings it to the lanes (include walk).

-- begin_walk(q, kind): from the first lane; `place` only looks where it belongs, `turns` and `anew` rewind it too.
local function begin_walk(q, kind)
  local before = q.walk and string.match(q.walk, '^%a+')
  if before == 'anew' or kind == 'place' and before then kind = before end
  q.walk = kind .. '-'
  redis.call('HSET', K.queue, 'walk', q.walk)
end
