-- A literal instead of a look-up; not inlined, because a generated column is planned anew by every statement. {shards} is the
-- number of shards.
CREATE OR REPLACE FUNCTION outbox.shard_of(key text, "position" bigint) RETURNS smallint
    LANGUAGE plpgsql IMMUTABLE PARALLEL SAFE AS $$
BEGIN
    RETURN ((coalesce(hashtextextended(key COLLATE "C", 0), "position") & 9223372036854775807) % {shards})::smallint;
END $$
