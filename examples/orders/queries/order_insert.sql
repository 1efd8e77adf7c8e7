INSERT INTO orders.placed (order_id, customer, seq, amount_cents) VALUES ($1, $2, $3, $4)
