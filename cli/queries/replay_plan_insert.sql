-- A plan; its items and its audit row are written in the same transaction.
INSERT INTO inbox.replay_plan (plan, consumer, topic, dead_letters, target, new_key, again, loop_cap, filters, ends, skipped, items)
VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9::text::jsonb, $10::text::jsonb, $11::text::jsonb, $12)
