-- What a shard stood still at goes on being found by its message's transaction id. $1 the snapshot of the new cursors.
UPDATE outbox.stopped SET xid = '3' WHERE NOT pg_visible_in_snapshot(xid, $1::pg_snapshot)
