-- Other choices for an outbox that exists. $1 shards, $2 slot period in microseconds.
UPDATE outbox.settings SET shards = $1, slot_period = $2 * interval '1 microsecond'
