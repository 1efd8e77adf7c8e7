-- Kafka has acknowledged these. Not those whose claim is over: whoever has it sends the item again, and it takes effect once; nor those
-- of which the consumer has said already what became of them. $2 owner, $3 items, $4 their generations.
UPDATE inbox.replay_item i
SET state = 'sent', sent_at = clock_timestamp(), lease_until = NULL
FROM unnest($3::bigint[], $4::bigint[]) AS acknowledged (item, generation)
WHERE i.plan = $1 AND i.item = acknowledged.item AND i.state = 'sending' AND i.owner = $2
  AND i.generation = acknowledged.generation AND i.lease_until > clock_timestamp()
