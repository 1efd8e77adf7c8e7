-- Cursors of moments past, of the other cluster: space comes back a slot period after the first of this one.
DELETE FROM outbox.milestone
