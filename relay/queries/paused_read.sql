-- The topics that operators have paused.
SELECT topic FROM outbox.paused ORDER BY topic
