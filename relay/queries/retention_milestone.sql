-- Writes a milestone if none is younger than $1 seconds, and deletes those that no leaf is judged by any more: all before the
-- youngest that is a slot period old. Its time is read after the snapshot that shows the cursors.
WITH moment AS MATERIALIZED (SELECT clock_timestamp() AS at, slot_period FROM outbox.settings),
written AS (
    INSERT INTO outbox.milestone (at, shard, "position", snapshot, ceiling, late_snapshot, late_position)
    SELECT moment.at, c.shard, c."position", c.snapshot, c.ceiling, c.late_snapshot, c.late_position
    FROM moment, outbox.cursor c
    WHERE NOT EXISTS (SELECT FROM outbox.milestone m
                      WHERE m.at > moment.at - make_interval(secs => $1) AND m.at <= moment.at)
)
DELETE FROM outbox.milestone
WHERE at < (SELECT max(m.at) FROM outbox.milestone m, moment WHERE m.at <= moment.at - moment.slot_period)
