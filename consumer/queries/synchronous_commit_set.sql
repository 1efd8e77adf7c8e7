-- An asynchronous commit is made synchronous: the offset moves on the strength of it. Sent along with transaction_begin.sql, but
-- where message_claim.sql comes next, which does the same in its prepared plan: unprepared this costs more than an insert.
SELECT set_config('synchronous_commit', 'on', true) WHERE current_setting('synchronous_commit') = 'off'
