-- What is set aside, by state. The oldest age is that of the first failure. Last, the topics that are paused.
SELECT count(*) FILTER (WHERE state = 'retrying'), count(*) FILTER (WHERE state = 'blocked'),
       count(*) FILTER (WHERE state = 'dead'), count(*) FILTER (WHERE state = 'paused'),
       extract(epoch FROM clock_timestamp() - min(first_failed_at))::double precision,
       ARRAY(SELECT topic FROM outbox.paused ORDER BY topic)
FROM outbox.parked WHERE state IN ('retrying', 'blocked', 'dead', 'paused')
