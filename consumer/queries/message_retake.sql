-- Takes work that an operator has requeued (operate_requeue.sql): in progress, of no owner and of no attempt, which nothing else leaves
-- behind. Only after message_claim.sql or batch_claim.sql has found it in progress and compared its payload, which is named here once
-- more. The row becomes this transaction's, as if it had inserted it. No row: another transaction was faster, or a lease left it behind.
-- $4 fingerprint, $5 attempts. The column makes an asynchronous commit synchronous, as in message_claim.sql.
UPDATE inbox.message
SET generation = generation + 1, attempts = greatest($5, 1)
WHERE consumer = $1 AND scope = $2 AND key = $3 AND fingerprint = $4
  AND state = 'in_progress' AND owner IS NULL AND lease_until IS NULL AND attempts = 0
RETURNING CASE current_setting('synchronous_commit') WHEN 'off' THEN set_config('synchronous_commit', 'on', true) END
