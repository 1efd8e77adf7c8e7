-- Whether everything up to $1 is on disk.
SELECT pg_current_wal_flush_lsn() >= $1::pg_lsn
