//! Where a row goes, and whether it may go already. Pure.
//!
//! A broker refuses a batch that does not follow the producer's last one in its partition, and so keeps the order behind a
//! batch that it refused. But only once it knows the producer there: from a producer that is new to a partition it takes
//! any sequence number. With several batches on their way the second then lands although the first was refused, or is to
//! be sent again (`NOT_ENOUGH_REPLICAS`), and overtakes it. Neither the gapless guarantee nor one request at a time helps:
//! what librdkafka has queued for the socket still goes. So:
//!
//! ```text
//!   closed ──a row with a key──▶ opening (nothing with a key follows) ──its acknowledgement──▶ open
//!      ▲                                                                                        │
//!      └───────────────────────────── nothing handed over for [`OPEN_FOR`] ─────────────────────┘
//! ```
//!
//! Open closes again with time because brokers forget producers (`producer.id.expiration.ms`, a day by default). A failed
//! producer is replaced, and the new one begins with everything closed. Rows without a key have no order to keep.
//!
//! The partition of a key is computed here and not in librdkafka, which also lets a topic whose number of partitions was
//! raised wait until everything in flight is acknowledged: until then a key's rows stay where its earlier ones are.

use std::collections::HashMap;
use std::num::NonZeroU32;
use std::time::Duration;

use baton_protocol::partition;
use tokio::time::Instant;

/// How long after the last hand-over a broker is trusted to know this producer in a partition.
const OPEN_FOR: Duration = Duration::from_secs(60);

/// Where the next row goes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Route {
    /// To this partition.
    To(u32),
    /// To any: the row has no key.
    Any,
    /// Not before this producer has asked the broker about the topic.
    Unmet,
    /// Not before the row of this number is acknowledged.
    After(u64),
    /// Not before all that is in flight is acknowledged: the topic has another number of partitions than it had.
    Resized { from: NonZeroU32, to: NonZeroU32 },
}

/// The row that opens it, and when the last one was handed over.
#[derive(Debug, Clone, Copy)]
enum Partition {
    Closed,
    Opening(u64, Instant),
    Open(Instant),
}

/// What one producer has opened.
#[derive(Debug, Default)]
pub(crate) struct Routes {
    topics: HashMap<String, usize>,
    partitions: Vec<Vec<Partition>>,
    /// The topic looked for last: rows of one come in runs.
    last: Option<(String, usize)>,
}

impl Routes {
    /// Where a row of this topic, which has so many partitions now, goes.
    pub(crate) fn route(
        &mut self,
        topic: &str,
        partitions: NonZeroU32,
        key: Option<&[u8]>,
        now: Instant,
        acked: impl FnOnce(u64) -> bool,
    ) -> Route {
        let Some(known) = self.of(topic) else { return Route::Unmet };
        let Some(key) = key else { return Route::Any };
        if let Some(from) = u32::try_from(known.len()).ok().and_then(NonZeroU32::new)
            && from != partitions
        {
            return Route::Resized { from, to: partitions };
        }
        let partition = partition::of_key(key, partitions);
        let Some(state) = known.get_mut(partition as usize) else { return Route::To(partition) };
        let last = match *state {
            Partition::Closed => return Route::To(partition),
            Partition::Opening(number, _) if !acked(number) => return Route::After(number),
            Partition::Opening(_, last) | Partition::Open(last) => last,
        };
        let still_open = now.saturating_duration_since(last) < OPEN_FOR;
        *state = if still_open { Partition::Open(last) } else { Partition::Closed };
        Route::To(partition)
    }

    /// The row of this number has gone there.
    pub(crate) fn gone(&mut self, topic: &str, partition: u32, number: u64, now: Instant) {
        if let Some(state) = self.of(topic).and_then(|known| known.get_mut(partition as usize)) {
            *state = match state {
                Partition::Closed | Partition::Opening(..) => Partition::Opening(number, now),
                Partition::Open(_) => Partition::Open(now),
            };
        }
    }

    /// Whether this producer has asked the broker about the topic.
    pub(crate) fn has_met(&self, topic: &str) -> bool {
        self.topics.contains_key(topic)
    }

    /// The producer has asked about the topic, and nothing was handed over for it yet.
    pub(crate) fn meet(&mut self, topic: &str, partitions: NonZeroU32) {
        if !self.topics.contains_key(topic) {
            self.resize(topic, partitions);
        }
    }

    /// The topic has so many partitions, and nothing of it is in flight.
    pub(crate) fn resize(&mut self, topic: &str, partitions: NonZeroU32) {
        let closed = vec![Partition::Closed; partitions.get() as usize];
        match self.of(topic) {
            Some(known) => *known = closed,
            None => {
                self.topics.insert(topic.to_owned(), self.partitions.len());
                self.partitions.push(closed);
            }
        }
    }

    /// The partitions of a topic that the producer has met.
    fn of(&mut self, topic: &str) -> Option<&mut Vec<Partition>> {
        let index = match &self.last {
            Some((last, index)) if last == topic => *index,
            _ => {
                let index = *self.topics.get(topic)?;
                self.last = Some((topic.to_owned(), index));
                index
            }
        };
        self.partitions.get_mut(index)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const ONE: NonZeroU32 = NonZeroU32::MIN;

    /// A partition of a broker: what it takes of one producer's numbered rows, each a batch of its own.
    #[derive(Default)]
    struct Broker {
        expects: Option<u64>,
        topic: Vec<u64>,
    }

    impl Broker {
        /// The batch's sequence number is how many rows the producer sent before.
        fn takes(&mut self, sequence: u64, row: u64, refuses: bool) -> bool {
            let takes = !refuses && self.expects.is_none_or(|expected| expected == sequence);
            if takes {
                self.expects = Some(sequence + 1);
                self.topic.push(row);
            }
            takes
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(2_000))]

        #[test]
        fn nothing_with_a_key_is_on_a_partition_without_all_that_was_before_it(
            // Per step: hand a row over, or let the broker answer; whether it refuses; seconds that pass.
            steps in prop::collection::vec((any::<bool>(), prop::bool::weighted(0.2), 0u64..90), 1..60),
            forgets_after in 61u64..100,
        ) {
            let (mut routes, mut broker) = (Routes::default(), Broker::default());
            routes.meet("t", ONE);
            let (mut now, mut appended) = (Instant::now(), Instant::now());
            let (mut handed, mut answered, mut acked) = (0u64, 0u64, Vec::<u64>::new());
            for (hand_over, refuses, seconds) in steps {
                if hand_over {
                    // Time passes between rows, but not while some are on their way.
                    if handed == answered { now += Duration::from_secs(seconds) }
                    let route = routes.route("t", ONE, Some(b"k"), now, |n| acked.contains(&n));
                    if let Route::To(partition) = route {
                        routes.gone("t", partition, handed, now);
                        handed += 1;
                    } else {
                        prop_assert!(matches!(route, Route::After(n) if !acked.contains(&n)));
                    }
                } else if answered < handed {
                    if now.duration_since(appended) >= Duration::from_secs(forgets_after) { broker.expects = None }
                    if broker.takes(answered, answered, refuses) {
                        acked.push(answered);
                        appended = now;
                    } else {
                        // The report fails and the producer is purged, but what is on its way still arrives.
                        for row in answered + 1..handed { broker.takes(row, row, false); }
                        break;
                    }
                    answered += 1;
                }
            }
            let expected: Vec<u64> = (0..broker.topic.len() as u64).collect();
            prop_assert_eq!(broker.topic, expected);
        }
    }

    #[test]
    fn rows_without_a_key_and_rows_of_other_partitions_do_not_wait() {
        let (mut routes, now) = (Routes::default(), Instant::now());
        let twelve = NonZeroU32::new(12).unwrap();
        assert_eq!(routes.route("t", twelve, Some(b"21"), now, |_| false), Route::Unmet);
        assert_eq!(routes.route("t", twelve, None, now, |_| false), Route::Unmet);
        routes.meet("t", twelve);
        routes.meet("other", ONE);
        let Route::To(first) = routes.route("t", twelve, Some(b"21"), now, |_| false) else { panic!() };
        routes.gone("t", first, 0, now);
        assert_eq!(routes.route("t", twelve, Some(b"21"), now, |_| false), Route::After(0));
        assert_eq!(routes.route("t", twelve, None, now, |_| false), Route::Any);
        assert!(
            matches!(routes.route("t", twelve, Some(b"foobar"), now, |_| false), Route::To(p) if p != first)
        );
        assert_eq!(routes.route("other", ONE, Some(b"21"), now, |_| false), Route::To(0));
        // Once acknowledged the partition is open and rows follow each other freely.
        for number in 1..4 {
            assert_eq!(routes.route("t", twelve, Some(b"21"), now, |n| n == 0), Route::To(first));
            routes.gone("t", first, number, now);
        }
    }

    #[test]
    fn another_number_of_partitions_waits_for_what_is_in_flight() {
        let (mut routes, now) = (Routes::default(), Instant::now());
        let (two, three) = (NonZeroU32::new(2).unwrap(), NonZeroU32::new(3).unwrap());
        routes.meet("t", two);
        let resized = Route::Resized { from: two, to: three };
        assert_eq!(routes.route("t", three, Some(b"k"), now, |_| true), resized);
        routes.resize("t", three);
        assert!(matches!(routes.route("t", three, Some(b"k"), now, |_| false), Route::To(_)));
    }
}
