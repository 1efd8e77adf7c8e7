-- Opens the transaction of one piece of work. Several statements in one file, because they go in one round trip.
-- `{stall}` is replaced by a number of milliseconds: a server that sees nothing of its client for that long (stopped,
-- partitioned, hung) ends the transaction, so that a claim never waits on a process that may not come back.
-- An asynchronous commit is made synchronous: the offset moves on the strength of it.
BEGIN ISOLATION LEVEL READ COMMITTED READ WRITE;
SET LOCAL statement_timeout = {stall};
SET LOCAL idle_in_transaction_session_timeout = {stall};
SELECT set_config('synchronous_commit', 'on', true) WHERE current_setting('synchronous_commit') = 'off';
