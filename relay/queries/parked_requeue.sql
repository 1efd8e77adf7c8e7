-- Lets those that are retrying or dead be tried once more, now, with a new budget; writes it to the audit table. $1 to $6 as in
-- parked_list.sql, $7 what the operator asked for, as JSON.
WITH picked AS MATERIALIZED (
    SELECT p."position" FROM outbox.parked p
    WHERE p.state IN ('retrying', 'dead')
      AND ($1::uuid[] IS NULL OR p.id = ANY ($1)) AND ($2::text IS NULL OR p.topic = $2) AND ($3::text IS NULL OR p.key = $3)
      AND ($4::text IS NULL OR p.cause = $4) AND ($5::text IS NULL OR p.state = $5)
      AND ($6::double precision IS NULL OR p.first_failed_at <= clock_timestamp() - make_interval(secs => $6))
    ORDER BY p."position"
    FOR UPDATE
),
requeued AS (
    UPDATE outbox.parked p
    SET state = 'retrying', next_attempt_at = clock_timestamp(), budget_from = p.attempts
    FROM picked
    WHERE p."position" = picked."position" AND p.state IN ('retrying', 'dead')
    RETURNING p.id
)
INSERT INTO outbox.audit (command, arguments, affected)
SELECT 'parked requeue', $7::jsonb, (SELECT count(*) FROM requeued)
RETURNING affected
