-- Takes this relay, which holds nothing any more, off the list, and with it those that died long ago. $1 owner.
DELETE FROM outbox.relay WHERE owner = $1 OR live_until < clock_timestamp() - interval '1 day'
