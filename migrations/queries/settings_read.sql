-- What was chosen for this outbox; the slot period in microseconds.
SELECT outbox_id, shards, (extract(epoch FROM slot_period) * 1000000)::bigint AS slot_period_us FROM outbox.settings
