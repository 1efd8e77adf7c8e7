//! The consumer kit on a real Postgres and a real Kafka: `DATABASE_URL` and `KAFKA_BROKERS` say where.
//!
//! Each test has a database and topics of its own and a hard time-out. Tests wait on signals or ask boundedly for a state
//! ([`fixture::eventually`]); they never wait for time to pass.

#![expect(
    clippy::unwrap_used,
    clippy::expect_used,
    reason = "a helper of a test fails the test as the test itself would"
)]

mod again;
mod batch;
mod batched;
mod breaker;
mod failure;
mod fingerprints;
mod fixture;
mod health;
mod horizon;
mod http;
mod inbox;
mod kept;
mod kit;
mod leased;
mod leased_runtime;
mod log_ends;
mod metrics;
mod outage;
mod parked;
mod proxy;
mod readme;
mod rebalance;
mod replayed;
mod routes;
mod runtime;
mod shutdown;
mod start;
mod wire;
