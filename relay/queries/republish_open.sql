-- Begins the one transaction in which a range is counted and read. Sent as one text, because the lock has to be there before the
-- first statement takes the snapshot: a truncation shows in every snapshot, so one in between would make what is read together not belong
-- together. ACCESS SHARE on every leaf lets all go on but the truncation, which never waits for it and tries again. A policy that
-- hides rows is an error. One whose client hangs must not hold back the vacuum and the ring for ever.
BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY;
SET LOCAL lock_timeout = '10s';
SET LOCAL row_security = off;
SET LOCAL jit = off;
SET LOCAL statement_timeout = '30min';
SET LOCAL idle_in_transaction_session_timeout = '5min';
LOCK TABLE outbox.message IN ACCESS SHARE MODE
