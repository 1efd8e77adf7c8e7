-- What a rebase makes of each shard. How each message is judged stands in rebase_judged.sql.
{judged}
SELECT t.shard, t.before, t.after,
       count(*) FILTER (WHERE f.is_waiting) AS waiting,
       count(*) FILTER (WHERE f."position" > t.after AND (f.is_covered OR f.is_unknown) AND NOT f.is_here) AS repeats,
       count(*) FILTER (WHERE f.is_below) AS moved,
       count(*) FILTER (WHERE f.is_moved AND NOT f.is_below) AS out_of_turn,
       count(*) FILTER (WHERE f.is_future) AS future
FROM target t LEFT JOIN fate f ON f.shard = t.shard
GROUP BY t.shard, t.before, t.after
ORDER BY t.shard
