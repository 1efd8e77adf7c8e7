-- Whether a record of this time is too old: for a claim that commits before its effects, in a statement after the one that inserted,
-- whose snapshot is later than any purge that made room for it (message_complete.sql says why). $2 the record's time in milliseconds.
SELECT EXISTS (SELECT FROM inbox.horizon WHERE consumer = $1 AND purged_record_time >= to_timestamp($2::bigint / 1000.0))
