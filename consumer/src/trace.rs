//! The span of one attempt, in the words of OpenTelemetry's messaging conventions, and its link to whoever sent the message.
//!
//! The claim, the handler and the commit are within the span, so whatever a handler traces lies within it too. The producer's
//! `traceparent` and `tracestate` are fields of it. With the feature `trace-context` the span is also *linked* to the producer's,
//! where a `tracing-opentelemetry` layer is there to take it: it is not its child, because an attempt may come an hour later, and
//! again.

use std::future::Future;

use tracing::{Instrument as _, Span, field};

use crate::inbox::{Error, Once};
use crate::message::Message;

/// Makes one attempt within its span.
pub(crate) async fn attempt(
    consumer: &str,
    message: &Message,
    attempt: impl Future<Output = Result<Once, Error>>,
) -> Result<Once, Error> {
    let span = span(consumer, message);
    let attempt = attempt.instrument(span.clone()).await;
    let (outcome, is_error) = outcome(&attempt);
    span.record("baton.outcome", outcome);
    if is_error {
        span.record("otel.status_code", "ERROR");
    }
    attempt
}

fn span(consumer: &str, message: &Message) -> Span {
    let (record, work) = (&message.record, &message.work);
    let span = tracing::info_span!(
        "process",
        otel.name = format_args!("process {}", record.topic()),
        otel.kind = "consumer",
        otel.status_code = field::Empty,
        messaging.system = "kafka",
        messaging.operation.name = "process",
        messaging.operation.r#type = "process",
        messaging.destination.name = record.topic(),
        messaging.destination.partition.id = %record.partition(),
        messaging.kafka.offset = record.offset(),
        messaging.kafka.message.key = record.key().and_then(text),
        messaging.kafka.message.tombstone = record.payload().is_none(),
        baton.consumer = consumer,
        baton.idempotency_key = work.key,
        baton.attempt = work.attempts,
        baton.outcome = field::Empty,
        traceparent = record.header("traceparent").and_then(text),
        tracestate = record.header("tracestate").and_then(text),
    );
    link(&span, record);
    span
}

fn outcome(attempt: &Result<Once, Error>) -> (&'static str, bool) {
    match attempt {
        Ok(Once::Fresh(_)) => ("fresh", false),
        Ok(Once::Duplicate(_)) => ("duplicate", false),
        Ok(Once::InProgress) => ("in_progress", false),
        Ok(Once::Dead { .. }) => ("dead", false),
        Ok(Once::Conflict) => ("conflict", true),
        Ok(Once::TooOld) => ("too_old", true),
        Ok(Once::Failed(_)) => ("failed", true),
        Err(_) => ("error", true),
    }
}

fn text(bytes: &[u8]) -> Option<&str> {
    std::str::from_utf8(bytes).ok()
}

#[cfg(not(feature = "trace-context"))]
fn link(_: &Span, _: &crate::Record) {}

#[cfg(feature = "trace-context")]
use linked::link;

#[cfg(feature = "trace-context")]
mod linked {
    use opentelemetry::trace::{SpanContext, SpanId, TraceFlags, TraceId, TraceState};
    use tracing::Span;
    use tracing_opentelemetry::OpenTelemetrySpanExt as _;

    use super::text;
    use crate::Record;

    pub(super) fn link(span: &Span, record: &Record) {
        let header = |name| record.header(name).and_then(text);
        if let Some(producer) = producer(header("traceparent"), header("tracestate")) {
            span.add_link(producer);
        }
    }

    /// The span that a W3C trace context names. What cannot be read is no link, as W3C has it.
    pub(super) fn producer(parent: Option<&str>, state: Option<&str>) -> Option<SpanContext> {
        let mut parts = parent?.split('-');
        let (version, trace, span, flags) = (parts.next()?, parts.next()?, parts.next()?, parts.next()?);
        // A later version may have more parts; the first one has not.
        let is_known = version != "00" || parts.next().is_none();
        let is_hex = |text: &str, len| {
            text.len() == len && text.bytes().all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f'))
        };
        let reads = is_hex(version, 2) && is_hex(trace, 32) && is_hex(span, 16) && is_hex(flags, 2);
        if !is_known || !reads || version == "ff" {
            return None;
        }
        let (trace, span) = (TraceId::from_hex(trace).ok()?, SpanId::from_hex(span).ok()?);
        let flags = TraceFlags::new(u8::from_str_radix(flags, 16).ok()?) & TraceFlags::SAMPLED;
        let state = state.and_then(|state| state.parse().ok()).unwrap_or_else(TraceState::default);
        Some(SpanContext::new(trace, span, flags, true, state)).filter(SpanContext::is_valid)
    }
}

#[cfg(test)]
mod tests;
