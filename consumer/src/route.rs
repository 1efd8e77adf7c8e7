//! Which handler takes a record: by its topic and its type.
//!
//! | a record | goes to |
//! |---|---|
//! | whose topic and type were given to [`Routes::on`] | that handler |
//! | whose topic was given to [`Routes::on_topic`] | that handler, whatever its type is and also without one |
//! | any other | what [`Routes::unknown`] says: the dead-letter topic, with cause `unknown_type`, unless set otherwise |
//!
//! The first row that fits counts. A payload is decoded once its handler is found, and by that handler's type alone.

use std::any::type_name;
use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};

use futures_util::future::BoxFuture;
use sqlx::{Postgres, Transaction};

use crate::{Delivery, Failure, Handler, Raw, Verdict};

/// Two handlers for the same messages.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// Of one type of one topic.
    #[error(
        "type {message_type:?} of topic {topic:?} has two handlers, {first} and {second}; keep one of them"
    )]
    Type {
        /// The topic.
        topic: String,
        /// The type.
        message_type: String,
        /// The handler that was given first.
        first: &'static str,
        /// The other one.
        second: &'static str,
    },
    /// Of the other types of one topic.
    #[error("topic {topic:?} has two handlers for all other types, {first} and {second}; keep one of them")]
    Topic {
        /// The topic.
        topic: String,
        /// The handler that was given first.
        first: &'static str,
        /// The other one.
        second: &'static str,
    },
}

/// Handlers by topic and type, as one [`Handler`]. Each has a payload of its own; the record is at hand in each
/// [`Delivery`].
///
/// ```no_run
/// use baton_consumer::{Consumer, Delivery, Handler, Json, Kafka, Routes, Verdict};
/// use sqlx::{PgPool, Postgres, Transaction};
///
/// #[derive(serde::Deserialize)]
/// struct Placed { order_id: i64, cents: i64 }
///
/// #[derive(serde::Deserialize)]
/// struct Cancelled { order_id: i64 }
///
/// struct Bill;
///
/// impl Handler for Bill {
///     type Payload = Json<Placed>;
///
///     async fn handle(&self, delivery: &Delivery<Json<Placed>>, tx: &mut Transaction<'_, Postgres>) -> Verdict {
///         let Json(placed) = delivery.payload();
///         let invoice = sqlx::query("INSERT INTO invoice (order_id, cents) VALUES ($1, $2)")
///             .bind(placed.order_id)
///             .bind(placed.cents);
///         invoice.execute(&mut **tx).await.map(|_| ()).into()
///     }
/// }
///
/// struct Void;
///
/// impl Handler for Void {
///     type Payload = Json<Cancelled>;
///
///     async fn handle(&self, delivery: &Delivery<Json<Cancelled>>, tx: &mut Transaction<'_, Postgres>) -> Verdict {
///         let void = sqlx::query("DELETE FROM invoice WHERE order_id = $1").bind(delivery.payload().0.order_id);
///         void.execute(&mut **tx).await.map(|_| ()).into()
///     }
/// }
///
/// # fn example(pool: PgPool, kafka: Kafka) -> Result<Consumer, Box<dyn std::error::Error>> {
/// let routes = Routes::new().on("orders", "order.placed", Bill)?.on("orders", "order.cancelled", Void)?;
/// let consumer =
///     Consumer::builder("billing", pool, kafka).topics(routes.topics()).transactional(routes).build()?;
/// # Ok(consumer)
/// # }
/// ```
#[derive(Default)]
pub struct Routes {
    topics: BTreeMap<String, Topic>,
    unknown: Unknown,
    skipped: AtomicU64,
    said: Mutex<BTreeSet<(String, Option<String>)>>,
}

#[derive(Debug, Default)]
struct Topic {
    types: BTreeMap<String, AnyHandler>,
    others: Option<AnyHandler>,
}

/// Of so many types it is said that they are skipped; of more it is not, so that types made up by the thousand fill
/// neither memory nor the log.
const SAID: usize = 1000;

impl Routes {
    /// No routes yet: everything is unknown.
    ///
    /// ```
    /// assert_eq!(baton_consumer::Routes::new().topics().count(), 0);
    /// ```
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// A handler for one type (`ce_type`, or Debezium's `eventType`) of one topic. Both are compared exactly.
    ///
    /// ```
    /// use baton_consumer::{Raw, Routes, Verdict, handler_fn};
    ///
    /// let nothing = || handler_fn::<Raw, _>(|_, _| Box::pin(async { Verdict::done() }));
    /// let routes = Routes::new().on("orders", "order.placed", nothing())?;
    /// assert!(routes.on("orders", "order.placed", nothing()).is_err());
    /// # Ok::<(), baton_consumer::route::Error>(())
    /// ```
    ///
    /// # Errors
    ///
    /// [`Error::Type`] when this type of this topic has a handler: none is silently replaced.
    pub fn on<H: Handler>(
        mut self,
        topic: impl Into<String>,
        message_type: impl Into<String>,
        handler: H,
    ) -> Result<Self, Error> {
        let (topic, message_type) = (topic.into(), message_type.into());
        let types = &mut self.topics.entry(topic.clone()).or_default().types;
        if let Some(first) = types.get(&message_type) {
            return Err(Error::Type { topic, message_type, first: first.name(), second: type_name::<H>() });
        }
        types.insert(message_type, AnyHandler::new(handler));
        Ok(self)
    }

    /// A handler for all messages of one topic whose type has none of its own, and for those without a type.
    ///
    /// ```
    /// use baton_consumer::{Raw, Routes, Verdict, handler_fn};
    ///
    /// let nothing = || handler_fn::<Raw, _>(|_, _| Box::pin(async { Verdict::done() }));
    /// let routes = Routes::new().on("orders", "order.placed", nothing())?.on_topic("orders", nothing())?;
    /// # let _ = routes;
    /// # Ok::<(), baton_consumer::route::Error>(())
    /// ```
    ///
    /// # Errors
    ///
    /// [`Error::Topic`] when this topic has such a handler: none is silently replaced.
    pub fn on_topic<H: Handler>(mut self, topic: impl Into<String>, handler: H) -> Result<Self, Error> {
        let topic = topic.into();
        let others = &mut self.topics.entry(topic.clone()).or_default().others;
        if let Some(first) = others {
            return Err(Error::Topic { topic, first: first.name(), second: type_name::<H>() });
        }
        *others = Some(AnyHandler::new(handler));
        Ok(self)
    }

    /// What happens to a message that no route takes. Default: [`Unknown::DeadLetter`].
    ///
    /// ```
    /// use baton_consumer::route::Unknown;
    ///
    /// let routes = baton_consumer::Routes::new().unknown(Unknown::Skip);
    /// # let _ = routes;
    /// ```
    #[must_use]
    pub fn unknown(mut self, unknown: Unknown) -> Self {
        self.unknown = unknown;
        self
    }

    /// The topics that have a route, to be read by the consumer.
    ///
    /// ```
    /// use baton_consumer::{Raw, Routes, Verdict, handler_fn};
    ///
    /// let nothing = handler_fn::<Raw, _>(|_, _| Box::pin(async { Verdict::done() }));
    /// let routes = Routes::new().on("orders", "order.placed", nothing)?;
    /// assert_eq!(routes.topics().collect::<Vec<_>>(), ["orders"]);
    /// # Ok::<(), baton_consumer::route::Error>(())
    /// ```
    pub fn topics(&self) -> impl Iterator<Item = &str> {
        self.topics.keys().map(String::as_str)
    }

    /// How often a message was skipped, by [`Unknown::Skip`], since the start of this process; once more for each time that
    /// its mark could not be committed.
    ///
    /// ```
    /// use std::sync::Arc;
    ///
    /// // An `Arc` is a handler too, and so the number can be read while the consumer runs.
    /// let routes = Arc::new(baton_consumer::Routes::new());
    /// assert_eq!(routes.skipped(), 0);
    /// ```
    #[must_use]
    pub fn skipped(&self) -> u64 {
        self.skipped.load(Ordering::Relaxed)
    }

    fn find(&self, topic: &str, message_type: Option<&str>) -> Option<&AnyHandler> {
        let topic = self.topics.get(topic)?;
        message_type.and_then(|message_type| topic.types.get(message_type)).or(topic.others.as_ref())
    }

    fn skip(&self, delivery: &Delivery<Raw>) -> Verdict {
        self.skipped.fetch_add(1, Ordering::Relaxed);
        if self.is_first(delivery.topic(), delivery.message_type()) {
            tracing::info!(
                topic = delivery.topic(),
                message_type = delivery.message_type(),
                "no handler takes messages of this type; they are skipped, as set, which is said once"
            );
        }
        Verdict::done_with(&BTreeMap::from([("skipped", "unknown_type")]))
    }

    fn is_first(&self, topic: &str, message_type: Option<&str>) -> bool {
        let mut said = self.said.lock().unwrap_or_else(PoisonError::into_inner);
        said.len() < SAID && said.insert((topic.to_owned(), message_type.map(str::to_owned)))
    }
}

impl Handler for Routes {
    type Payload = Raw;

    async fn handle(&self, delivery: &Delivery<Raw>, tx: &mut Transaction<'_, Postgres>) -> Verdict {
        let (topic, message_type) = (delivery.topic(), delivery.message_type());
        match (self.find(topic, message_type), &self.unknown) {
            (Some(handler), _) | (None, Unknown::Handler(handler)) => handler.0.handle(delivery, tx).await,
            (None, Unknown::Skip) => self.skip(delivery),
            (None, Unknown::DeadLetter) => Failure::unknown_type(match message_type {
                Some(message_type) => format!("no handler takes type {message_type:?} of topic {topic:?}"),
                None => format!("no handler takes messages without a type of topic {topic:?}"),
            })
            .into(),
        }
    }
}

impl fmt::Debug for Routes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Routes")
            .field("topics", &self.topics)
            .field("unknown", &self.unknown)
            .finish_non_exhaustive()
    }
}

/// What happens to a message that no route takes: its type has no handler, or it has none and its topic has no handler for
/// all.
///
/// ```
/// use baton_consumer::route::Unknown;
/// use baton_consumer::{Raw, Routes, Verdict, handler_fn};
///
/// let strict = Routes::new();
/// let lenient = Routes::new().unknown(Unknown::Skip);
/// let curious = Routes::new().unknown(Unknown::handled_by(handler_fn::<Raw, _>(|delivery, _| {
///     println!("{:?}", delivery.message_type());
///     Box::pin(async { Verdict::done() })
/// })));
/// # let _ = (strict, lenient, curious);
/// ```
#[derive(Debug, Default)]
#[non_exhaustive]
pub enum Unknown {
    /// A dead letter with cause `unknown_type`. The default: nothing is lost by a handler that was forgotten.
    #[default]
    DeadLetter,
    /// Settled without effect, for topics of which this consumer wants some types only. Said once a type, counted by
    /// [`Routes::skipped`]; its inbox row is `done` with the outcome `{"skipped":"unknown_type"}`, so that a handler added
    /// later does not see it.
    Skip,
    /// A handler; from [`handled_by`](Self::handled_by).
    Handler(AnyHandler),
}

impl Unknown {
    /// Handed to this handler, with a payload of its own like any other.
    ///
    /// ```
    /// use baton_consumer::route::Unknown;
    /// use baton_consumer::{Raw, Verdict, handler_fn};
    ///
    /// let unknown = Unknown::handled_by(handler_fn::<Raw, _>(|_, _| Box::pin(async { Verdict::done() })));
    /// assert!(matches!(unknown, Unknown::Handler(_)));
    /// ```
    #[must_use]
    pub fn handled_by(handler: impl Handler) -> Self {
        Self::Handler(AnyHandler::new(handler))
    }
}

/// A handler of any payload.
///
/// ```
/// use baton_consumer::route::{AnyHandler, Unknown};
///
/// fn of(unknown: Unknown) -> Option<AnyHandler> {
///     if let Unknown::Handler(handler) = unknown { Some(handler) } else { None }
/// }
/// assert!(of(Unknown::Skip).is_none());
/// ```
pub struct AnyHandler(Box<dyn Route>);

impl AnyHandler {
    fn new(handler: impl Handler) -> Self {
        Self(Box::new(handler))
    }

    fn name(&self) -> &'static str {
        self.0.name()
    }
}

impl fmt::Debug for AnyHandler {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// A [`Handler`] whose payload is not known from outside.
trait Route: Send + Sync {
    fn handle<'a>(
        &'a self,
        delivery: &'a Delivery<Raw>,
        tx: &'a mut Transaction<'_, Postgres>,
    ) -> BoxFuture<'a, Verdict>;

    fn name(&self) -> &'static str;
}

impl<H: Handler> Route for H {
    fn handle<'a>(
        &'a self,
        delivery: &'a Delivery<Raw>,
        tx: &'a mut Transaction<'_, Postgres>,
    ) -> BoxFuture<'a, Verdict> {
        Box::pin(async move {
            match delivery.decode_as() {
                Ok(delivery) => Handler::handle(self, &delivery, tx).await,
                Err(failure) => failure.into(),
            }
        })
    }

    fn name(&self) -> &'static str {
        type_name::<H>()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Json;

    struct Placed;
    struct Cancelled;
    struct Rest;

    impl Handler for Placed {
        type Payload = Json<u64>;

        async fn handle(&self, _: &Delivery<Json<u64>>, _: &mut Transaction<'_, Postgres>) -> Verdict {
            Verdict::done()
        }
    }

    impl Handler for Cancelled {
        type Payload = Json<String>;

        async fn handle(&self, _: &Delivery<Json<String>>, _: &mut Transaction<'_, Postgres>) -> Verdict {
            Verdict::done()
        }
    }

    impl Handler for Rest {
        type Payload = Raw;

        async fn handle(&self, _: &Delivery<Raw>, _: &mut Transaction<'_, Postgres>) -> Verdict {
            Verdict::done()
        }
    }

    fn routes() -> Routes {
        let routes = Routes::new().on("orders", "order.placed", Placed).unwrap();
        let routes = routes.on_topic("orders", Rest).unwrap();
        routes.on("refunds", "order.cancelled", Cancelled).unwrap()
    }

    fn found(topic: &str, message_type: Option<&str>) -> Option<&'static str> {
        Some(routes().find(topic, message_type)?.name().rsplit("::").next().unwrap())
    }

    #[test]
    fn the_handler_of_a_type_comes_before_that_of_its_topic_and_neither_takes_another_topics() {
        for (topic, message_type, handler) in [
            ("orders", Some("order.placed"), Some("Placed")),
            ("orders", Some("order.cancelled"), Some("Rest")),
            ("orders", Some("Order.placed"), Some("Rest")),
            ("orders", None, Some("Rest")),
            ("refunds", Some("order.cancelled"), Some("Cancelled")),
            ("refunds", Some("order.placed"), None),
            ("refunds", None, None),
            ("Orders", Some("order.placed"), None),
            ("order.placed", Some("orders"), None),
        ] {
            assert_eq!(found(topic, message_type), handler, "{topic} {message_type:?}");
        }
    }

    #[test]
    fn two_handlers_for_the_same_messages_are_refused_by_their_names() {
        let twice = routes().on("orders", "order.placed", Cancelled).unwrap_err().to_string();
        for name in ["\"orders\"", "\"order.placed\"", "::Placed and ", "::Cancelled;"] {
            assert!(twice.contains(name), "{twice}");
        }
        let twice = routes().on_topic("orders", Cancelled).unwrap_err().to_string();
        for name in ["\"orders\"", "::Rest and ", "::Cancelled;"] {
            assert!(twice.contains(name), "{twice}");
        }
        assert!(routes().on_topic("refunds", Rest).is_ok());
        assert!(routes().on("refunds", "order.placed", Placed).is_ok());
    }

    #[test]
    fn topics_with_a_route_are_named_once() {
        assert_eq!(routes().topics().collect::<Vec<_>>(), ["orders", "refunds"]);
    }

    #[test]
    fn of_a_skipped_type_it_is_said_once_and_of_endlessly_many_types_no_more_than_so_often() {
        let routes = Routes::new();
        assert!(routes.is_first("orders", Some("a")));
        assert!(!routes.is_first("orders", Some("a")));
        assert!(routes.is_first("orders", None));
        assert!(routes.is_first("refunds", Some("a")));
        let said = (0..2 * SAID).filter(|nr| routes.is_first("orders", Some(&nr.to_string()))).count();
        assert_eq!(said, SAID - 3);
    }
}
