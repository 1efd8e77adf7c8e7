//! `baton replay status` and `list`: what became of the items, as the consumer's inbox says.

use serde_json::{Value, json};
use sqlx::PgConnection;
use uuid::Uuid;

use super::{Error, connect};
use crate::config::Effective;
use crate::failure::Failure;
use crate::out;
use crate::table::{numbers, render, words};

#[derive(Debug, Clone, sqlx::FromRow)]
struct Row {
    plan: Uuid,
    consumer: String,
    topic: String,
    dead_letters: String,
    target: String,
    new_key: bool,
    items: i64,
    created_by: String,
    created_at: String,
    waiting: i64,
    sending: i64,
    unsettled: i64,
    applied: i64,
    duplicate: i64,
    conflict: i64,
    dead_again: i64,
}

impl Row {
    fn settled(&self) -> i64 {
        self.applied + self.duplicate + self.conflict + self.dead_again
    }

    /// On the topic that they are sent to, as far as is known.
    fn sent(&self) -> i64 {
        self.unsettled + self.settled()
    }

    /// Not known to be there.
    fn to_send(&self) -> i64 {
        self.waiting + self.sending
    }

    fn state(&self) -> &'static str {
        match (self.to_send(), self.sent() + self.sending) {
            (0, _) => "finished",
            (_, 0) => "planned",
            _ => "running",
        }
    }

    fn json(&self) -> Value {
        json!({
            "plan": self.plan, "state": self.state(), "items": self.items, "sent": self.sent(), "applied": self.applied,
            "duplicate": self.duplicate, "conflict": self.conflict, "dead_again": self.dead_again, "waiting": self.to_send(),
            "unsettled": self.unsettled, "consumer": self.consumer, "topic": self.topic, "dead_letters": self.dead_letters,
            "target": self.target, "new_key": self.new_key, "created_at": self.created_at, "created_by": self.created_by,
        })
    }
}

/// One plan.
pub(super) async fn status(config: &Effective, plan: Uuid, json: bool) -> Result<(), Failure> {
    let mut connection = connect(config).await?;
    let rows = read(&mut connection, Some(plan)).await?;
    let row = rows.first().ok_or(Error::NoPlan(plan))?;
    if json { out::json(&row.json()) } else { out::text(&for_people(row)) }
}

/// All of them, the newest first.
pub(super) async fn list(config: &Effective, json: bool) -> Result<(), Failure> {
    let mut connection = connect(config).await?;
    let rows = read(&mut connection, None).await?;
    if json {
        return out::json(&rows.iter().map(Row::json).collect::<Vec<_>>());
    }
    let cells: Vec<_> = rows
        .iter()
        .map(|row| {
            [
                row.plan.to_string(),
                row.created_at.clone(),
                row.consumer.clone(),
                row.topic.clone(),
                row.state().to_owned(),
                row.items.to_string(),
                row.sent().to_string(),
                row.applied.to_string(),
                row.duplicate.to_string(),
                row.conflict.to_string(),
                row.dead_again.to_string(),
            ]
        })
        .collect();
    let columns = [
        words("plan"),
        words("made at"),
        words("consumer"),
        words("topic"),
        words("state"),
        numbers("items"),
        numbers("sent"),
        numbers("applied"),
        numbers("duplicate"),
        numbers("conflict"),
        numbers("dead again"),
    ];
    out::text(&render(columns, &cells))
}

async fn read(connection: &mut PgConnection, plan: Option<Uuid>) -> Result<Vec<Row>, Error> {
    sqlx::query_as(include_str!("../../queries/replay_status.sql"))
        .bind(plan)
        .fetch_all(connection)
        .await
        .map_err(Error::Database)
}

fn for_people(row: &Row) -> String {
    let mut text = format!(
        "plan {} of {} for {} is {}: {} dead letters from {} to {}{}, made at {} by {}\n\n",
        row.plan,
        row.consumer,
        row.topic,
        row.state(),
        row.items,
        row.dead_letters,
        row.target,
        if row.new_key { ", each under a new key" } else { "" },
        row.created_at,
        row.created_by,
    );
    let lines = [
        ("waiting to be sent", row.to_send()),
        ("sent", row.sent()),
        ("  applied", row.applied),
        ("  duplicate", row.duplicate),
        ("  conflict", row.conflict),
        ("  dead again", row.dead_again),
        ("  not told yet", row.unsettled),
    ];
    let rows = lines.map(|(what, count)| [what.to_owned(), count.to_string()]);
    text.push_str(&render([words("items"), numbers("count")], &rows));
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(waiting: i64, sending: i64, unsettled: i64, applied: i64) -> Row {
        Row {
            plan: Uuid::nil(),
            consumer: "billing".to_owned(),
            topic: "orders".to_owned(),
            dead_letters: "orders.billing.dlt".to_owned(),
            target: "orders.billing.replay".to_owned(),
            new_key: false,
            items: waiting + sending + unsettled + applied,
            created_by: "ops".to_owned(),
            created_at: "2026-11-30T17:00:00.000Z".to_owned(),
            waiting,
            sending,
            unsettled,
            applied,
            duplicate: 0,
            conflict: 0,
            dead_again: 0,
        }
    }

    #[test]
    fn a_plan_is_planned_then_running_then_finished() {
        assert_eq!(row(3, 0, 0, 0).state(), "planned");
        assert_eq!(row(2, 1, 0, 0).state(), "running");
        assert_eq!(row(1, 0, 2, 0).state(), "running");
        assert_eq!(row(0, 0, 2, 1).state(), "finished");
        assert_eq!(row(0, 0, 0, 0).state(), "finished");
    }

    #[test]
    fn every_item_is_sent_or_waits_and_what_is_sent_is_settled_or_not() {
        let json = row(1, 2, 3, 4).json();
        assert_eq!(
            (json["items"].as_i64(), json["sent"].as_i64(), json["waiting"].as_i64()),
            (Some(10), Some(7), Some(3))
        );
        assert_eq!((json["applied"].as_i64(), json["unsettled"].as_i64()), (Some(4), Some(3)));
    }
}
