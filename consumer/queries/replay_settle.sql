-- What became of a replayed record, in the transaction that settles its work where there is one. The first word stands: a second
-- copy of the record finds its item settled. One that is still being sent, or was claimed once, is on its topic, or nobody would ask.
-- $1 plan, $2 item, $3 consumer, $4 state, $5 error.
UPDATE inbox.replay_item
SET state = $4, error = $5, settled_at = clock_timestamp(), sent_at = coalesce(sent_at, clock_timestamp()), lease_until = NULL
WHERE plan = $1 AND item = $2 AND consumer = $3 AND (state IN ('sending', 'sent') OR state = 'waiting' AND generation > 0)
