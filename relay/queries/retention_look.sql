-- The leaf in turn: seconds of a slot period, seconds until another is, whether it has anything in it, a shard and a position
-- that are not consumed, and, if all is consumed but was not a slot period ago, the seconds until the next milestone is that
-- old. Locks nothing that anybody waits for.
SELECT leaf.slot, leaf.period, leaf.turns_in, leaf.bytes > 0, waits.shard, waits."position",
       CASE WHEN leaf.bytes > 0 AND waits.shard IS NULL
             AND (old.at IS NULL OR EXISTS (SELECT FROM outbox.unconsumed(leaf.slot, old.at)))
            THEN coalesce(extract(epoch FROM next.at + leaf.slot_period - leaf.at)::double precision, leaf.period / 8) END AS kept_for
FROM (
    SELECT moment.at, moment.slot_period, turn.slot, extract(epoch FROM moment.slot_period)::double precision AS period,
           (extract(epoch FROM moment.slot_period)
            - mod(extract(epoch FROM moment.at), extract(epoch FROM moment.slot_period)))::double precision AS turns_in,
           pg_relation_size('outbox.message_' || turn.slot) AS bytes
    FROM (SELECT clock_timestamp() AS at, slot_period FROM outbox.settings OFFSET 0) moment
    CROSS JOIN LATERAL (SELECT ((outbox.slot_at(moment.at) + 2) % 4)::smallint AS slot) turn
    OFFSET 0
) leaf
LEFT JOIN LATERAL (
    SELECT u.shard, u."position" FROM outbox.unconsumed(leaf.slot) u WHERE leaf.bytes > 0 LIMIT 1
) waits ON true
CROSS JOIN LATERAL (SELECT max(m.at) AS at FROM outbox.milestone m WHERE m.at <= leaf.at - leaf.slot_period) old
CROSS JOIN LATERAL (SELECT min(m.at) AS at FROM outbox.milestone m WHERE m.at > leaf.at - leaf.slot_period) next
