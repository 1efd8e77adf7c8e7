//! The bare pipe: the same rows by one binary `COPY` into one producer with the relay's settings and headers.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use baton_protocol::envelope::{Envelope, Outgoing};
use futures_util::TryStreamExt as _;
use rdkafka::ClientContext;
use rdkafka::config::FromClientConfigAndContext as _;
use rdkafka::error::{KafkaError, RDKafkaErrorCode};
use rdkafka::message::{DeliveryResult, Header, OwnedHeaders};
use rdkafka::producer::{BaseRecord, Producer as _, ProducerContext, ThreadedProducer};
use uuid::Uuid;

use crate::arena::{Arena, Result};

const COPY: &str =
    "COPY (SELECT id, topic, key, type, payload, (extract(epoch FROM created_at) * 1000)::bigint
                    FROM outbox.message ORDER BY position) TO STDOUT (FORMAT binary)";

#[derive(Default)]
struct Reports {
    failed: AtomicU64,
}

impl ClientContext for Reports {}

impl ProducerContext for Reports {
    type DeliveryOpaque = usize;

    fn delivery(&self, result: &DeliveryResult<'_>, _: usize) {
        if result.is_err() {
            self.failed.fetch_add(1, Ordering::Relaxed);
        }
    }
}

pub(crate) async fn run(arena: &Arena) -> Result<()> {
    let producer =
        ThreadedProducer::from_config_and_context(&arena.settings.producer_config(), Reports::default())?;
    let envelope = Envelope::cloud_events(&format!("/{}", arena.database), "application/json", false);
    let mut connection = arena.connect().await?;
    let mut rows = connection.copy_out_raw(COPY).await?;
    let mut number = 0;
    while let Some(chunk) = rows.try_next().await? {
        let Some(fields) = fields(&chunk) else { continue };
        let [Some(id), Some(topic), key, r#type, payload, Some(created)] = fields else {
            return Err("a row is not as expected".into());
        };
        let topic = std::str::from_utf8(topic)?;
        let created_ms = i64::from_be_bytes(created.try_into()?);
        let outgoing = Outgoing {
            id: Uuid::from_slice(id)?,
            idempotency_key: None,
            topic,
            r#type: r#type.map(std::str::from_utf8).transpose()?,
            has_payload: payload.is_some(),
            created_ms,
            headers: None,
        };
        let mut headers = Some(OwnedHeaders::new_with_capacity(6));
        envelope.write(&outgoing, &mut |key: &str, value: Option<&[u8]>| {
            headers = headers.take().map(|h| h.insert(Header { key, value }));
        })?;
        let mut record: BaseRecord<'_, [u8], [u8], usize> =
            BaseRecord::with_opaque_to(topic, number).timestamp(created_ms);
        record.headers = headers;
        record.key = key;
        record.payload = payload;
        number += 1;
        while let Err((error, back)) = producer.send(record) {
            if error != KafkaError::MessageProduction(RDKafkaErrorCode::QueueFull) {
                return Err(error.into());
            }
            record = back;
            tokio::task::yield_now().await;
        }
    }
    producer.flush(Duration::from_secs(60))?;
    match producer.context().failed.load(Ordering::Relaxed) {
        0 => Ok(()),
        failed => Err(format!("{failed} records were refused").into()),
    }
}

/// The six fields of a row of a binary `COPY`; none for its header and trailer.
fn fields(chunk: &[u8]) -> Option<[Option<&[u8]>; 6]> {
    // The first chunk begins with the 19 bytes of the header, and may hold the first row too.
    let mut rest =
        chunk.strip_prefix(b"PGCOPY\n\xff\r\n\0").map_or(chunk, |rest| rest.get(8..).unwrap_or_default());
    let (count, after) = rest.split_first_chunk::<2>()?;
    if i16::from_be_bytes(*count) != 6 {
        return None;
    }
    rest = after;
    let mut fields = [None; 6];
    for field in &mut fields {
        let (length, after) = rest.split_first_chunk::<4>()?;
        rest = after;
        if let Ok(length) = usize::try_from(i32::from_be_bytes(*length)) {
            let (value, after) = rest.split_at_checked(length)?;
            *field = Some(value);
            rest = after;
        }
    }
    Some(fields)
}
