-- Takes a piece of work if nobody has, else says what became of it. The only place that compares fingerprints.
-- With an owner ($10, else null) the work is leased for $11 milliseconds; without, it is this transaction's.
-- The last column makes an asynchronous commit synchronous, as synchronous_commit_set.sql does.
-- No row at all: another transaction settled it, or it was purged, after this statement's snapshot. Ask again.
-- Too old: nobody had it, but a duplicate of it may have been purged; the row is to be rolled back. Where the purge came behind this
-- statement's snapshot, it is found by the next statement that looks: message_complete.sql.
WITH claimed AS (
    INSERT INTO inbox.message (consumer, scope, key, fingerprint, state, attempts, record_time, topic, "partition", "offset", owner, lease_until)
    VALUES ($1, $2, $3, $4, 'in_progress', $5, to_timestamp($6::bigint / 1000.0), $7, $8, $9, $10,
            clock_timestamp() + make_interval(secs => $11::double precision / 1000))
    ON CONFLICT (consumer, scope, key) DO NOTHING
    RETURNING record_time
)
SELECT CASE WHEN record_time <= (SELECT purged_record_time FROM inbox.horizon WHERE consumer = $1) THEN 'too_old' ELSE 'claimed' END AS state,
       true AS same_payload, NULL AS outcome, NULL AS cause, NULL AS error, false AS is_left_behind,
       CASE current_setting('synchronous_commit') WHEN 'off' THEN set_config('synchronous_commit', 'on', true) END
FROM claimed
UNION ALL
SELECT state, fingerprint = $4, outcome::text, cause, error,
       state = 'in_progress' AND (lease_until IS NULL OR lease_until <= clock_timestamp()), NULL
FROM inbox.message
WHERE consumer = $1 AND scope = $2 AND key = $3 AND NOT EXISTS (SELECT FROM claimed)
