-- The durable cursor of a shard: its newest row. $1 shard. A statement of its own after the claim, because the claim may have
-- waited for an advance that its own snapshot does not show.
SELECT "position", snapshot::text, ceiling::text, late_snapshot::text, late_position
FROM outbox.advance WHERE shard = $1 ORDER BY number DESC LIMIT 1
