-- A condition, put in where {consumed} stands: whether cursor c covers message m. What outbox.late_rows and a look above the
-- position find is what it does not cover.
(m."position" <= c."position"
 AND (pg_visible_in_snapshot(m.xid, c.snapshot)
      OR (c.late_snapshot IS NOT NULL AND m."position" <= c.late_position AND pg_visible_in_snapshot(m.xid, c.late_snapshot))))
