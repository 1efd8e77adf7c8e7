-- Deletes rows of the rings that no cursor is read from any more. $1 shards, $2 first numbers, $3 numbers to stop before, each
-- far below one that its shard has: so this can be nobody's durable cursor, whoever asks.
DELETE FROM outbox.advance a
USING unnest($1::smallint[], $2::bigint[], $3::bigint[]) AS r(shard, first, beyond)
WHERE a.shard = r.shard AND a.number >= r.first AND a.number < r.beyond
