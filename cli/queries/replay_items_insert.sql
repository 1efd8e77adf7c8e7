-- Items of a plan, numbered in the order given, from $3 on.
INSERT INTO inbox.replay_item (plan, item, consumer, "partition", "offset", subject, round, cause, idempotency_key,
                               original_topic, original_partition, original_offset, original_time_ms, first_failed_at, failed_at)
SELECT $1, $3 - 1 + nr, $2, "partition", "offset", subject, round, cause, idempotency_key,
       original_topic, original_partition, original_offset, original_time_ms, first_failed_at, failed_at
FROM unnest($4::integer[], $5::bigint[], $6::bytea[], $7::integer[], $8::text[], $9::text[], $10::text[], $11::integer[],
            $12::bigint[], $13::bigint[], $14::timestamptz[], $15::timestamptz[])
     WITH ORDINALITY AS i ("partition", "offset", subject, round, cause, idempotency_key, original_topic, original_partition,
                           original_offset, original_time_ms, first_failed_at, failed_at, nr)
