-- A lease ends. `lease_until = 'infinity'`, written by hand to keep relays off a shard, would keep them off for ever, without
-- anybody renewing it, and a relay that computes how long it lasts fails on it. Who wants a shard left alone stops the relays.

-- One that is there already is over now: whoever holds it claims it anew, under the next generation.
UPDATE outbox.shard SET lease_until = clock_timestamp() WHERE NOT isfinite(lease_until);

-- One row a shard: nothing is gained by validating it later.
ALTER TABLE outbox.shard ADD CONSTRAINT a_lease_ends CHECK (isfinite(lease_until));
