-- By what is known since when rows are kept: the present and a slot period, and since when there is an outbox, all in microseconds.
SELECT (extract(epoch FROM clock_timestamp()) * 1000000)::bigint AS now,
       (extract(epoch FROM o.slot_period) * 1000000)::bigint AS period,
       (extract(epoch FROM (SELECT min(b.installed_on) FROM outbox._migrations b)) * 1000000)::bigint AS made
FROM outbox.settings o
