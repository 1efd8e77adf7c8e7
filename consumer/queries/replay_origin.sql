-- Where a replayed record came from when it died first, and since when it fails. $1 plan, $2 item, $3 consumer.
SELECT original_partition, original_offset, original_time_ms, first_failed_at
FROM inbox.replay_item
WHERE plan = $1 AND item = $2 AND consumer = $3
