-- Who lives or holds a lease that has not run out: its name, until when at most, how many shards it holds.
SELECT o.owner, to_char(max(o.until) AT TIME ZONE 'UTC', 'YYYY-MM-DD"T"HH24:MI:SS"Z"'), count(o.shard)
FROM (SELECT owner, live_until AS until, NULL::smallint AS shard FROM outbox.relay WHERE live_until > clock_timestamp()
      UNION ALL
      SELECT owner, lease_until, shard FROM outbox.shard WHERE lease_until > clock_timestamp()) o
GROUP BY o.owner ORDER BY o.owner
