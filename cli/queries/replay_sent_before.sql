-- Which of these records any plan of this consumer has sent, or is sending, and up to which round. $1 consumer, $2 subjects.
SELECT subject, max(round) FROM inbox.replay_item
WHERE consumer = $1 AND subject = ANY ($2) AND state <> 'waiting'
GROUP BY subject
