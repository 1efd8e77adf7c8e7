-- Which of these records any plan of this consumer has sent, or may have, and up to which round. $1 consumer, $2 subjects.
SELECT subject, max(round) FROM inbox.replay_item
WHERE consumer = $1 AND subject = ANY ($2) AND generation > 0
GROUP BY subject
