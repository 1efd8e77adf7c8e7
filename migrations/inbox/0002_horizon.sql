-- The horizon: what is finished goes after a while (docs/decisions/0014).

-- By when it was finished, not by the record's time: a first start over two years of history finishes millions of rows whose
-- records are older than any horizon, and each purge would walk them all and keep them all.
DROP INDEX inbox.message_purge;
CREATE INDEX message_purge ON inbox.message (consumer, finished_at) WHERE state = 'done';

-- When a parked record was done or discarded, written with that; without it the last thing that is known of the record counts.
ALTER TABLE inbox.parked ADD COLUMN settled_at timestamptz;
CREATE INDEX parked_purge ON inbox.parked (consumer, coalesce(settled_at, last_failed_at, first_failed_at))
    WHERE state IN ('done', 'discarded');
