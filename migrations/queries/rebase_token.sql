-- Whoever remembers a token of before the copy writes nothing here. A table that is not logged may have come without its row.
INSERT INTO outbox.token DEFAULT VALUES ON CONFLICT (only_row) DO UPDATE SET token = gen_random_uuid()
