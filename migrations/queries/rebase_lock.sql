-- Nobody enqueues, claims or advances until this transaction ends; reading and dumping go on.
LOCK TABLE outbox.shard, outbox.fence, outbox.advance, outbox.message IN SHARE ROW EXCLUSIVE MODE
