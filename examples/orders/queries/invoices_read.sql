SELECT order_id, customer, seq, amount_cents FROM billing.invoice ORDER BY written
