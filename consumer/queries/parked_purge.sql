-- One batch of parked records that are done or discarded goes, and the watermark is raised over their record times, as in
-- message_purge.sql: a discarded record may have no other row. $1 consumer, $2 cut-off, $3 rows.
WITH settled AS MATERIALIZED (
    SELECT sequence
    FROM inbox.parked
    WHERE consumer = $1 AND state IN ('done', 'discarded') AND coalesce(settled_at, last_failed_at, first_failed_at) < $2
      AND (record_time IS NULL OR record_time < $2)
    ORDER BY coalesce(settled_at, last_failed_at, first_failed_at)
    LIMIT $3
    FOR UPDATE SKIP LOCKED
), purged AS (
    DELETE FROM inbox.parked
    WHERE sequence = ANY (ARRAY(SELECT sequence FROM settled))
    RETURNING record_time
), raised AS (
    INSERT INTO inbox.horizon AS h (consumer, purged_record_time)
    SELECT $1, max(record_time) FROM purged HAVING max(record_time) IS NOT NULL
    ON CONFLICT (consumer) DO UPDATE SET purged_record_time = excluded.purged_record_time
    WHERE h.purged_record_time < excluded.purged_record_time
)
SELECT count(*) FROM purged
