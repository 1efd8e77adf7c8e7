//! A record as a message: what it is deduplicated by, and what its handler is given.

use std::sync::Arc;

use baton_protocol::envelope::{Identity, identity};
use baton_protocol::replay;

use crate::inbox::{Origin, SCOPE_LIMIT, Work};
use crate::{Decode, Delivery, Failure, Fingerprints, Record, Scope};

/// A record that can be deduplicated.
pub(crate) struct Message {
    pub(crate) record: Arc<Record>,
    pub(crate) work: Work,
    identity: Arc<Identity>,
    /// Why its payload cannot be compared as set: it is not handled.
    refused: Option<String>,
}

impl Message {
    /// What the record is deduplicated by, or why it cannot be.
    pub(crate) fn of(
        record: &Arc<Record>,
        scope: &Scope,
        fingerprints: &Fingerprints,
    ) -> Result<Self, String> {
        if !record.headers_are_text() {
            return Err("a header's name is not UTF-8, so the record's identity cannot be read".to_owned());
        }
        let identity = identity(record.headers()).ok_or_else(|| {
            "no usable idempotency-key, no ce_source with ce_id and no id among its headers".to_owned()
        })?;
        let scope = scope.of(record.original_topic(), identity.r#type.as_deref());
        if scope.len() > SCOPE_LIMIT {
            return Err(format!(
                "its scope has {} bytes, from a long type; the inbox keeps {SCOPE_LIMIT}",
                scope.len()
            ));
        }
        let (fingerprint, refused) = fingerprints.take(record);
        let work = Work {
            scope,
            key: identity.key.clone(),
            fingerprint,
            attempts: 1,
            origin: Some(Origin {
                topic: record.topic().to_owned(),
                partition: record.partition(),
                offset: record.offset(),
                timestamp_ms: record.timestamp_ms(),
            }),
            replay: replay::item(record.headers()),
        };
        Ok(Self { record: Arc::clone(record), work, identity: Arc::new(identity), refused })
    }

    /// What its handler is given on the attempt that `work` counts, or why it is given nothing.
    pub(crate) fn delivery<P: Decode>(&self) -> Result<Delivery<P>, Failure> {
        match &self.refused {
            Some(error) => Err(Failure::undecodable(error.clone())),
            None => {
                Delivery::decode(Arc::clone(&self.record), Arc::clone(&self.identity), self.work.attempts)
            }
        }
    }
}
