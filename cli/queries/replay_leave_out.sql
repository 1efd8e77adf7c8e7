-- Of the next items those whose record another plan has sent meanwhile, or is sending: as new work it would take effect twice. They are
-- settled as what they are, duplicates. Not where the plan wants that (--again), and not one that was claimed before: it may be on its
-- topic. After replay_lock.sql, in its transaction. $1 plan, $2 how many items.
UPDATE inbox.replay_item i
SET state = 'duplicate', sent_at = clock_timestamp(), settled_at = clock_timestamp(),
    error = 'plan ' || sent.plan || ' has sent this record'
FROM (
    SELECT next.item, other.plan
    FROM (SELECT item, consumer, subject, round FROM inbox.replay_item
          WHERE plan = $1 AND state = 'waiting' AND generation = 0 ORDER BY item LIMIT $2) next
    CROSS JOIN LATERAL (SELECT o.plan FROM inbox.replay_item o
                        WHERE o.consumer = next.consumer AND o.subject = next.subject AND o.plan <> $1 AND o.round >= next.round
                          AND o.state <> 'waiting' LIMIT 1) other
) sent
WHERE i.plan = $1 AND i.item = sent.item AND i.state = 'waiting' AND i.generation = 0
  AND EXISTS (SELECT FROM inbox.replay_plan p WHERE p.plan = $1 AND p.new_key AND NOT p.again)
