-- Who lives, what each holds, and what is free; one row a live relay or free shard. $1 owner.
-- A relay that holds a valid lease lives, however late its heartbeat, but for one that has said farewell (`-infinity`): what it
-- still drains is not kept for it. The asker always counts. The last column: in how many milliseconds the first lease of another
-- relay runs out, unless it is renewed; an hour at most, so that it is a number whatever somebody wrote there.
SELECT NULL::smallint AS free, false AS expired, o.owner,
       (SELECT count(*) FROM outbox.shard s WHERE s.owner = o.owner AND s.lease_until > clock_timestamp()) AS held,
       (SELECT ceil(extract(epoch FROM least(min(s.lease_until), clock_timestamp() + '1 h'::interval) - clock_timestamp()) * 1000)::bigint
        FROM outbox.shard s
        WHERE s.owner = o.owner AND o.owner <> $1 AND s.lease_until > clock_timestamp()) AS expires_in
FROM (SELECT owner FROM outbox.relay WHERE live_until > clock_timestamp()
      UNION SELECT owner FROM outbox.shard s WHERE s.lease_until > clock_timestamp()
            AND NOT EXISTS (SELECT FROM outbox.relay r WHERE r.owner = s.owner AND r.live_until = '-infinity')
      UNION SELECT $1) o
UNION ALL
SELECT s.shard, s.owner IS NOT NULL, s.owner, NULL, NULL
FROM outbox.shard s WHERE s.lease_until IS NULL OR s.lease_until <= clock_timestamp()
