-- What stands against another number of shards.
SELECT EXISTS (SELECT FROM outbox.message) AS messages,
       EXISTS (SELECT FROM outbox.parked) AS parked,
       EXISTS (SELECT FROM outbox.shard WHERE lease_until > clock_timestamp())
           OR EXISTS (SELECT FROM outbox.relay WHERE live_until > clock_timestamp()) AS relays
