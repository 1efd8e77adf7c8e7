-- All cursors. Comes back with the highest position that any of them had.
WITH gone AS (DELETE FROM outbox.cursor RETURNING "position")
SELECT coalesce(max("position"), 0) FROM gone
