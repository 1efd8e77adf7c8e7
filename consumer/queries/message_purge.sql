-- One batch of finished rows goes, oldest first, and the watermark is raised over their record times: in one transaction, so that
-- whoever finds a row gone can see the watermark above it. $1 consumer, $2 cut-off, $3 rows, $4 how far the batch before came, or null.
-- `OFFSET 0` keeps the look at `parked` one index probe a row: as a join it may be planned while that table is small, and kept.
-- By when it was claimed, which a mark does not change (migration 2 says why), and what was finished later than the cut-off stays.
-- What is planned to be replayed keeps its row: without it the replay would be new work.
-- A record time that lies ahead of the cut-off keeps its row, or it would put the watermark above records that are still to come.
WITH finished AS MATERIALIZED (
    SELECT m.ctid AS place
    FROM inbox.message m
    WHERE m.consumer = $1 AND m.state = 'done' AND m.cause IS NULL
      AND m.created_at >= coalesce($4, '-infinity') AND m.created_at < $2 AND m.finished_at < $2
      AND (m.record_time IS NULL OR m.record_time < $2)
      AND NOT EXISTS (SELECT FROM inbox.parked p
                      WHERE p.consumer = m.consumer AND p.topic = m.topic AND p."partition" = m."partition" AND p."offset" = m."offset"
                        AND p.state NOT IN ('done', 'discarded')
                      OFFSET 0)
      AND NOT EXISTS (SELECT FROM inbox.replay_item i
                      WHERE i.consumer = m.consumer AND i.idempotency_key = m.key AND i.state IN ('waiting', 'sending', 'sent')
                      OFFSET 0)
    ORDER BY m.created_at
    LIMIT $3
    FOR UPDATE OF m SKIP LOCKED
), purged AS (
    DELETE FROM inbox.message
    WHERE ctid = ANY (ARRAY(SELECT place FROM finished)) AND consumer = $1 AND state = 'done'
    RETURNING record_time, created_at
), raised AS (
    INSERT INTO inbox.horizon AS h (consumer, purged_record_time)
    SELECT $1, max(record_time) FROM purged HAVING max(record_time) IS NOT NULL
    ON CONFLICT (consumer) DO UPDATE SET purged_record_time = excluded.purged_record_time
    WHERE h.purged_record_time < excluded.purged_record_time
)
SELECT count(*), max(created_at) FROM purged
