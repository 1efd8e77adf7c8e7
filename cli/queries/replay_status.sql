-- Plans and what became of their items, the newest first. $1 one plan, or null for all.
SELECT p.plan, p.consumer, p.topic, p.dead_letters, p.target, p.new_key, p.items, p.created_by,
       to_char(p.created_at AT TIME ZONE 'UTC', 'YYYY-MM-DD"T"HH24:MI:SS.MS"Z"') AS created_at,
       count(i.item) FILTER (WHERE i.state = 'waiting') AS waiting,
       count(i.item) FILTER (WHERE i.state = 'sending') AS sending,
       count(i.item) FILTER (WHERE i.state = 'sent') AS unsettled,
       count(i.item) FILTER (WHERE i.state = 'applied') AS applied,
       count(i.item) FILTER (WHERE i.state = 'duplicate') AS duplicate,
       count(i.item) FILTER (WHERE i.state = 'conflict') AS conflict,
       count(i.item) FILTER (WHERE i.state = 'dead_again') AS dead_again
FROM inbox.replay_plan p LEFT JOIN inbox.replay_item i USING (plan)
WHERE $1::uuid IS NULL OR p.plan = $1
GROUP BY p.plan
ORDER BY p.created_at DESC
