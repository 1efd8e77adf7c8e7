-- Every shard to the highest generation that any of them had.
UPDATE outbox.shard SET generation = (SELECT max(generation) FROM outbox.shard)
