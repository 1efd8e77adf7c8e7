-- The subscriptions that would go on writing another cluster's rows into this outbox.
SELECT DISTINCT s.subname::text
FROM pg_subscription s
JOIN pg_subscription_rel r ON r.srsubid = s.oid
JOIN pg_class c ON c.oid = r.srrelid
JOIN pg_namespace n ON n.oid = c.relnamespace
WHERE s.subenabled AND n.nspname = 'outbox'
ORDER BY 1
