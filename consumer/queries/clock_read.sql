-- The time that dead letters carry: the database's, never a worker's.
SELECT clock_timestamp()
