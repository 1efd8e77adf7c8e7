//! A consumer group as its coordinator sees it: who is in it, who has which partition, what it has committed.
//!
//! One client for the life of a watch, because a test that follows a rebalance asks often.

use std::collections::BTreeMap;
use std::sync::Arc;

use rdkafka::consumer::{BaseConsumer, Consumer};
use rdkafka::{Offset, TopicPartitionList};
use tokio::task::spawn_blocking;

use crate::failure::Outcome;
use crate::kafka::{Kafka, REQUEST};
use crate::transfer::watermarks;

/// Looks at one group's work on one topic, without being a member of it.
#[derive(Clone)]
pub struct GroupWatch {
    client: Arc<BaseConsumer>,
    group: String,
    topic: String,
}

/// What the coordinator says of a group.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Group {
    /// `Stable`, `PreparingRebalance`, `CompletingRebalance`, `Empty`, `Dead`.
    pub state: String,
    /// The partitions of each member, by the `client.id` of the member.
    pub members: BTreeMap<String, Vec<i32>>,
}

impl Kafka {
    /// A look at a group, as often as wanted.
    ///
    /// # Errors
    ///
    /// When the client cannot be made.
    pub fn watch(&self, group: &str, topic: &str) -> Outcome<GroupWatch> {
        let mut config = self.config();
        config.set("group.id", group);
        Ok(GroupWatch {
            client: Arc::new(config.create()?),
            group: group.to_owned(),
            topic: topic.to_owned(),
        })
    }
}

impl GroupWatch {
    /// Members and their partitions.
    ///
    /// # Errors
    ///
    /// When the coordinator does not answer.
    pub async fn group(&self) -> Outcome<Group> {
        let Self { client, group, topic } = self.clone();
        spawn_blocking(move || {
            let list = client.fetch_group_list(Some(&group), REQUEST)?;
            let Some(found) = list.groups().iter().find(|found| found.name() == group) else {
                return Ok(Group::default());
            };
            let mut members: BTreeMap<String, Vec<i32>> = BTreeMap::new();
            for member in found.members() {
                let of_it = members.entry(member.client_id().to_owned()).or_default();
                of_it.extend(assigned(member.assignment().unwrap_or_default(), &topic).unwrap_or_default());
            }
            Ok(Group { state: found.state().to_owned(), members })
        })
        .await?
    }

    /// The group's committed offset of each partition; 0 where it has none.
    ///
    /// # Errors
    ///
    /// When the broker does not answer.
    pub async fn committed(&self) -> Outcome<BTreeMap<i32, i64>> {
        Ok(self
            .offsets()
            .await?
            .into_iter()
            .map(|(partition, committed, _)| (partition, committed))
            .collect())
    }

    /// How many records the group has not committed.
    ///
    /// # Errors
    ///
    /// When the broker does not answer.
    pub async fn lag(&self) -> Outcome<i64> {
        Ok(self.offsets().await?.into_iter().map(|(_, committed, end)| end - committed).sum())
    }

    async fn offsets(&self) -> Outcome<Vec<(i32, i64, i64)>> {
        let Self { client, topic, .. } = self.clone();
        spawn_blocking(move || {
            let ends = watermarks(&client, &topic)?;
            let mut asked = TopicPartitionList::new();
            for (partition, ..) in &ends {
                asked.add_partition(&topic, *partition);
            }
            let committed = client.committed_offsets(asked, REQUEST)?;
            let of = |(partition, low, high): (i32, i64, i64)| match committed
                .find_partition(&topic, partition)
                .map(|found| found.offset())
            {
                Some(Offset::Offset(at)) => (partition, at, high),
                _ => (partition, low, high),
            };
            Ok(ends.into_iter().map(of).collect())
        })
        .await?
    }
}

impl std::fmt::Debug for GroupWatch {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("GroupWatch")
            .field("group", &self.group)
            .field("topic", &self.topic)
            .finish_non_exhaustive()
    }
}

/// Reads the consumer protocol's assignment: a version, then topics, each with its partitions. Nothing: it is cut short.
fn assigned(mut bytes: &[u8], topic: &str) -> Option<Vec<i32>> {
    let mut partitions = Vec::new();
    take(&mut bytes, 2)?;
    for _ in 0..number(&mut bytes)? {
        let length = take(&mut bytes, 2)?;
        let name = take(&mut bytes, usize::from(u16::from_be_bytes([length[0], length[1]])))?;
        for _ in 0..number(&mut bytes)? {
            let partition = number(&mut bytes)?;
            if name == topic.as_bytes() {
                partitions.push(partition);
            }
        }
    }
    Some(partitions)
}

fn number(bytes: &mut &[u8]) -> Option<i32> {
    take(bytes, 4).and_then(|taken| taken.try_into().ok()).map(i32::from_be_bytes)
}

fn take<'a>(bytes: &mut &'a [u8], length: usize) -> Option<&'a [u8]> {
    let (taken, rest) = bytes.split_at_checked(length)?;
    *bytes = rest;
    Some(taken)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_assignment_is_read_and_one_cut_short_is_none() {
        let bytes =
            [&[0, 1][..], &[0, 0, 0, 1], &[0, 1], b"t", &[0, 0, 0, 2], &[0, 0, 0, 3], &[0, 0, 0, 5]].concat();
        assert_eq!(assigned(&bytes, "t"), Some(vec![3, 5]));
        assert_eq!(assigned(&bytes, "u"), Some(vec![]));
        assert_eq!(assigned(&bytes[..bytes.len() - 1], "t"), None);
    }
}
