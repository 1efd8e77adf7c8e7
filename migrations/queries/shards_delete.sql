-- The shards beyond the number wanted. $1 number of shards.
DELETE FROM outbox.shard WHERE shard >= $1
