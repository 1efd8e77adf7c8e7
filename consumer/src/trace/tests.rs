use std::collections::BTreeMap;
use std::fmt;
use std::sync::{Arc, Mutex};

use futures_util::FutureExt as _;
use tracing::field::{Field, Visit};
use tracing::span::{Attributes, Id, Record as Recorded};
use tracing::subscriber::with_default;
use tracing_subscriber::layer::{Context, Layer, SubscriberExt as _};

use super::*;
use crate::{Failure, Fingerprints, Scope, testing};

/// The fields of every span, as text.
#[derive(Clone, Default)]
struct Fields(Arc<Mutex<BTreeMap<String, String>>>);

impl Visit for Fields {
    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        self.0.lock().unwrap().insert(field.name().to_owned(), format!("{value:?}").replace('"', ""));
    }
}

impl<S: tracing::Subscriber> Layer<S> for Fields {
    fn on_new_span(&self, attributes: &Attributes<'_>, _: &Id, _: Context<'_, S>) {
        attributes.record(&mut self.clone());
    }

    fn on_record(&self, _: &Id, recorded: &Recorded<'_>, _: Context<'_, S>) {
        recorded.record(&mut self.clone());
    }
}

const PARENT: &str = "00-abababababababababababababababab-0101010101010101-01";

fn message() -> Message {
    let record = testing::message("orders", "customer-7")
        .message_type("order.placed")
        .idempotency_key("order-7")
        .header("traceparent", PARENT)
        .header("tracestate", "vendor=x")
        .at(3, 41)
        .json("paid");
    Message::of(&Arc::new(record), &Scope::default(), &Fingerprints::default()).unwrap()
}

/// The fields after an attempt that came to this, and the name of the span around it.
fn traced(
    message: &Message,
    result: Result<Once, Error>,
) -> (BTreeMap<String, String>, Option<&'static str>) {
    let fields = Fields::default();
    let mut within = None;
    with_default(tracing_subscriber::registry().with(fields.clone()), || {
        let work = async {
            within = Span::current().metadata().map(|span| span.name());
            result
        };
        attempt("billing", message, work).now_or_never().unwrap().ok()
    });
    let fields = fields.0.lock().unwrap().clone();
    (fields, within)
}

#[test]
fn an_attempt_is_within_a_span_that_says_which_message_it_is_about_and_whose() {
    let (fields, within) = traced(&message(), Ok(Once::Fresh(None)));
    assert_eq!(within, Some("process"));
    let expected = [
        ("otel.name", "process orders"),
        ("otel.kind", "consumer"),
        ("messaging.system", "kafka"),
        ("messaging.operation.name", "process"),
        ("messaging.operation.type", "process"),
        ("messaging.destination.name", "orders"),
        ("messaging.destination.partition.id", "3"),
        ("messaging.kafka.offset", "41"),
        ("messaging.kafka.message.key", "customer-7"),
        ("messaging.kafka.message.tombstone", "false"),
        ("baton.consumer", "billing"),
        ("baton.idempotency_key", "order-7"),
        ("baton.attempt", "1"),
        ("baton.outcome", "fresh"),
        ("traceparent", PARENT),
        ("tracestate", "vendor=x"),
    ];
    let expected: BTreeMap<String, String> =
        expected.map(|(name, value)| (name.to_owned(), value.to_owned())).into();
    assert_eq!(fields, expected);
}

#[test]
fn a_span_of_an_attempt_that_failed_says_so() {
    let (fields, _) = traced(&message(), Ok(Once::Failed(Failure::transient("later"))));
    assert_eq!(fields["baton.outcome"], "failed");
    assert_eq!(fields["otel.status_code"], "ERROR");
}

#[cfg(feature = "trace-context")]
mod linked {
    use opentelemetry::trace::noop::NoopSpan;
    use opentelemetry::trace::{Link, SpanBuilder, Tracer};

    use super::super::linked::producer;
    use super::*;

    /// Keeps the links of the spans that it is to build.
    #[derive(Clone, Default)]
    struct Links(Arc<Mutex<Vec<Link>>>);

    impl Tracer for Links {
        type Span = NoopSpan;

        fn build_with_context(&self, builder: SpanBuilder, _: &opentelemetry::Context) -> NoopSpan {
            self.0.lock().unwrap().extend(builder.links.unwrap_or_default());
            NoopSpan::DEFAULT
        }
    }

    #[test]
    fn the_span_is_linked_to_the_producers() {
        let links = Links::default();
        let layer = tracing_opentelemetry::layer().with_tracer(links.clone());
        with_default(tracing_subscriber::registry().with(layer), || {
            attempt("billing", &message(), async { Ok(Once::InProgress) }).now_or_never().unwrap().ok()
        });
        let links = links.0.lock().unwrap();
        let expected = producer(Some(PARENT), Some("vendor=x")).unwrap();
        assert_eq!(links.iter().map(|link| &link.span_context).collect::<Vec<_>>(), [&expected]);
        assert_eq!(expected.trace_state().header(), "vendor=x");
        assert!(expected.is_sampled() && expected.is_remote());
    }

    #[test]
    fn what_is_no_trace_context_is_no_link_and_a_later_version_is_read_as_far_as_it_is_known() {
        let ok = |parent: &str| producer(Some(parent), None).is_some();
        assert!(ok(PARENT));
        assert!(ok(&PARENT.replace("00-ab", "cc-ab")));
        assert!(ok(&format!("{}-more", PARENT.replace("00-ab", "cc-ab"))));
        assert!(producer(Some(PARENT), Some("=")).is_some(), "a bad state is left out");
        for bad in [
            "",
            "00",
            &format!("{PARENT}-more"),
            &PARENT.replace("00-ab", "ff-ab"),
            &PARENT.to_uppercase(),
            &PARENT.replace("abab", "a"),
            "00-00000000000000000000000000000000-0101010101010101-01",
            "00-abababababababababababababababab-0000000000000000-01",
        ] {
            assert!(!ok(bad), "{bad}");
        }
        assert!(producer(None, None).is_none());
    }
}
