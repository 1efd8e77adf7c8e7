-- The horizon: what is finished goes after a while (docs/decisions/0014).

-- Not by the record's time: a first start over two years of history finishes millions of rows whose records are older than any
-- horizon, and each purge would walk them all and keep them all. Not by when it was finished either: a mark may change no column
-- of an index, then Postgres writes it beside the claim and touches no index; with the free half of each page that took a batch's
-- marks from 28 to 17 µs each (PostgreSQL 15, 2 cores).
DROP INDEX inbox.message_purge;
CREATE INDEX message_purge ON inbox.message (consumer, created_at) WHERE cause IS NULL;
ALTER TABLE inbox.message SET (fillfactor = 50);

-- When a parked record was done or discarded, written with that; without it the last thing that is known of the record counts.
ALTER TABLE inbox.parked ADD COLUMN settled_at timestamptz;
CREATE INDEX parked_purge ON inbox.parked (consumer, coalesce(settled_at, last_failed_at, first_failed_at))
    WHERE state IN ('done', 'discarded');

-- Dead ones apart: they stay, and whether a key's queue is empty is asked for every record that goes behind it.
DROP INDEX inbox.parked_queue;
CREATE INDEX parked_queue ON inbox.parked (consumer, topic, sha256(key), sequence) WHERE state IN ('retrying', 'blocked');
CREATE INDEX parked_dead ON inbox.parked (consumer, topic, sha256(key), sequence) WHERE state = 'dead';
