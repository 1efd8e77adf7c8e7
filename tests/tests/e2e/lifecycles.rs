//! The tables of `baton_protocol::lifecycle` and the database know the same words, and the rule of a lease decides as
//! the relay's statements do.

use std::collections::BTreeSet;
use std::time::Duration;

use baton_protocol::dead_letter;
use baton_protocol::lease::Terms;
use baton_protocol::lease::ownership::{Claim, Holder, Lease};
use baton_protocol::lifecycle::{Word, dead_letter as replayed, delivery, lease, message};
use baton_tests::{Harness, Load, Outcome, Site, fail, test};
use sqlx::{AssertSqlSafe, Connection, PgConnection};

use crate::claims::{Grip, Hand};

/// A word that no table and no constraint knows.
const UNHEARD_OF: &str = "unheard_of";

fn words<W: Word>(which: impl Fn(W) -> bool) -> BTreeSet<&'static str> {
    W::ALL.iter().filter(|word| which(**word)).map(|word| word.as_str()).collect()
}

#[test]
fn the_database_takes_exactly_the_states_and_causes_of_the_lifecycles() {
    test(Duration::from_secs(60), Load::Light, async |harness: &mut Harness| {
        let site = harness.site().await?;
        assert_eq!(differences(&site).await?, Vec::<String>::new());

        // Were it otherwise, it would be found.
        let other = message::LIFECYCLE.terminal.iter().map(|state| format!("'{state}'")).collect::<Vec<_>>();
        let other = format!(
            "ALTER TABLE outbox.parked DROP CONSTRAINT state_is_known,
             ADD CONSTRAINT state_is_known CHECK (state IN ('{UNHEARD_OF}', {}))",
            other.join(", ")
        );
        sqlx::raw_sql(AssertSqlSafe(other)).execute(site.pool()).await?;
        let found = differences(&site).await?;
        for words in
            ["outbox.parked has", "outbox.parked refuses \"dead\"", "outbox.parked takes \"unheard_of\""]
        {
            assert!(found.iter().any(|difference| difference.starts_with(words)), "{words}: {found:?}");
        }
        assert!(found.iter().all(|difference| difference.starts_with("outbox.parked")), "{found:?}");
        Ok(())
    });
}

/// Where the database's words and those of the lifecycles part.
async fn differences(site: &Site) -> Outcome<Vec<String>> {
    let mut found = Vec::new();
    // `{word}` stands for the word; what else the row needs in order to be refused for the word alone comes with it.
    for (table, constraint, insert, expected) in [
        (
            "outbox.parked",
            "state_is_known",
            "INSERT INTO outbox.parked (id, position, shard, topic, created_at, state, cause, generation)
             VALUES (gen_random_uuid(), 1, 0, 't', now(), {word}, 'too_large', 1)",
            words(message::State::is_parked),
        ),
        (
            "outbox.parked",
            "cause_is_known",
            "INSERT INTO outbox.parked (id, position, shard, topic, created_at, state, cause, generation)
             VALUES (gen_random_uuid(), 1, 0, 't', now(), 'retrying', {word}, 1)",
            words(|_: message::Cause| true),
        ),
        (
            "outbox.stopped",
            "cause_is_known",
            "INSERT INTO outbox.stopped (shard, position, xid, id, topic, cause, error, attempts, generation,
                                         first_failed_at, last_failed_at, next_attempt_at)
             VALUES (0, 1, '3', gen_random_uuid(), 't', {word}, 'e', 1, 1, now(), now(), now())",
            // A paused topic is an operator's doing and stops no shard.
            words(|cause: message::Cause| cause != message::Cause::Paused),
        ),
        (
            "inbox.message",
            "state_is_known",
            "INSERT INTO inbox.message (consumer, scope, key, fingerprint, state, finished_at, cause)
             SELECT 'c', 's', 'k', 'v1:sha256:00', w, CASE WHEN w IN ('done', 'dead') THEN now() END,
                    CASE w WHEN 'dead' THEN 'panic' END FROM (SELECT {word} AS w) word",
            lease::State::ALL.iter().map(|state| state.stored()).collect(),
        ),
        (
            "inbox.parked",
            "state_is_known",
            r#"INSERT INTO inbox.parked (consumer, topic, "partition", "offset", scope, idempotency_key, state)
               VALUES ('c', 't', 0, 1, 's', 'k', {word})"#,
            words(delivery::State::is_parked),
        ),
        (
            "inbox.replay_item",
            "state_is_known",
            r#"WITH plan AS (INSERT INTO inbox.replay_plan (consumer, topic, dead_letters, target, new_key, again, loop_cap, ends, items)
                             VALUES ('c', 't', 'd', 'r', false, false, 3, '{}', 1) RETURNING plan)
               INSERT INTO inbox.replay_item (plan, item, consumer, "partition", "offset", subject, round, state, owner, lease_until, sent_at, settled_at)
               SELECT plan, 1, 'c', 0, 0, '', 1, w, 'o', CASE w WHEN 'sending' THEN now() END,
                      CASE WHEN w NOT IN ('waiting', 'sending') THEN now() END,
                      CASE WHEN w NOT IN ('waiting', 'sending', 'sent') THEN now() END
               FROM plan, (SELECT {word} AS w) word"#,
            words(|state: replayed::State| state != replayed::State::Dead),
        ),
    ] {
        let written = written_in(site, table, constraint).await?;
        if written != owned(&expected) {
            found.push(format!("{table} has {written:?} where its lifecycle has {expected:?}"));
        }
        let mut connection = site.connect().await?;
        for word in &expected {
            if let Some(refused) = refusal(&mut connection, insert, word).await? {
                found.push(format!("{table} refuses {word:?} by {refused}"));
            }
        }
        for word in [UNHEARD_OF, message::State::Pending.as_str(), delivery::State::Received.as_str()] {
            let refused = refusal(&mut connection, insert, word).await?;
            if refused.as_deref() != Some(constraint) {
                found.push(format!("{table} takes {word:?}, or refuses it by another name: {refused:?}"));
            }
        }
        connection.close().await?;
    }
    Ok(found)
}

#[test]
fn a_lease_in_the_database_has_an_owner_exactly_when_it_has_an_end() {
    test(Duration::from_secs(60), Load::Light, async |harness: &mut Harness| {
        let site = harness.site().await?;
        let mut connection = site.connect().await?;
        for (columns, expected) in [
            ("owner = NULL, lease_until = NULL", None),
            ("owner = {word}, lease_until = now()", None),
            ("owner = {word}, lease_until = NULL", Some("an_owner_has_an_expiry")),
            ("owner = NULL, lease_until = now()", Some("an_owner_has_an_expiry")),
            ("generation = -1", Some("a_generation_never_falls_below_zero")),
        ] {
            let update = format!("UPDATE outbox.shard SET {columns} WHERE shard = 0");
            assert_eq!(refusal(&mut connection, &update, "me").await?.as_deref(), expected, "{columns}");
        }
        connection.close().await?;
        Ok(())
    });
}

#[test]
fn every_cause_of_a_dead_letter_can_be_stored_with_a_dead_inbox_row() {
    test(Duration::from_secs(60), Load::Light, async |harness: &mut Harness| {
        let site = harness.site().await?;
        let mut connection = site.connect().await?;
        let insert =
            "INSERT INTO inbox.message (consumer, scope, key, fingerprint, state, finished_at, cause)
                      VALUES ('c', 's', 'k', 'v1:sha256:00', 'dead', now(), {word})";
        for cause in dead_letter::Cause::ALL {
            assert_eq!(refusal(&mut connection, insert, cause.as_str()).await?, None, "{cause}");
        }
        connection.close().await?;
        Ok(())
    });
}

#[test]
fn the_statements_of_a_lease_decide_as_the_rule_does() {
    test(Duration::from_secs(120), Load::Light, async |harness: &mut Harness| {
        let site = harness.site().await?;
        let seed = fastrand::u64(..);
        println!("seed {seed}");
        walk(&site, 5, Terms::default(), seed).await?;
        // A rule by which leases last four seconds less than the statements make them is told from them.
        let shorter = Terms::new(Terms::default().ttl() - Duration::from_secs(4), None)?;
        let told = walk(&site, 6, shorter, seed).await.expect_err("a rule that differs from the statements");
        assert!(told.to_string().contains("step"), "{told}");
        Ok(())
    });
}

/// Three owners with one clock, which this test moves: statements and rule must answer alike, step by step.
async fn walk(site: &Site, shard: i16, terms: Terms, seed: u64) -> Outcome {
    const STEPS: usize = 400;
    let mut random = fastrand::Rng::with_seed(seed);
    let (mut now, mut rule) = (Duration::ZERO, Lease::<String>::default());
    let mut hands = Vec::new();
    for owner in ["a", "b", "c"] {
        hands.push(Hand::frozen(site, owner, &moment(now)).await?);
    }
    let mut grips: Vec<(usize, Grip)> = Vec::new();
    let (mut granted, mut refused) = ([0_u32; 4], [0_u32; 4]);
    for step in 0..STEPS {
        // Seconds on a lease of ten: steps often end exactly at its end.
        if random.u8(..3) == 0 {
            now += Duration::from_secs(random.u64(1..8));
            for hand in &mut hands {
                hand.at(&moment(now)).await?;
            }
        }
        let act = random.usize(..4);
        let (said, expected) = if act == 0 {
            let hand = random.usize(..3);
            let last = grips.last().filter(|_| random.bool()).map(|(_, grip)| grip.generation);
            let owner = hands[hand].owner.clone();
            let claimed = hands[hand].claim(shard, last).await?;
            let expected = match rule.claim(owner, last, now, terms) {
                Claim::Won { holder, .. } => Some(holder.generation),
                Claim::Held { .. } => None,
            };
            if claimed.map(|grip| grip.generation) != expected {
                fail!(
                    "seed {seed}, step {step}: a claim gave {claimed:?}, the rule {expected:?} by {rule:?}"
                );
            }
            grips.extend(claimed.map(|grip| (hand, grip)));
            (claimed.is_some(), expected.is_some())
        } else {
            // Of the last three winners, past ones included; the name alone may be somebody else's.
            let Some(index) = grips.len().checked_sub(random.usize(1..4)) else { continue };
            let (winner, grip) = grips[index];
            let hand = if random.u8(..5) == 0 { random.usize(..3) } else { winner };
            let holder = Holder { owner: hands[hand].owner.clone(), generation: grip.generation };
            match act {
                1 => (hands[hand].renew(grip).await?, rule.renew(&holder, now, terms).is_ok()),
                2 => (hands[hand].advance(grip).await?, rule.permits(&holder, now).is_ok()),
                _ => (hands[hand].release(grip).await?, rule.release(&holder, now).is_ok()),
            }
        };
        if said != expected {
            fail!("seed {seed}, step {step}: act {act} at {now:?} was {said}, by {rule:?} {expected}");
        }
        if said { granted[act] += 1 } else { refused[act] += 1 }
    }
    println!("claim, renew, advance, release: {granted:?} granted, {refused:?} refused");
    assert!(granted.iter().chain(&refused).all(|times| *times > 0), "a walk that saw too little");
    Ok(())
}

/// So many seconds after an agreed beginning, as Postgres reads it.
fn moment(since: Duration) -> String {
    let seconds = since.as_secs();
    format!("2031-01-01 {:02}:{:02}:{:02}+00", seconds / 3600, seconds / 60 % 60, seconds % 60)
}

fn owned(words: &BTreeSet<&str>) -> BTreeSet<String> {
    words.iter().map(|word| (*word).to_owned()).collect()
}

/// The words in a constraint's definition: what stands between quotation marks. Where one function stands for all constraints of
/// its table, the line that breaks this one.
async fn written_in(site: &Site, table: &str, constraint: &str) -> Outcome<BTreeSet<String>> {
    let definition: String = sqlx::query_scalar(
        "SELECT pg_get_constraintdef(oid) FROM pg_constraint WHERE conrelid = $1::text::regclass AND conname = $2
         UNION ALL
         SELECT split_part(line, ' THEN ', 1)
         FROM pg_proc, regexp_split_to_table(prosrc, '\n') line
         WHERE oid = to_regproc($1 || '_is_valid') AND line LIKE '% THEN ''' || $2 || ''''",
    )
    .bind(table)
    .bind(constraint)
    .fetch_one(site.pool())
    .await?;
    Ok(definition.split('\'').skip(1).step_by(2).map(str::to_owned).collect())
}

/// The constraint that refuses the statement with this word in the place of `{word}`. Nothing of it stays.
async fn refusal(connection: &mut PgConnection, sql: &str, word: &str) -> Outcome<Option<String>> {
    let mut transaction = connection.begin().await?;
    let sql = sql.replace("{word}", &format!("'{word}'"));
    let done = sqlx::raw_sql(AssertSqlSafe(sql)).execute(&mut *transaction).await;
    transaction.rollback().await?;
    match done {
        Ok(_) => Ok(None),
        Err(error) => match error.as_database_error().and_then(|error| error.constraint()) {
            Some(constraint) => Ok(Some(constraint.to_owned())),
            None => fail!("{word:?}: {error}"),
        },
    }
}
