//! Which consumer groups a topic reaches: those with a member that reads it, and those that have committed offsets of it.

use rdkafka::consumer::{BaseConsumer, Consumer as _};
use rdkafka::{Offset, TopicPartitionList};

use super::Error;
use super::letters::{Cluster, PATIENCE, Quiet};

/// How many groups without a member that reads it are asked for their offsets.
const ASKED: usize = 200;
/// How many at once; each takes a client of its own.
const AT_ONCE: usize = 20;

/// What is known of the groups of a topic.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(super) struct Groups {
    /// In order of their names.
    pub(super) names: Vec<String>,
    /// So many more were not asked.
    pub(super) unasked: usize,
}

impl Groups {
    /// For people.
    pub(super) fn sentence(&self, topic: &str) -> String {
        let names = if self.names.is_empty() {
            "no consumer group that is known".to_owned()
        } else {
            self.names.join(", ")
        };
        let more = match self.unasked {
            0 => String::new(),
            unasked => format!(" ({unasked} more groups were not asked)"),
        };
        format!("{topic} reaches {names}{more}")
    }
}

/// Asks the cluster. Blocks.
pub(super) fn of(cluster: &Cluster, topic: &str, partitions: &[i32]) -> Result<Groups, Error> {
    let consumer: BaseConsumer<Quiet> =
        cluster.config().set("group.id", "baton-replay").create_with_context(Quiet).map_err(Error::Client)?;
    let list = consumer.fetch_group_list(None, PATIENCE).map_err(Error::Brokers)?;
    let (mut groups, mut others) = (Groups::default(), Vec::new());
    for group in list.groups().iter().filter(|group| matches!(group.protocol_type(), "consumer" | "")) {
        let reads = group.members().iter().any(|member| {
            [member.metadata(), member.assignment()].into_iter().flatten().any(|bytes| names(bytes, topic))
        });
        if reads {
            groups.names.push(group.name().to_owned());
        } else {
            others.push(group.name().to_owned());
        }
    }
    groups.unasked = others.len().saturating_sub(ASKED);
    others.truncate(ASKED);
    for asked in others.chunks(AT_ONCE) {
        let have: Vec<bool> = std::thread::scope(|scope| {
            let asking: Vec<_> = asked
                .iter()
                .map(|group| scope.spawn(|| has_committed(cluster, group, topic, partitions)))
                .collect();
            asking
                .into_iter()
                .map(|asking| asking.join().unwrap_or(Err(Error::Task)))
                .collect::<Result<_, _>>()
        })?;
        groups.names.extend(asked.iter().zip(have).filter(|(_, have)| *have).map(|(group, _)| group.clone()));
    }
    groups.names.sort();
    Ok(groups)
}

fn has_committed(cluster: &Cluster, group: &str, topic: &str, partitions: &[i32]) -> Result<bool, Error> {
    let consumer: BaseConsumer<Quiet> =
        cluster.config().set("group.id", group).create_with_context(Quiet).map_err(Error::Client)?;
    let mut asked = TopicPartitionList::new();
    for partition in partitions {
        asked.add_partition(topic, *partition);
    }
    // A group that this principal may not look at is not named; it may be reached all the same.
    let Ok(found) = consumer.committed_offsets(asked, PATIENCE) else { return Ok(false) };
    Ok(found.elements().iter().any(|element| matches!(element.offset(), Offset::Offset(_))))
}

/// Whether a subscription or an assignment, as the consumer protocol writes it, names a topic: its length in two bytes, then itself.
fn names(bytes: &[u8], topic: &str) -> bool {
    let Ok(length) = u16::try_from(topic.len()) else { return false };
    let written = [&length.to_be_bytes()[..], topic.as_bytes()].concat();
    bytes.windows(written.len()).any(|window| window == written)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_topic_is_found_in_a_subscription_and_the_end_of_a_longer_name_is_not() {
        let subscription = [&[0, 1, 0, 0, 0, 1][..], &[0, 6], b"orders", &[0, 0, 0, 0]].concat();
        assert!(names(&subscription, "orders"));
        assert!(!names(&subscription, "order") && !names(&subscription, "rders"));
        assert!(!names(b"", "orders"));
    }

    #[test]
    fn the_groups_are_named_in_one_line() {
        let groups = Groups { names: vec!["billing".to_owned(), "shipping".to_owned()], unasked: 0 };
        assert_eq!(groups.sentence("orders"), "orders reaches billing, shipping");
        let none = Groups { names: Vec::new(), unasked: 3 };
        assert_eq!(
            none.sentence("orders"),
            "orders reaches no consumer group that is known (3 more groups were not asked)"
        );
    }
}
