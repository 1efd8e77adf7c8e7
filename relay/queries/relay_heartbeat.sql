-- Says that this relay lives, for the fair share. $1 owner, $2 milliseconds.
INSERT INTO outbox.relay AS r (owner, live_until)
VALUES ($1, clock_timestamp() + make_interval(secs => $2::double precision / 1000))
ON CONFLICT (owner) DO UPDATE SET live_until = excluded.live_until
