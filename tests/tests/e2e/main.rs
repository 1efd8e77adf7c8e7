//! The end-to-end tests: the real programs on a real Postgres and a real Kafka.
//!
//! | module | shows |
//! |---|---|
//! | [`envelope`] | what is inserted by SQL alone is what any Kafka consumer reads |
//! | [`partitions`] | keys land where Java's own producer puts them |
//! | [`under_fire`] | nothing is lost, forged or reordered while everything is killed; planted bugs are found |

mod envelope;
mod partitions;
mod under_fire;
