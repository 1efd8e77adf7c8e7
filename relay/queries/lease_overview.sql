-- Who lives, what each holds, and what is free; one row a live relay or free shard. $1 owner.
-- A relay that holds a valid lease lives, whatever its heartbeat says. The asker always counts.
SELECT NULL::smallint AS free, false AS expired, o.owner,
       (SELECT count(*) FROM outbox.shard s WHERE s.owner = o.owner AND s.lease_until > clock_timestamp()) AS held
FROM (SELECT owner FROM outbox.relay WHERE live_until > clock_timestamp()
      UNION SELECT owner FROM outbox.shard WHERE lease_until > clock_timestamp()
      UNION SELECT $1) o
UNION ALL
SELECT s.shard, s.owner IS NOT NULL, s.owner, NULL
FROM outbox.shard s WHERE s.lease_until IS NULL OR s.lease_until <= clock_timestamp()
