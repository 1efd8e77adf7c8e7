-- Ends the leases of a consumer, as if their time were over. For tests of handlers only.
UPDATE inbox.message SET lease_until = clock_timestamp()
WHERE consumer = $1 AND state = 'in_progress' AND lease_until > clock_timestamp()
