-- How long this session waits for a lock, in milliseconds; 0 is for ever.
SELECT setting::bigint FROM pg_settings WHERE name = 'lock_timeout'
