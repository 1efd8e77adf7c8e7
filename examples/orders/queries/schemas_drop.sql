-- Everything that setup and an earlier run have made in this database.
DROP SCHEMA IF EXISTS billing, orders, inbox, outbox CASCADE
