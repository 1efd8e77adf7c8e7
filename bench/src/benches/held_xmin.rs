//! A backlog drained while a transaction holds the vacuum horizon, against the same one drained free.
//!
//! Both sides find the same: 300,000 published rows below the cursors, and 300,000 rows of `outbox.advance` that were
//! written and deleted again, as a day of advances leaves them. On the held side a transaction that has written, and reads
//! one snapshot, stands open from before that until after the drain, so that nothing of it could be vacuumed; on the free
//! side it was vacuumed.

use sqlx::{Connection as _, Executor as _};

use crate::arena::{Arena, Backlog};
use crate::lab::{Lab, Result};
use crate::measure::{Run, float, ratios, relay_run};
use crate::report::{Bar, Report};

const PUBLISHED: i64 = 300_000;

/// 300,000 advances of 8 shards that say nothing new, and all but the newest deleted, as relays do.
const DEAD_ADVANCES: [&str; 3] = [
    "INSERT INTO outbox.advance (shard, number, generation, position, snapshot, ceiling)
     SELECT shard, number + n, generation, position, snapshot, ceiling FROM outbox.cursor, generate_series(1, 37500) n",
    "WITH newest AS MATERIALIZED (SELECT shard, number FROM outbox.cursor)
     DELETE FROM outbox.advance a USING newest n WHERE a.shard = n.shard AND a.number < n.number",
    "VACUUM ANALYZE outbox.advance",
];

pub(crate) async fn run(lab: &Lab) -> Result<Report> {
    let (messages, pairs) = lab.tier.choose((500_000, 7), (200_000, 3));
    let arena = lab.arena().await?;
    arena.fill(Backlog { messages: PUBLISHED, keys: 10_000 }).await?;
    let published = arena.last_position().await?;
    arena.fill(Backlog { messages, keys: 10_000 }).await?;
    arena.place(published).await?;
    relay_run(lab, &arena, messages).await?;

    let (mut free, mut held) = (Vec::new(), Vec::new());
    for pair in 0..pairs {
        for hold in if pair % 2 == 0 { [false, true] } else { [true, false] } {
            let run = side(lab, &arena, hold, published, messages).await?;
            if hold { &mut held } else { &mut free }.push(run);
        }
    }
    arena.close().await?;

    let rates = |runs: &[Run]| runs.iter().map(|run| run.rate).collect::<Vec<_>>();
    let mut report = Report::new("held_xmin");
    report.runs(lab, "free", float(messages), &free);
    report.runs(lab, "held", float(messages), &held);
    report.verdict(ratios(&rates(&held), &rates(&free)), "held / free", Bar::AtLeast(0.85));
    Ok(report)
}

async fn side(lab: &Lab, arena: &Arena, hold: bool, published: i64, messages: i64) -> Result<Run> {
    let mut holder = arena.connect().await?;
    if hold {
        holder.execute("BEGIN ISOLATION LEVEL REPEATABLE READ").await?;
        holder.execute("SELECT pg_current_xact_id()").await?;
    }
    arena.place(published).await?;
    arena.sql(&DEAD_ADVANCES).await?;
    arena.settle().await?;
    let run = relay_run(lab, arena, messages).await?;
    if hold {
        holder.execute("ROLLBACK").await?;
    }
    holder.close().await?;
    Ok(run)
}
