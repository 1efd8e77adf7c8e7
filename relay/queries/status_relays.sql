-- The relays that live and the shards each holds.
SELECT o.owner, ARRAY(SELECT s.shard FROM outbox.shard s WHERE s.owner = o.owner AND s.lease_until > clock_timestamp() ORDER BY 1)
FROM (SELECT owner FROM outbox.relay WHERE live_until > clock_timestamp()
      UNION SELECT owner FROM outbox.shard WHERE lease_until > clock_timestamp()) o
ORDER BY 1
