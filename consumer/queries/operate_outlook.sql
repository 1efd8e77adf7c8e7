-- What a purge would take of a consumer, and what it leaves, by the first reason: the conditions of message_purge.sql and
-- parked_purge.sql. Reads all rows of the consumer. $1 consumer, $2 cut-off in seconds before now.
WITH cut AS MATERIALIZED (SELECT clock_timestamp() - make_interval(secs => $2) AS off),
applied AS (
    SELECT CASE
        WHEN m.state = 'dead' THEN 'dead'
        WHEN m.state <> 'done' THEN 'in_progress'
        WHEN m.created_at >= cut.off OR m.finished_at >= cut.off THEN 'recent'
        WHEN m.record_time >= cut.off THEN 'record_time_ahead'
        WHEN EXISTS (SELECT FROM inbox.parked p
                     WHERE p.consumer = m.consumer AND p.topic = m.topic AND p."partition" = m."partition" AND p."offset" = m."offset"
                       AND p.state NOT IN ('done', 'discarded')
                     OFFSET 0) THEN 'set_aside'
        ELSE 'due' END AS why
    FROM inbox.message m, cut
    WHERE m.consumer = $1
), aside AS (
    SELECT CASE
        WHEN p.state NOT IN ('done', 'discarded') THEN 'unsettled'
        WHEN coalesce(p.settled_at, p.last_failed_at, p.first_failed_at) >= cut.off THEN 'recent'
        WHEN p.record_time >= cut.off THEN 'record_time_ahead'
        ELSE 'due' END AS why
    FROM inbox.parked p, cut
    WHERE p.consumer = $1
)
SELECT 'rows' AS of, why, count(*) AS count FROM applied GROUP BY why
UNION ALL
SELECT 'parked', why, count(*) FROM aside GROUP BY why
