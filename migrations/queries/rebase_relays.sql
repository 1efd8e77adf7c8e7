-- Those that lived when the copy was made.
DELETE FROM outbox.relay
