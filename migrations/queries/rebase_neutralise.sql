-- Transaction ids that mean nothing here, or will mean something else when their number comes: the first of all takes their place,
-- which every snapshot shows. $1 the snapshot of the new cursors; it shows whatever is committed here.
UPDATE outbox.message SET xid = '3' WHERE NOT pg_visible_in_snapshot(xid, $1::pg_snapshot)
