-- Gives claims back of items that were surely not sent, each with the reason or null, as if they had not been claimed. $2 owner, $3 items, $4 generations, $5 reasons.
UPDATE inbox.replay_item i
SET state = 'waiting', lease_until = NULL, generation = i.generation - 1, error = coalesce(unsent.error, i.error)
FROM unnest($3::bigint[], $4::bigint[], $5::text[]) AS unsent (item, generation, error)
WHERE i.plan = $1 AND i.item = unsent.item AND i.state = 'sending' AND i.owner = $2 AND i.generation = unsent.generation
