-- Opens the transaction of one piece of work. Several statements in one file, because they go in one round trip.
-- `{stall}` is replaced by a number of milliseconds: a server that sees nothing of its client for that long (stopped,
-- partitioned, hung) ends the transaction, so that a claim never waits on a process that may not come back.
BEGIN ISOLATION LEVEL READ COMMITTED READ WRITE;
SET LOCAL statement_timeout = {stall};
SET LOCAL idle_in_transaction_session_timeout = {stall};
