//! The W3C trace context of the current `tracing` span, as headers of a record.
//!
//! `traceparent` is there when the span belongs to an OpenTelemetry trace, sampled or not, and `tracestate` when that
//! has one. A message that has a `traceparent` of its own keeps it, and gets neither.

use opentelemetry::trace::TraceContextExt as _;
use tracing_opentelemetry::OpenTelemetrySpanExt as _;

use crate::Message;
use crate::headers::Header;

const TRACEPARENT: &str = "traceparent";
const TRACESTATE: &str = "tracestate";

/// What is to be added to the headers of a message that is enqueued now.
pub(crate) fn headers(message: &Message) -> Vec<Header> {
    if message.headers.iter().any(|(name, _)| name == TRACEPARENT) {
        return Vec::new();
    }
    let context = tracing::Span::current().context();
    let span = context.span();
    let span = span.span_context();
    if !span.is_valid() {
        return Vec::new();
    }
    let (trace, id, flags) = (span.trace_id(), span.span_id(), span.trace_flags().to_u8());
    let mut headers = vec![(TRACEPARENT.to_owned(), format!("00-{trace}-{id}-{flags:02x}").into())];
    let state = span.trace_state().header();
    if !state.is_empty() {
        headers.push((TRACESTATE.to_owned(), state.into()));
    }
    headers
}

#[cfg(test)]
mod tests {
    use opentelemetry::Context;
    use opentelemetry::trace::noop::NoopTracer;
    use opentelemetry::trace::{SpanContext, SpanId, TraceFlags, TraceId, TraceState};
    use tracing_subscriber::layer::SubscriberExt as _;

    use super::*;
    use crate::HeaderValue;

    /// What a message gets inside a span of this trace. The tracer samples nothing of its own: it hands its parent on.
    fn headers_in(parent: SpanContext, message: &Message) -> Vec<Header> {
        let layer = tracing_opentelemetry::layer().with_tracer(NoopTracer::new());
        tracing::subscriber::with_default(tracing_subscriber::registry().with(layer), || {
            let span = tracing::info_span!("place order");
            span.set_parent(Context::new().with_remote_span_context(parent)).unwrap();
            span.in_scope(|| headers(message))
        })
    }

    fn parent(flags: TraceFlags, state: TraceState) -> SpanContext {
        let (trace, span) = (TraceId::from_bytes([0xab; 16]), SpanId::from_bytes([0x01; 8]));
        SpanContext::new(trace, span, flags, true, state)
    }

    fn message() -> Message {
        Message::builder("t").tombstone()
    }

    fn header(name: &str, value: &str) -> Header {
        (name.to_owned(), HeaderValue::from(value))
    }

    #[test]
    fn a_sampled_span_travels_with_its_state() {
        let state = TraceState::from_key_value([("vendor", "x")]).unwrap();
        assert_eq!(
            headers_in(parent(TraceFlags::SAMPLED, state), &message()),
            [
                header("traceparent", "00-abababababababababababababababab-0101010101010101-01"),
                header("tracestate", "vendor=x"),
            ]
        );
    }

    #[test]
    fn a_span_that_is_not_sampled_travels_as_such_and_an_empty_state_not_at_all() {
        assert_eq!(
            headers_in(parent(TraceFlags::default(), TraceState::default()), &message()),
            [header("traceparent", "00-abababababababababababababababab-0101010101010101-00")]
        );
    }

    #[test]
    fn without_a_trace_there_are_no_headers() {
        assert_eq!(headers_in(SpanContext::NONE, &message()), []);
        assert_eq!(headers(&message()), []);
    }
    #[test]
    fn a_message_that_has_a_traceparent_keeps_it_and_gets_none() {
        let own = Message::builder("t").header(TRACEPARENT, "00-own").tombstone();
        assert_eq!(headers_in(parent(TraceFlags::SAMPLED, TraceState::default()), &own), []);
    }
}
