-- Of the transaction that claims items. A run that is stopped in the middle of it holds the lock of replay_lock.sql.
SET LOCAL synchronous_commit = on;
SET LOCAL statement_timeout = '30s';
SET LOCAL idle_in_transaction_session_timeout = '10s';
