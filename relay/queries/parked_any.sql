-- Whether a shard has anything set aside. $1 shard.
SELECT EXISTS (SELECT FROM outbox.parked p WHERE p.shard = $1 AND p.state IN ('retrying', 'blocked', 'paused', 'dead'))
