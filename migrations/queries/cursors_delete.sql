-- All cursors. Comes back with the highest position that any of them had.
WITH advances AS (DELETE FROM outbox.advance), fences AS (DELETE FROM outbox.fence)
SELECT coalesce(max("position"), 0) FROM outbox.cursor
