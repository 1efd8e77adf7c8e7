-- Takes the customer's row lock, held until the order commits, and the next number.
INSERT INTO orders.customer AS c (customer, seq) VALUES ($1, 1)
ON CONFLICT (customer) DO UPDATE SET seq = c.seq + 1
RETURNING seq
