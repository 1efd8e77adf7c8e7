SELECT order_id, customer, seq, amount_cents FROM orders.placed
