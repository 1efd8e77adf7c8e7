SELECT FROM billing.invoice LIMIT 0
