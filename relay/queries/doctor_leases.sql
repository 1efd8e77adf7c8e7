-- Leases, and relays on the list of those that live, that last longer than $1 seconds from now: no relay asks for so much.
SELECT s.shard, s.owner, s.lease_until::text AS until FROM outbox.shard s
WHERE s.lease_until > clock_timestamp() + make_interval(secs => $1)
UNION ALL
SELECT NULL, r.owner, r.live_until::text FROM outbox.relay r WHERE r.live_until > clock_timestamp() + make_interval(secs => $1)
ORDER BY 1, 2
