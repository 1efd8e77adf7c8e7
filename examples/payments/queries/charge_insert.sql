-- A key that is known is answered by its first charge.
INSERT INTO provider_charge AS known (key, cents) VALUES ($1, $2)
ON CONFLICT (key) DO UPDATE SET key = known.key
RETURNING id, cents;
