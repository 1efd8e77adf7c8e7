-- A literal instead of a look-up, so that inserts inline it. {seconds} is the slot period.
CREATE OR REPLACE FUNCTION outbox.slot_at(at timestamptz) RETURNS smallint
    LANGUAGE sql STABLE PARALLEL SAFE
    RETURN floor(extract(epoch FROM at) / {seconds})::bigint % 4
