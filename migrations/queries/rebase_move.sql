-- What was written here at positions that the other cluster had given out goes behind everything that came from there, in the
-- order it has. {used}: those positions end there; {carried}: what is from here has a later transaction id; {next}: the next one.
-- Row by row, because an UPDATE draws from the sequence in whatever order it meets the rows.
DO $$
DECLARE
    row record;
BEGIN
    FOR row IN
        SELECT m.tableoid AS leaf, m.ctid AS place FROM outbox.message m
        WHERE m."position" <= {used} AND m.xid::text::bigint > {carried} AND m.xid::text::bigint <= {next} - age(m.xmin)
        ORDER BY m."position"
    LOOP
        UPDATE outbox.message SET "position" = DEFAULT WHERE tableoid = row.leaf AND ctid = row.place;
    END LOOP;
END $$
