-- From here to the end of the transaction, no lock is waited for longer. $1 milliseconds, with their unit.
SELECT set_config('lock_timeout', $1, true)
