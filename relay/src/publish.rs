//! One shard's producer: rows go in, delivery reports come out as a contiguous prefix.
//!
//! Each shard has an idempotent producer of its own, so that one shard can be purged and rebuilt alone. A producer lives
//! until the first failed report, a fatal error, or the end of its shard's trust; then it is purged, every report is
//! awaited, and it is destroyed. It is never used again after a failure: what follows a gap must not overtake it.

use std::num::NonZeroU32;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use baton_protocol::envelope::{Envelope, Outgoing};
use baton_protocol::lifecycle::message::Cause;
use rdkafka::error::{KafkaError, RDKafkaErrorCode};
use rdkafka::message::{DeliveryResult, Header, Message, OwnedHeaders};
use rdkafka::producer::{BaseProducer, BaseRecord, Producer as _, ProducerContext, PurgeConfig};
use rdkafka::{ClientContext, config::FromClientConfigAndContext as _};
use tokio::sync::Notify;
use tokio::time::Instant;

use crate::poller::Poller;
use crate::read::Row;
use crate::refusal;
use crate::settings::Settings;
use crate::topics::Seen;
use crate::window::Window;

/// Of this many successful reports one wakes the shard, unless it is the last one outstanding, or awaited.
const WAKE_EVERY: usize = 128;

/// Why a message or its shard cannot go on as it is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Failure {
    /// Kafka, or a check before it, refused this message for its own sake.
    Refused { topic: String, cause: Cause, error: String },
    /// Anything else: the producer is replaced and the same rows go again.
    Broken { error: String },
}

impl Failure {
    /// `bytes` is how large the message is.
    fn of(error: &KafkaError, topic: &str, bytes: impl FnOnce() -> usize) -> Self {
        match error.rdkafka_error_code().and_then(refusal::cause) {
            Some(cause) => {
                let error = refusal::words(error, cause, bytes);
                Self::Refused { topic: topic.to_owned(), cause, error }
            }
            None => Self::Broken { error: error.to_string() },
        }
    }
}

/// What the producer's thread and the shard's task share.
#[derive(Debug)]
pub(crate) struct Reports {
    window: Mutex<Window<Failure>>,
    /// A report came in. Coalesces; carries nothing.
    pub changed: Notify,
    fatal: Mutex<Option<String>>,
}

impl Reports {
    pub(crate) fn window(&self) -> MutexGuard<'_, Window<Failure>> {
        // A panic while it was held leaves plain counters, which stay meaningful.
        self.window.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
    }

    /// The fatal error that the producer raised, if any.
    pub(crate) fn fatal(&self) -> Option<String> {
        self.fatal.lock().unwrap_or_else(std::sync::PoisonError::into_inner).clone()
    }
}

/// The callbacks of one producer.
struct Context(Arc<Reports>);

impl ClientContext for Context {
    fn log(&self, level: rdkafka::config::RDKafkaLogLevel, facility: &str, line: &str) {
        tracing::debug!(?level, facility, "librdkafka: {line}");
    }

    fn error(&self, error: KafkaError, reason: &str) {
        if error.rdkafka_error_code() == Some(RDKafkaErrorCode::Fatal) {
            *self.0.fatal.lock().unwrap_or_else(std::sync::PoisonError::into_inner) = Some(reason.to_owned());
            self.0.changed.notify_one();
        } else {
            tracing::debug!("librdkafka: {error}: {reason}");
        }
    }
}

impl ProducerContext for Context {
    type DeliveryOpaque = usize;

    fn delivery(&self, result: &DeliveryResult<'_>, number: usize) {
        let worth_a_wake = {
            let mut window = self.0.window();
            match result {
                Ok(_) => window.ack(number as u64),
                Err((error, _)) if is_purge(error) => window.purged(),
                Err((error, _)) if is_beside(error) => window.beside(),
                Err((error, message)) => {
                    let bytes = || refusal::bytes(message.key(), message.payload(), message.headers());
                    window.fail(number as u64, Failure::of(error, message.topic(), bytes));
                }
            }
            // Waking the shard for each of 100,000 reports a second costs more than the reports.
            let awaited = window.was_awaited(number as u64);
            awaited || result.is_err() || window.unreported() == 0 || number.is_multiple_of(WAKE_EVERY)
        };
        if worth_a_wake {
            self.0.changed.notify_one();
        }
    }
}

/// librdkafka threw the row away because of another's failure, which is reported on its own.
fn is_purge(error: &KafkaError) -> bool {
    matches!(error.rdkafka_error_code(), Some(RDKafkaErrorCode::PurgeQueue | RDKafkaErrorCode::PurgeInflight))
}

/// The broker named another row of the batch, which is reported on its own.
fn is_beside(error: &KafkaError) -> bool {
    error.rdkafka_error_code() == Some(RDKafkaErrorCode::InvalidDifferentRecord)
}

/// The answer to handing over one row.
#[derive(Debug)]
pub(crate) enum HandOver {
    /// librdkafka has it under this number; a report will come.
    Taken(u64),
    /// Its queue is full: wait for reports, then offer the same row again.
    Full,
    /// It will never take this row.
    Failed(Failure),
}

/// A row with its headers, made before it is handed over.
pub(crate) struct Prepared {
    pub row: Row,
    pub headers: Headers,
}

/// Or why they cannot be written. They go with the row when librdkafka takes it.
pub(crate) type Headers = Result<Option<OwnedHeaders>, String>;

/// A shard's producer.
pub(crate) struct Publisher {
    /// Ended before the producer, which it shares.
    poller: Poller,
    producer: Arc<BaseProducer<Context>>,
    reports: Arc<Reports>,
    envelope: Arc<Envelope>,
    /// Whether the broker has been asked about a topic over this producer's connections.
    met: AtomicBool,
}

impl Publisher {
    pub(crate) fn new(settings: &Settings, envelope: Arc<Envelope>) -> Result<Self, KafkaError> {
        let reports = Arc::new(Reports {
            window: Mutex::new(Window::new()),
            changed: Notify::new(),
            fatal: Mutex::new(None),
        });
        let context = Context(Arc::clone(&reports));
        let producer = Arc::new(BaseProducer::from_config_and_context(&settings.producer_config(), context)?);
        let expected = Arc::clone(&reports);
        let poller = Poller::start(Arc::clone(&producer), move || expected.window().unreported() > 0)?;
        Ok(Self { poller, producer, reports, envelope, met: AtomicBool::new(false) })
    }

    pub(crate) fn reports(&self) -> &Arc<Reports> {
        &self.reports
    }

    /// Makes a row's headers, ahead of its being handed over.
    pub(crate) fn prepare(&self, row: Row) -> Result<Prepared, crate::database::Error> {
        let headers = self.headers_of(&row)?;
        Ok(Prepared { row, headers })
    }

    /// The headers of a row that stays where it is.
    pub(crate) fn headers_of(&self, row: &Row) -> Result<Headers, crate::database::Error> {
        Ok(self.headers(&row.outgoing()?).map(Some))
    }

    /// Hands one row to librdkafka, which copies it, for a partition or for any. Topic and key are the row's, which whoever
    /// chose the partition has read.
    pub(crate) fn hand_over(
        &self,
        row: &Row,
        headers: &mut Headers,
        topic: &str,
        key: Option<&[u8]>,
        partition: Option<u32>,
    ) -> Result<HandOver, crate::database::Error> {
        let payload = row.payload()?;
        let headers = match headers {
            Ok(headers) => headers,
            Err(error) => {
                let (topic, cause, error) = (topic.to_owned(), Cause::InvalidRecord, error.clone());
                return Ok(HandOver::Failed(Failure::Refused { topic, cause, error }));
            }
        };
        let (number, is_only_one) = {
            let mut window = self.reports.window();
            (window.hand_over(), window.unreported() == 1)
        };
        #[expect(
            clippy::cast_possible_truncation,
            reason = "usize has 64 bits where librdkafka runs with us"
        )]
        let mut record: BaseRecord<'_, [u8], [u8], usize> =
            BaseRecord::with_opaque_to(topic, number as usize).timestamp(row.created_ms);
        record.headers = headers.take();
        record.key = key;
        record.payload = payload;
        record.partition = partition.map(u32::cast_signed);
        match self.producer.send(record) {
            Ok(()) => {
                if is_only_one {
                    self.poller.wake();
                }
                Ok(HandOver::Taken(number))
            }
            Err((error, record)) => {
                self.reports.window().take_back();
                *headers = record.headers;
                let bytes = || refusal::bytes(key, payload, headers.as_ref());
                Ok(match error.rdkafka_error_code() {
                    Some(RDKafkaErrorCode::QueueFull) => HandOver::Full,
                    _ => HandOver::Failed(Failure::of(&error, topic, bytes)),
                })
            }
        }
    }

    fn headers(&self, outgoing: &Outgoing<'_>) -> Result<OwnedHeaders, String> {
        let mut headers = Some(OwnedHeaders::new_with_capacity(6));
        self.envelope
            .write(outgoing, &mut |key: &str, value: Option<&[u8]>| {
                headers = headers.take().map(|h| h.insert(Header { key, value }));
            })
            .map_err(|e| e.to_string())?;
        headers.ok_or_else(|| "no headers".to_owned())
    }

    /// How many partitions the topic has, or why it may not be written. Blocks for at most `patience`.
    ///
    /// # Errors
    /// When the broker does not answer in time, or cannot tell for now: then nothing is known.
    pub(crate) fn topic(&self, topic: &str, patience: Duration) -> Result<Seen, KafkaError> {
        if !self.met.swap(true, Ordering::Relaxed) {
            // Its first answer makes librdkafka drop the bootstrap connection, often before it has asked for its producer id
            // over it; that would wait for a timer of half a second, or for an answer over a connection that stays.
            self.producer.client().fetch_metadata(Some(topic), patience)?;
        }
        let metadata = self.producer.client().fetch_metadata(Some(topic), patience)?;
        let Some(found) = metadata.topics().iter().find(|t| t.name() == topic) else {
            return Ok(Seen::Refused(Cause::UnknownTopic));
        };
        if let Some(code) = found.error().map(RDKafkaErrorCode::from) {
            let refused = refusal::cause(code).map(Seen::Refused);
            return refused.ok_or(KafkaError::MetadataFetch(code));
        }
        let partitions = u32::try_from(found.partitions().len()).ok().and_then(NonZeroU32::new);
        Ok(partitions.map_or(Seen::Refused(Cause::UnknownTopic), Seen::Partitions))
    }

    /// Throws away what was not acknowledged and waits for every report. The producer is not to be used again.
    ///
    /// What was on its way may still arrive at the broker: that is a duplicate later, never a loss.
    pub(crate) async fn purge(self: &Arc<Self>, patience: Duration) {
        /// Reports of a purge come at once, from the poller's thread.
        const STEP: Duration = Duration::from_millis(1);
        let purged = Arc::clone(self);
        let asked = tokio::task::spawn_blocking(move || {
            purged.producer.purge(PurgeConfig::default().queue().inflight());
        });
        if asked.await.is_err() {
            tracing::error!("purging a producer panicked; it is dropped as it is");
        }
        // Not `flush`: it takes a tenth of a second where that thread gets the last report.
        let until = Instant::now() + patience;
        while self.producer.in_flight_count() > 0 {
            if Instant::now() >= until {
                tracing::warn!(
                    "some delivery reports did not come back from a purged producer within {patience:?}"
                );
                return;
            }
            self.poller.wake();
            tokio::time::sleep(STEP).await;
        }
    }
}
