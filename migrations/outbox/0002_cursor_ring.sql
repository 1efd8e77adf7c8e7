-- Cursors as a ring of appended rows. A row that is updated four times a second leaves every version behind while any
-- snapshot of the cluster is held, and each next update walks them all. An advance that appends has nothing to walk.
--
-- How the durable cursor of a shard is to be read: from the view outbox.cursor, or as the row of outbox.advance with the
-- highest number. Whoever claims a shard reads it in a statement of its own after the claim: the claim may have waited
-- for an advance that its own snapshot does not show.

-- The row of a shard on whose lock claims and advances meet. A claim writes its generation into it; an advance locks it
-- and requires its generation. A lock makes no version, so only claims do, and the row stays quick to find.
ALTER TABLE outbox.cursor RENAME TO fence;
ALTER TABLE outbox.fence RENAME CONSTRAINT cursor_pkey TO fence_pkey;
ALTER TABLE outbox.fence RENAME CONSTRAINT cursor_shard_fkey TO fence_shard_fkey;

-- What was published, advance by advance: every message with position <= `position` that `snapshot` shows, and, while
-- late ones are being worked off, those that `late_snapshot` shows up to `late_position`. `generation` is that of the
-- lease it was written under. The newest row of a shard counts; relays delete those that lie some hundreds back.
-- No foreign key: its check would lock the lease row, and walk the versions that renewals leave.
CREATE TABLE outbox.advance (
    shard         smallint NOT NULL,
    number        bigint NOT NULL,
    generation    bigint NOT NULL,
    "position"    bigint NOT NULL,
    snapshot      pg_snapshot NOT NULL,
    ceiling       xid8 NOT NULL,
    late_snapshot pg_snapshot,
    late_position bigint,
    advanced_at   timestamptz NOT NULL DEFAULT clock_timestamp(),
    PRIMARY KEY (shard, number),
    CONSTRAINT a_late_page_has_a_snapshot_and_a_position CHECK ((late_snapshot IS NULL) = (late_position IS NULL))
);

INSERT INTO outbox.advance (shard, number, generation, "position", snapshot, ceiling, late_snapshot, late_position, advanced_at)
SELECT shard, 1, generation, "position", snapshot, ceiling, late_snapshot, late_position, advanced_at FROM outbox.fence;

ALTER TABLE outbox.fence
    DROP COLUMN "position", DROP COLUMN snapshot, DROP COLUMN ceiling,
    DROP COLUMN late_snapshot, DROP COLUMN late_position, DROP COLUMN advanced_at;

-- Renewals leave versions of the lease row behind, too. In this index the valid one, which ends last, is the first from above,
-- and the ones before end below the present. By an expression, because the planner would take the primary key otherwise
-- and walk them all.
CREATE INDEX shard_lease ON outbox.shard ((shard + 0), lease_until);

-- How far each shard is published. `generation` is that of the last claim.
CREATE VIEW outbox.cursor AS
SELECT f.shard, f.generation, a.number, a."position", a.snapshot, a.ceiling, a.late_snapshot, a.late_position, a.advanced_at
FROM outbox.fence f
CROSS JOIN LATERAL (SELECT * FROM outbox.advance WHERE shard = f.shard ORDER BY number DESC LIMIT 1) a;
