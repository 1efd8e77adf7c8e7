-- Late rows of one transaction, in order of position: a page of them costs a page, however many there are.

-- The lowest 31 bits of a transaction id. With all 64 an index row of (shard, xid, position) has 32 bytes, and Postgres then
-- leaves half of every index page empty where keys come in ascending runs; with these it has the 24 bytes of (shard, position).
-- Two ids with the same bits are 2^31 transactions apart: whoever looks one up compares xid as well.
CREATE FUNCTION outbox.xid_bits(xid xid8) RETURNS integer
    LANGUAGE sql IMMUTABLE PARALLEL SAFE
    RETURN ((xid::text)::bigint % 2147483648)::integer;

DROP INDEX outbox.message_shard_xid;
CREATE INDEX message_0_late ON outbox.message_0 (shard, outbox.xid_bits(xid), "position");
CREATE INDEX message_1_late ON outbox.message_1 (shard, outbox.xid_bits(xid), "position");
CREATE INDEX message_2_late ON outbox.message_2 (shard, outbox.xid_bits(xid), "position");
CREATE INDEX message_3_late ON outbox.message_3 (shard, outbox.xid_bits(xid), "position");
CREATE INDEX message_late ON outbox.message (shard, outbox.xid_bits(xid), "position");

-- No statistics on them, as none on xid: the plan must not follow what the table looked like when ANALYZE came by.
ALTER INDEX outbox.message_0_late ALTER COLUMN 2 SET STATISTICS 0;
ALTER INDEX outbox.message_1_late ALTER COLUMN 2 SET STATISTICS 0;
ALTER INDEX outbox.message_2_late ALTER COLUMN 2 SET STATISTICS 0;
ALTER INDEX outbox.message_3_late ALTER COLUMN 2 SET STATISTICS 0;
