-- A literal instead of a look-up, so that inserts inline it. {shards} is the number of shards.
CREATE OR REPLACE FUNCTION outbox.shard_of(key text, "position" bigint) RETURNS smallint
    LANGUAGE sql IMMUTABLE PARALLEL SAFE
    RETURN (coalesce(hashtextextended(key COLLATE "C", 0), "position") & 9223372036854775807) % {shards}
