-- How a plan's items are to be sent.
SELECT consumer, topic, dead_letters, target, new_key, items FROM inbox.replay_plan WHERE plan = $1
