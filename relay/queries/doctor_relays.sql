-- How many relays live, and how many on the list died longer ago than $1 seconds.
SELECT count(*) FILTER (WHERE r.live_until > clock_timestamp()),
       count(*) FILTER (WHERE r.live_until < clock_timestamp() - make_interval(secs => $1))
FROM outbox.relay r
