-- The last write of the transaction that claimed the batch: marks and outcomes together. Nothing at all is written unless the
-- claim of the first item stands as this transaction wrote it; one statement claimed them all, so then all of them stand.
-- An upsert, because it finds each row by the unique index whatever the statistics say; an UPDATE that joins the items was seen
-- to compare every item with every row.
-- How many were marked, and how many of them are too old (message_complete.sql says why it is asked here, and of which): then roll back.
WITH marked AS (
    INSERT INTO inbox.message AS m (consumer, scope, key, fingerprint, state, outcome, finished_at)
    SELECT $1, item.scope, item.key, item.fingerprint, 'done', item.outcome::json, clock_timestamp()
    FROM unnest($2::text[], $3::text[], $4::text[], $5::text[]) AS item (scope, key, fingerprint, outcome)
    WHERE EXISTS (SELECT FROM inbox.message
                  WHERE consumer = $1 AND scope = ($2::text[])[1] AND key = ($3::text[])[1]
                    AND state = 'in_progress' AND xmin = pg_current_xact_id_if_assigned()::xid)
    ON CONFLICT (consumer, scope, key) DO UPDATE
    SET state = excluded.state, outcome = excluded.outcome, finished_at = excluded.finished_at
    WHERE m.state = 'in_progress' AND m.xmin = pg_current_xact_id()::xid
    RETURNING record_time, generation
)
SELECT count(*), count(*) FILTER (WHERE generation = 1 AND record_time <= (SELECT purged_record_time FROM inbox.horizon WHERE consumer = $1))
FROM marked
