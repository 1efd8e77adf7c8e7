-- Every consumer that has anything in the inbox: hopped from one to the next, whatever each of them has.
WITH RECURSIVE applied AS (
    SELECT min(consumer COLLATE "C") AS consumer FROM inbox.message
    UNION ALL
    SELECT (SELECT min(consumer COLLATE "C") FROM inbox.message WHERE consumer > a.consumer) FROM applied a WHERE a.consumer IS NOT NULL
), aside AS (
    SELECT min(consumer COLLATE "C") AS consumer FROM inbox.parked
    UNION ALL
    SELECT (SELECT min(consumer COLLATE "C") FROM inbox.parked WHERE consumer > a.consumer) FROM aside a WHERE a.consumer IS NOT NULL
)
SELECT consumer FROM applied WHERE consumer IS NOT NULL UNION SELECT consumer FROM aside WHERE consumer IS NOT NULL ORDER BY 1
