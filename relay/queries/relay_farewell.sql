-- Says that this relay gives everything back, before it does: from now on its share is the others', shard by shard. $1 owner.
INSERT INTO outbox.relay AS r (owner, live_until) VALUES ($1, '-infinity')
ON CONFLICT (owner) DO UPDATE SET live_until = '-infinity'
