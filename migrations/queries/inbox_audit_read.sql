-- What commands have changed, newest first. $1 at most so many.
SELECT to_char(at AT TIME ZONE 'UTC', 'YYYY-MM-DD"T"HH24:MI:SS.US"Z"') AS at, who, command, arguments::text AS arguments, affected
FROM inbox.audit ORDER BY id DESC LIMIT $1
