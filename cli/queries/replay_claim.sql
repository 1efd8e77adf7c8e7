-- Items to send, each under a lease by the database's clock and the next generation: those that nobody has, and those of a run
-- that is gone. One that another run is taking is passed over. $2 owner, $3 seconds, $4 how many, $5 items that cannot be sent.
--
-- Unless the plan wants that (--again), an item whose record another plan has sent, or may have, is not sent: it is settled as a duplicate.
-- Under another key it would take effect twice. One that another plan is sending just now is left for later: it may be given back. An item that was claimed (generation above 0) may be on its topic already and goes on;
-- `replay_release.sql` takes a generation back where it surely is not. After replay_lock.sql, in its transaction. A row for each item: those
-- that were left out have no generation.
WITH due AS MATERIALIZED (
    SELECT item, consumer, subject, round, generation FROM inbox.replay_item
    WHERE plan = $1 AND state IN ('waiting', 'sending') AND (state = 'waiting' OR lease_until <= clock_timestamp())
      AND item <> ALL ($5)
    ORDER BY item
    LIMIT $4
    FOR UPDATE SKIP LOCKED
), elsewhere AS MATERIALIZED (
    SELECT due.item, other.plan, other.is_at_it
    FROM due
    CROSS JOIN LATERAL (SELECT o.plan, o.state = 'sending' AND o.lease_until > clock_timestamp() AS is_at_it
                        FROM inbox.replay_item o
                        WHERE o.consumer = due.consumer AND o.subject = due.subject AND o.plan <> $1 AND o.round >= due.round
                          AND o.generation > 0
                        ORDER BY is_at_it LIMIT 1) other
    WHERE due.generation = 0 AND EXISTS (SELECT FROM inbox.replay_plan p WHERE p.plan = $1 AND NOT p.again)
), left_out AS (
    UPDATE inbox.replay_item i
    SET state = 'duplicate', sent_at = clock_timestamp(), settled_at = clock_timestamp(),
        error = 'plan ' || elsewhere.plan || ' has sent this record, or may have'
    FROM elsewhere
    WHERE i.plan = $1 AND i.item = elsewhere.item AND NOT elsewhere.is_at_it
    RETURNING i.item, i."partition", i."offset", i.round, i.idempotency_key, i.original_time_ms
), claimed AS (
    UPDATE inbox.replay_item i
    SET state = 'sending', owner = $2, generation = i.generation + 1,
        lease_until = clock_timestamp() + make_interval(secs => $3::double precision)
    FROM due
    WHERE i.plan = $1 AND i.item = due.item AND NOT EXISTS (SELECT FROM elsewhere WHERE elsewhere.item = due.item)
    RETURNING i.item, i."partition", i."offset", i.round, i.idempotency_key, i.original_time_ms, i.generation
)
SELECT * FROM claimed
UNION ALL
SELECT left_out.*, NULL FROM left_out
