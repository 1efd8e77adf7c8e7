-- Takes this relay, which holds nothing any more, off the list, and with it those that died long ago; of those that said
-- farewell and died over it, the ones that hold nothing. $1 owner.
DELETE FROM outbox.relay r
WHERE owner = $1
   OR live_until < clock_timestamp() - interval '1 day' AND live_until <> '-infinity'
   OR live_until = '-infinity' AND NOT EXISTS (SELECT FROM outbox.shard s WHERE s.owner = r.owner)
