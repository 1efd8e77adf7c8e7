//! The W3C trace context of the current `tracing` span, as headers of a record.
//!
//! `traceparent` is there when the span belongs to an OpenTelemetry trace, sampled or not, and `tracestate` when that
//! has one. A message that has a `traceparent` of its own keeps it, and gets neither.

use opentelemetry::trace::TraceContextExt as _;
use tracing_opentelemetry::OpenTelemetrySpanExt as _;

use crate::headers::Header;

pub(crate) const TRACEPARENT: &str = "traceparent";
const TRACESTATE: &str = "tracestate";

pub(crate) fn current() -> Vec<Header> {
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
