//! Many messages of a partition in one transaction, behind the Kafka runtime.

use std::num::NonZeroUsize;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use baton_consumer::{BatchHandler, Builder, Delivery, Failure, Raw};
use sqlx::{Postgres, Transaction};

use crate::fixture::{Running, Send, World, eventually, header, in_world};

/// Writes all effects of a batch, then fails if one of its payloads says so. Keeps how many it was given each time.
#[derive(Clone, Default)]
pub(crate) struct Sheets(Arc<Mutex<Kept>>);

#[derive(Default)]
struct Kept {
    sizes: Vec<usize>,
    is_well: bool,
}

impl Sheets {
    /// What was sick is well from now on.
    pub(crate) fn heal(&self) {
        self.0.lock().unwrap().is_well = true;
    }

    pub(crate) fn sizes(&self) -> Vec<usize> {
        self.0.lock().unwrap().sizes.clone()
    }
}

impl BatchHandler for Sheets {
    type Payload = Raw;

    async fn handle(
        &self,
        deliveries: &[Delivery<Raw>],
        tx: &mut Transaction<'_, Postgres>,
    ) -> Result<(), Failure> {
        let is_well = {
            let mut kept = self.0.lock().unwrap();
            kept.sizes.push(deliveries.len());
            kept.is_well
        };
        for delivery in deliveries {
            sqlx::query("INSERT INTO effect (key, payload, at_offset) VALUES ($1, $2, $3)")
                .bind(delivery.idempotency_key())
                .bind(delivery.raw().map(AsRef::<[u8]>::as_ref))
                .bind(delivery.offset())
                .execute(&mut **tx)
                .await?;
        }
        for delivery in deliveries {
            match delivery.raw().map(AsRef::<[u8]>::as_ref) {
                Some(b"permanent") => return Err(Failure::permanent("no")),
                Some(b"panic") => panic!("the handler fell over"),
                Some(b"sick") if !is_well => return Err(Failure::transient("not well yet")),
                _ => {}
            }
        }
        Ok(())
    }
}

fn start(world: &World, change: impl FnOnce(Builder) -> Builder, sheets: &Sheets) -> Running {
    let builder = change(world.builder().park_after(Duration::ZERO).lease_ttl(Duration::from_secs(2)));
    Running::start(builder.batched(NonZeroUsize::new(50).unwrap(), sheets.clone()).build().unwrap())
}

fn numbers_of(keys: &[String], of: usize) -> Vec<usize> {
    let numbers = keys.iter().map(|key| key["/test#".len()..].parse().unwrap());
    numbers.filter(|nr: &usize| nr % 5 == of).collect()
}

#[test]
fn a_backlog_is_applied_by_the_dozen_once_each_and_in_order() {
    in_world(1, |world| async move {
        const MESSAGES: usize = 300;
        for nr in 0..MESSAGES {
            world.send(Send::new(&nr.to_string(), "pay").keyed(&format!("k{}", nr % 5))).await;
        }
        // Some of them once more.
        for nr in (0..MESSAGES).step_by(10) {
            world.send(Send::new(&nr.to_string(), "pay").keyed(&format!("k{}", nr % 5))).await;
        }
        let sheets = Sheets::default();
        let running = start(&world, |builder| builder, &sheets);
        world.eventually_committed(0, 330).await;
        let keys = world.effect_keys().await;
        assert_eq!(keys.len(), MESSAGES);
        for of in 0..5 {
            assert!(numbers_of(&keys, of).is_sorted());
        }
        let sizes = sheets.sizes();
        assert!(sizes.iter().all(|size| *size <= 50), "{sizes:?}");
        assert!(sizes.len() < 40, "{} calls for {MESSAGES} messages: {sizes:?}", sizes.len());
        running.stop().await.unwrap();
    });
}

#[test]
fn of_a_batch_that_fails_only_the_one_at_fault_is_given_up_or_set_aside() {
    in_world(1, |world| async move {
        let payload = |nr: usize| match nr {
            13 => "permanent",
            21 => "panic",
            32 => "sick",
            _ => "pay",
        };
        for nr in 0..60 {
            world.send(Send::new(&nr.to_string(), payload(nr)).keyed(&format!("k{}", nr % 5))).await;
        }
        let sheets = Sheets::default();
        let running = start(&world, |builder| builder, &sheets);
        world.eventually_committed(0, 60).await;
        let mut letters = world.eventually_letters(2).await;
        letters.sort_by_key(|letter| header(letter, "dlt-cause"));
        let causes: Vec<_> = letters.iter().map(|letter| header(letter, "dlt-cause").unwrap()).collect();
        assert_eq!(causes, ["panic", "permanent"]);
        let keys = world.effect_keys().await;
        assert_eq!(numbers_of(&keys, 2).last(), Some(&27), "32 waits, and 37 and later behind it: {keys:?}");
        sheets.heal();
        let keys = world.eventually_effects(58).await;
        for of in 0..5 {
            assert!(numbers_of(&keys, of).is_sorted(), "{keys:?}");
        }
        world.eventually_parked(&[]).await;
        running.stop().await.unwrap();
    });
}

#[test]
fn what_comes_after_a_conflict_in_its_batch_is_applied_and_the_conflict_is_a_dead_letter() {
    in_world(1, |world| async move {
        world.send(Send::new("1", "pay 100")).await;
        world.send(Send::new("1", "pay 900")).await;
        world.send(Send::new("2", "pay")).await;
        world.send(Send::new("3", "pay")).await;
        let running = start(&world, |builder| builder, &Sheets::default());
        world.eventually_committed(0, 4).await;
        assert_eq!(world.effect_keys().await, ["/test#1", "/test#2", "/test#3"]);
        let letters = world.eventually_letters(1).await;
        assert_eq!(header(&letters[0], "dlt-cause").as_deref(), Some("conflict"));
        eventually("the first payload's row stands", || async {
            let rows = world.rows().await;
            if rows["/test#1"].0 == "done" { Ok(()) } else { Err(format!("{rows:?}")) }
        })
        .await;
        running.stop().await.unwrap();
    });
}
