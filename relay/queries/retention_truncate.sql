-- Truncates leaf $1 if nothing stands against it; takes its lock at once or not at all (migrations/outbox/0005_retention.sql).
SELECT outcome, bytes, shard, "position" FROM outbox.truncate_leaf($1)
