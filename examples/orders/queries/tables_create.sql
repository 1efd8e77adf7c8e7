-- The example's own tables. Both sides live in one database here; in earnest they usually do not.
CREATE SCHEMA IF NOT EXISTS orders;
CREATE SCHEMA IF NOT EXISTS billing;

-- A customer's row is the lock under which its orders are numbered and enqueued.
CREATE TABLE IF NOT EXISTS orders.customer (
    customer text PRIMARY KEY,
    seq      bigint NOT NULL
);

CREATE TABLE IF NOT EXISTS orders.placed (
    order_id     uuid PRIMARY KEY,
    customer     text NOT NULL,
    seq          bigint NOT NULL,
    amount_cents bigint NOT NULL
);

-- On purpose without a unique constraint on order_id: a double effect must be seen, not prevented by the table.
-- `written` is the order in which invoices were written, also when the clock is set back.
CREATE TABLE IF NOT EXISTS billing.invoice (
    order_id     uuid NOT NULL,
    customer     text NOT NULL,
    seq          bigint NOT NULL,
    amount_cents bigint NOT NULL,
    applied_at   timestamptz NOT NULL DEFAULT clock_timestamp(),
    written      bigint NOT NULL GENERATED ALWAYS AS IDENTITY
);
CREATE INDEX IF NOT EXISTS invoice_order_id ON billing.invoice (order_id);
