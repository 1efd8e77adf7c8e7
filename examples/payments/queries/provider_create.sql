-- Stands for a payment provider: elsewhere, with a memory of the keys that it was given.
CREATE TABLE IF NOT EXISTS provider_charge (
    id     bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    key    text NOT NULL UNIQUE,
    cents  bigint NOT NULL CHECK (cents > 0)
);
