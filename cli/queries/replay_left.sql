-- How many items of a plan wait to be sent, and how many are being sent.
SELECT count(*) FILTER (WHERE state = 'waiting'), count(*) FILTER (WHERE state = 'sending')
FROM inbox.replay_item WHERE plan = $1 AND state IN ('waiting', 'sending')
