-- What was written here at positions that the other cluster had given out goes behind everything that came from there, and what is
-- out of turn behind everything, in the order in which it was enqueued. How each
-- message is judged stands in rebase_judged.sql.
-- Row by row, because an UPDATE draws from the sequence in whatever order it meets the rows.
DO $$
DECLARE
    row record;
BEGIN
    FOR row IN
        {judged}
        SELECT f.leaf, f.place FROM fate f WHERE f.is_below OR f.is_moved
        ORDER BY f.is_here, f.created_at, f."position"
    LOOP
        UPDATE outbox.message SET "position" = DEFAULT WHERE tableoid = row.leaf AND ctid = row.place;
    END LOOP;
END $$
