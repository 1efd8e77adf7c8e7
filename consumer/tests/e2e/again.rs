//! A whole topic once more from its beginning.

use std::num::NonZeroUsize;

use tokio::time::Instant;

use crate::fixture::{Probe, Running, World, in_world};

/// Consumes the topic with a group of its own, and says how fast.
async fn consumed(world: &World, group: &str, records: i64) -> f64 {
    let builder = world.builder().group(group).concurrency(NonZeroUsize::new(4).unwrap());
    let begun = Instant::now();
    let running = Running::start(builder.transactional(Probe::new()).build().unwrap());
    world.eventually_committed_by(group, 0, records).await;
    let took = begun.elapsed();
    running.stop().await.unwrap();
    f64::from(u32::try_from(records).unwrap()) / took.as_secs_f64()
}

#[test]
fn a_topic_that_is_consumed_again_from_its_beginning_has_no_new_effect() {
    let is_full = std::env::var("BATON_TIER").is_ok_and(|tier| tier == "full");
    let records: i64 = if is_full { 10_000 } else { 1_000 };
    in_world(1, |world| async move {
        world.send_many(records).await;
        let first = consumed(&world, &world.group(), records).await;
        let effects = world.effect_keys().await;
        assert_eq!(i64::try_from(effects.len()).unwrap(), records);
        let again = consumed(&world, &format!("{}-again", world.name), records).await;
        assert_eq!(world.effect_keys().await, effects, "nothing new");
        println!(
            "{records} records: {first:.0} a second at first, {again:.0} duplicates a second, start of the group included"
        );
    });
}
