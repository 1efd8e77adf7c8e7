//! Which keys are compared with each other.
//!
//! The same key in two scopes is two pieces of work. By default the scope is the original topic and the message's type,
//! because `placed` and `cancelled` of one order may both carry the order's id as key.

/// What separates equal keys. Stored with every inbox row: a consumer that changes it takes everything for new.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum Scope {
    /// `<topic>/<type>`, or `<topic>` for a message without a type. The default.
    #[default]
    TopicAndType,
    /// `<topic>`.
    Topic,
    /// One scope for all messages of this consumer, whatever topic they come from. At most 1,280 bytes, may be empty.
    Fixed(String),
}

impl Scope {
    /// The scope of one message. A topic holds no `/`, so two pairs never give one text.
    pub(crate) fn of(&self, topic: &str, message_type: Option<&str>) -> String {
        match (self, message_type) {
            (Self::TopicAndType, Some(message_type)) => format!("{topic}/{message_type}"),
            (Self::TopicAndType, None) | (Self::Topic, _) => topic.to_owned(),
            (Self::Fixed(scope), _) => scope.clone(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn by_default_types_of_one_topic_do_not_meet() {
        let scope = Scope::default();
        assert_eq!(scope.of("orders", Some("order.placed")), "orders/order.placed");
        assert_ne!(scope.of("orders", Some("order.placed")), scope.of("orders", Some("order.cancelled")));
        assert_eq!(scope.of("orders", None), "orders");
    }
}
