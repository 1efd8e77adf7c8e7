//! The end-to-end tests: the real programs on a real Postgres and a real Kafka.
//!
//! | module | shows |
//! |---|---|
//! | [`envelope`] | what is inserted by SQL alone is what any Kafka consumer reads |
//! | [`late`] | what commits late, in every way there is, is published and in the order of its key |
//! | [`partitions`] | keys land where Java's own producer puts them |
//! | [`ownership`] | one owner a generation: kills, hand-overs, cut connections |
//! | [`zombies`] | a relay stopped past its lease and continued changes nothing |
//! | [`refusals`] | what Kafka refuses stops its shard and nothing else |
//! | [`status`] | the JSON of `baton status` |
//! | [`effects`] | a consumer applies each message once, whatever it is fed and whenever it dies |
//! | [`bad_input`] | one clear message, the right exit code, no password |
//! | [`plans`] | what a poll costs does not depend on what waits or stays open |
//! | [`under_fire`] | nothing is lost, forged or reordered while everything is killed; planted bugs are found |

mod bad_input;
mod effects;
mod envelope;
mod late;
mod leases;
mod ownership;
mod partitions;
mod plans;
mod refusals;
mod status;
mod under_fire;
mod zombies;
