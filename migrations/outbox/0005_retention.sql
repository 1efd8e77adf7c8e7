-- Space comes back by truncating leaves. What a leaf must be for that is said here, once, for the relay that truncates it,
-- for `status`, which says why it could not be, and for whoever asks what waits.
--
-- The leaves are a ring: rows go to `slot`, the one before it is still written by transactions that began in its time, the
-- one two back is in turn, the one after `slot` comes next. The one in turn is truncated once every row in it
-- had been consumed a whole slot period ago: then whoever may have to publish a range again has had that long, and no
-- snapshot younger than a slot period (a dump's, a reader's) misses a row that its cursors do not cover.

-- The durable cursors as they were at moments past, some a slot period: what they covered was published by `at`. Relays
-- write them and delete those that no leaf is judged by any more. Losing them loses no message: it keeps leaves for longer.
CREATE TABLE outbox.milestone (
    at            timestamptz NOT NULL,
    shard         smallint NOT NULL,
    "position"    bigint NOT NULL,
    snapshot      pg_snapshot NOT NULL,
    ceiling       xid8 NOT NULL,
    late_snapshot pg_snapshot,
    late_position bigint,
    PRIMARY KEY (at, shard),
    CONSTRAINT a_late_page_has_a_snapshot_and_a_position CHECK ((late_snapshot IS NULL) = (late_position IS NULL))
);

-- The rows of a shard at or below the position of a cursor that the cursor does not cover and that `shown` shows: those of
-- transactions that its snapshot saw running, id by id, and those from its xmax to its ceiling (page_read.sql reads them so
-- too, page by page). At most so many of a transaction or a range. The slots say in which leaves to look. A SQL function, so
-- that it is planned as a part of the statement that calls it. `shown` should be a column: a call of pg_current_snapshot() in
-- its place is made again for each transaction id.
CREATE FUNCTION outbox.late_rows(
    of_shard smallint, consumed bigint, snapshot pg_snapshot, ceiling xid8, late_snapshot pg_snapshot, late_position bigint,
    shown pg_snapshot, at_most bigint, first_slot smallint DEFAULT 0::smallint, last_slot smallint DEFAULT 3::smallint
) RETURNS TABLE ("position" bigint, created_at timestamptz) LANGUAGE sql STABLE PARALLEL SAFE AS $$
    (SELECT late."position", late.created_at
     FROM unnest(ARRAY(SELECT x FROM pg_snapshot_xip(snapshot) x WHERE pg_visible_in_snapshot(x, shown))) AS x(xid)
     CROSS JOIN LATERAL (
        SELECT m."position", m.created_at FROM outbox.message m
        WHERE m.slot >= first_slot AND m.slot <= last_slot
          AND m.shard = of_shard AND outbox.xid_bits(m.xid) BETWEEN outbox.xid_bits(x.xid) AND outbox.xid_bits(x.xid)
          AND m.xid = x.xid AND m."position" + 0 <= consumed
          AND NOT (late_snapshot IS NOT NULL AND m."position" <= late_position AND pg_visible_in_snapshot(m.xid, late_snapshot))
        -- This order keeps the planner on the late index.
        ORDER BY m.shard, outbox.xid_bits(m.xid) LIMIT at_most
     ) late)
    UNION ALL
    (SELECT late."position", late.created_at
     FROM (SELECT pg_snapshot_xmax(snapshot)::text::bigint AS first, ceiling::text::bigint AS ceiling) r
     CROSS JOIN LATERAL (
        SELECT r.first % 2147483648 AS least,
               CASE WHEN r.first / 2147483648 = r.ceiling / 2147483648 THEN r.ceiling % 2147483648 ELSE 2147483648 END AS below
        WHERE r.first < r.ceiling
        UNION ALL
        SELECT 0, r.ceiling % 2147483648 WHERE r.first / 2147483648 < r.ceiling / 2147483648
     ) part
     CROSS JOIN LATERAL (
        SELECT m."position", m.created_at FROM outbox.message m
        WHERE m.slot >= first_slot AND m.slot <= last_slot
          AND m.shard = of_shard AND outbox.xid_bits(m.xid) >= part.least AND outbox.xid_bits(m.xid) < part.below
          AND m.xid >= pg_snapshot_xmax(snapshot) AND m.xid < $4 AND m."position" + 0 <= consumed
          AND pg_visible_in_snapshot(m.xid, shown)
          AND NOT (late_snapshot IS NOT NULL AND m."position" <= late_position AND pg_visible_in_snapshot(m.xid, late_snapshot))
        ORDER BY m.shard, outbox.xid_bits(m.xid) LIMIT at_most
     ) late)
$$;

-- The shards that have rows in a leaf which their cursor does not cover, and one such position of each: by the durable
-- cursors, or by those of a milestone. A shard without a cursor covers nothing. Two probes of an index a shard, however many
-- rows the leaf has.
CREATE FUNCTION outbox.unconsumed(in_slot smallint, at_milestone timestamptz DEFAULT NULL)
    RETURNS TABLE (shard smallint, "position" bigint) LANGUAGE sql STABLE PARALLEL SAFE AS $$
    SELECT f.shard, least(fresh."position", late."position")
    FROM outbox.settings o
    -- Of every shard there is, not of those that some table happens to have a row of.
    CROSS JOIN LATERAL (SELECT n::smallint AS shard FROM generate_series(0, o.shards - 1) n) f
    CROSS JOIN (SELECT pg_current_snapshot() AS shown OFFSET 0) now
    LEFT JOIN (
        SELECT c.shard, c."position", c.snapshot, c.ceiling, c.late_snapshot, c.late_position
        FROM outbox.cursor c WHERE at_milestone IS NULL
        UNION ALL
        SELECT m.shard, m."position", m.snapshot, m.ceiling, m.late_snapshot, m.late_position
        FROM outbox.milestone m WHERE m.at = at_milestone
    ) c ON c.shard = f.shard
    LEFT JOIN LATERAL (
        SELECT m."position" FROM outbox.message m
        WHERE m.slot = in_slot AND m.shard = f.shard AND m."position" > coalesce(c."position", -1)
        ORDER BY m."position" LIMIT 1
    ) fresh ON true
    LEFT JOIN LATERAL (
        SELECT l."position"
        FROM outbox.late_rows(f.shard, c."position", c.snapshot, c.ceiling, c.late_snapshot, c.late_position,
                              now.shown, 1, in_slot, in_slot) l
        LIMIT 1
    ) late ON true
    WHERE fresh."position" IS NOT NULL OR late."position" IS NOT NULL
$$;

-- The oldest milestone by which every row of a leaf was consumed; null where there is none. The youngest is asked first: if it
-- does not cover them, none does.
CREATE FUNCTION outbox.consumed_since(in_slot smallint) RETURNS timestamptz LANGUAGE sql STABLE PARALLEL SAFE AS $$
    SELECT CASE WHEN NOT EXISTS (SELECT FROM outbox.unconsumed(in_slot, youngest.at))
                THEN (SELECT m.at FROM (SELECT DISTINCT at FROM outbox.milestone) m
                      WHERE NOT EXISTS (SELECT FROM outbox.unconsumed(in_slot, m.at))
                      ORDER BY m.at LIMIT 1) END
    FROM (SELECT max(at) AS at FROM outbox.milestone OFFSET 0) youngest
    WHERE youngest.at IS NOT NULL
$$;

-- Truncates the leaf in turn, if every row in it had been consumed a slot period ago. Comes back with the bytes that were
-- freed, or with what stands against it. One statement, so that the lock ends with it whatever becomes of the client.
--
-- The lock is on the leaf alone, and never waited for: who waits for ACCESS EXCLUSIVE makes everybody behind him wait. A
-- writer of this leaf, prepared ones included, holds ROW EXCLUSIVE, so under the lock every row is committed or
-- void, and each statement of this function sees all of them, and the cursors, by a snapshot that is taken after the lock. That
-- takes READ COMMITTED. A transaction that began in the slot's time and has not written yet waits for
-- milliseconds and writes to an empty leaf. Beside the leaf other locks are taken (its TOAST table's, the cursors'), which somebody may hold:
-- they are waited for so briefly that nobody is held up by it.
CREATE FUNCTION outbox.truncate_leaf(in_slot smallint, OUT outcome text, OUT bytes bigint, OUT shard smallint, OUT "position" bigint)
    LANGUAGE plpgsql
    SET lock_timeout = '100ms' SET row_security = off SET plan_cache_mode = force_custom_plan SET enable_seqscan = off SET enable_bitmapscan = off SET jit = off AS $$
DECLARE
    leaf   text := 'outbox.message_' || in_slot;
    oldest timestamptz;
BEGIN
    IF current_setting('transaction_isolation') <> 'read committed' THEN
        RAISE EXCEPTION 'a leaf is truncated under READ COMMITTED only: another snapshot is older than the lock';
    END IF;
    IF (outbox.slot_at(clock_timestamp()) + 2) % 4 <> in_slot THEN
        outcome := 'not in turn';
        RETURN;
    END IF;
    -- What is asked is asked of the whole table, so a leaf that was taken out of it would look empty of what waits.
    IF NOT EXISTS (SELECT FROM pg_inherits WHERE inhrelid = leaf::regclass AND inhparent = 'outbox.message'::regclass) THEN
        RAISE EXCEPTION '% is not attached to outbox.message: attach it again', leaf;
    END IF;
    BEGIN
        EXECUTE 'LOCK TABLE ' || leaf || ' IN ACCESS EXCLUSIVE MODE NOWAIT';
        bytes := pg_total_relation_size(leaf);
        IF pg_relation_size(leaf) = 0 THEN
            outcome := 'empty';
            RETURN;
        END IF;
        SELECT u.shard, u."position" INTO shard, "position" FROM outbox.unconsumed(in_slot) u LIMIT 1;
        IF FOUND THEN
            outcome := 'unconsumed';
            RETURN;
        END IF;
        SELECT max(m.at) INTO oldest
        FROM outbox.milestone m, outbox.settings s WHERE m.at <= clock_timestamp() - s.slot_period;
        SELECT u.shard, u."position" INTO shard, "position" FROM outbox.unconsumed(in_slot, oldest) u LIMIT 1;
        IF oldest IS NULL OR FOUND THEN
            outcome := 'kept';
            RETURN;
        END IF;
        -- A synchronous standby that is away must not make this transaction keep its lock.
        PERFORM set_config('synchronous_commit', 'local', true);
        EXECUTE 'TRUNCATE ' || leaf;
        bytes := bytes - pg_total_relation_size(leaf);
        outcome := 'truncated';
    EXCEPTION WHEN lock_not_available THEN
        outcome := 'locked';
        bytes := NULL;
    END;
END $$;
