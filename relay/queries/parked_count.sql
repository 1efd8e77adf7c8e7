-- How many are set aside, by state and cause. $1 to $6 as in parked_list.sql; only what is not settled.
SELECT p.state, p.cause, count(*)
FROM outbox.parked p
WHERE p.state IN ('retrying', 'blocked', 'paused', 'dead')
  AND ($1::uuid[] IS NULL OR p.id = ANY ($1)) AND ($2::text IS NULL OR p.topic = $2) AND ($3::text IS NULL OR p.key = $3)
  AND ($4::text IS NULL OR p.cause = $4) AND ($5::text IS NULL OR p.state = $5)
  AND ($6::double precision IS NULL OR p.first_failed_at <= clock_timestamp() - make_interval(secs => $6))
GROUP BY p.state, p.cause ORDER BY p.state, p.cause
