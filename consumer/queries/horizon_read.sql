-- The highest record time of this consumer that was ever purged. No row: none was.
SELECT purged_record_time FROM inbox.horizon WHERE consumer = $1
