-- Hands a lease back under the generation it was held by. $1 shard, $2 owner, $3 generation.
UPDATE outbox.shard SET owner = NULL, lease_until = NULL
WHERE shard = $1 AND owner = $2 AND generation = $3 AND lease_until > clock_timestamp()
RETURNING shard
