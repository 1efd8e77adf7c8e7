use proptest::prelude::*;

use super::*;

fn facts(customer: usize, seq: i64) -> Facts {
    let order_id = Uuid::from_u128((u128::try_from(customer).unwrap() << 64) + u128::try_from(seq).unwrap());
    Facts { order_id, customer: format!("customer-{customer}"), seq, amount_cents: 100 + seq }
}

fn record(facts: &Facts) -> Record {
    let partition = i32::try_from(facts.customer.len() % 3).unwrap();
    Record { partition, content: Content::Order(facts.clone()) }
}

/// Three customers with four orders each, everything as it should be.
fn story() -> Evidence {
    let placed: Vec<Facts> =
        (1..=4).flat_map(|seq| [1, 22, 333].map(|customer| facts(customer, seq))).collect();
    Evidence {
        published: placed.iter().map(record).collect(),
        billed: placed.clone(),
        placed_by_now: placed.clone(),
        placed,
        dead_lettered: Vec::new(),
    }
}

fn one(facts: &Facts) -> BTreeSet<Uuid> {
    BTreeSet::from([facts.order_id])
}

#[test]
fn a_faithful_history_is_clean() {
    let verdict = judge(&story());
    assert!(verdict.is_clean(), "{verdict}");
    assert_eq!(verdict.to_string(), "check: 0 lost, 0 phantom, 0 doubled, 0 out of order, 0 dead-lettered");
    assert_eq!((verdict.placed, verdict.published, verdict.billed, verdict.wire_duplicates), (12, 12, 12, 0));
}

#[test]
fn an_order_that_is_neither_billed_nor_dead_is_lost() {
    let mut evidence = story();
    let victim = facts(22, 2);
    evidence.billed.retain(|f| *f != victim);
    assert_eq!(judge(&evidence).lost, one(&victim));
    // That it is on the topic does not help.
    evidence.published.retain(|r| r.content != Content::Order(victim.clone()));
    let verdict = judge(&evidence);
    assert_eq!(verdict.lost, one(&victim));
    assert!(!verdict.is_clean());
}

#[test]
fn an_order_in_the_dead_letter_topic_is_counted_apart() {
    let mut evidence = story();
    let poison = facts(22, 2);
    evidence.billed.retain(|f| *f != poison);
    evidence.dead_lettered.push(record(&poison));
    let verdict = judge(&evidence);
    assert!(verdict.is_clean(), "{verdict}");
    assert_eq!(verdict.dead_lettered, one(&poison));
    assert!(verdict.to_string().ends_with(", 1 dead-lettered"));
}

#[test]
fn a_dead_letter_that_was_replayed_is_billed_out_of_turn_without_fault() {
    let mut evidence = story();
    let poison = facts(22, 2);
    evidence.billed.retain(|f| *f != poison);
    evidence.billed.push(poison.clone());
    evidence.dead_lettered.push(record(&poison));
    let verdict = judge(&evidence);
    assert!(verdict.is_clean(), "{verdict}");
    assert_eq!(verdict.dead_lettered.len(), 0);
}

#[test]
fn what_was_never_placed_is_a_phantom_wherever_it_is_seen() {
    let ghost = facts(7, 1);
    let mut published = story();
    published.published.push(record(&ghost));
    let mut billed = story();
    billed.billed.push(ghost.clone());
    let mut dead = story();
    dead.dead_lettered.push(record(&ghost));
    for evidence in [published, billed, dead] {
        let verdict = judge(&evidence);
        assert_eq!(verdict.phantom, one(&ghost));
        assert!(!verdict.is_clean());
    }
}

#[test]
fn an_invoice_over_another_amount_is_a_phantom_and_its_order_lost() {
    let mut evidence = story();
    let victim = facts(1, 3);
    for invoice in evidence.billed.iter_mut().filter(|f| **f == victim) {
        invoice.amount_cents += 1;
    }
    let verdict = judge(&evidence);
    assert_eq!((verdict.phantom, verdict.lost), (one(&victim), one(&victim)));
}

#[test]
fn a_record_that_is_named_like_an_order_and_says_something_else_is_a_phantom() {
    let mut evidence = story();
    let victim = facts(1, 3);
    evidence.published.push(Record { partition: 0, content: Content::Garbled(victim.order_id) });
    assert_eq!(judge(&evidence).phantom, one(&victim));
}

#[test]
fn somebody_elses_record_is_no_order_and_no_fault() {
    let mut evidence = story();
    evidence.published.push(Record { partition: 0, content: Content::Foreign });
    let verdict = judge(&evidence);
    assert!(verdict.is_clean());
    assert_eq!(verdict.foreign, 1);
}

#[test]
fn two_invoices_for_one_order_are_doubled() {
    let mut evidence = story();
    let victim = facts(333, 1);
    evidence.billed.push(victim.clone());
    let verdict = judge(&evidence);
    assert_eq!(verdict.doubled, one(&victim));
    assert!(!verdict.is_clean());
}

#[test]
fn a_record_that_comes_twice_is_counted_and_no_fault() {
    let mut evidence = story();
    let again = evidence.published[5..].to_vec();
    evidence.published.extend(again);
    let verdict = judge(&evidence);
    assert!(verdict.is_clean(), "{verdict}");
    assert_eq!(verdict.wire_duplicates, 7);
}

#[test]
fn an_order_published_after_a_later_one_of_its_customer_is_out_of_order() {
    let mut evidence = story();
    let late = facts(1, 2);
    let at = |facts: &Facts| {
        evidence.published.iter().position(|r| r.content == Content::Order(facts.clone())).unwrap()
    };
    let (second, third) = (at(&late), at(&facts(1, 3)));
    evidence.published.swap(second, third);
    let verdict = judge(&evidence);
    assert_eq!(verdict.published_out_of_order, one(&late));
    assert!(verdict.billed_out_of_order.is_empty());
    assert!(!verdict.is_clean());
}

#[test]
fn an_order_billed_after_a_later_one_of_its_customer_is_out_of_order() {
    let mut evidence = story();
    let late = facts(1, 2);
    let at = |facts: &Facts| evidence.billed.iter().position(|f| f == facts).unwrap();
    let (second, third) = (at(&late), at(&facts(1, 3)));
    evidence.billed.swap(second, third);
    assert_eq!(judge(&evidence).billed_out_of_order, one(&late));
}

#[test]
fn a_customer_on_two_partitions_is_out_of_order() {
    let mut evidence = story();
    let stray = facts(22, 4);
    for record in evidence.published.iter_mut().filter(|r| r.content == Content::Order(stray.clone())) {
        record.partition += 1;
    }
    assert_eq!(judge(&evidence).published_out_of_order, one(&stray));
}

#[test]
fn an_order_placed_while_the_check_looks_is_neither_lost_nor_phantom() {
    let mut evidence = story();
    let waiting = facts(1, 5);
    evidence.placed_by_now.push(waiting.clone());
    assert!(judge(&evidence).is_clean());
    evidence.published.push(record(&waiting));
    assert!(judge(&evidence).is_clean());
}

#[test]
fn the_summary_counts_and_names_what_was_found() {
    let mut evidence = story();
    evidence.billed.retain(|f| f.seq != 4);
    let json = serde_json::to_value(judge(&evidence).summary()).unwrap();
    assert_eq!(json["lost"], 3);
    assert_eq!(json["examples"]["lost"].as_array().unwrap().len(), 3);
}

/// A right history of any shape: customers interleaved, records repeated, some orders dead-lettered.
fn right_history() -> impl Strategy<Value = Evidence> {
    let orders = prop::collection::vec((0..5_usize, prop::bool::weighted(0.1)), 1..80);
    (orders, prop::collection::vec((any::<prop::sample::Index>(), 0..10_usize), 0..4)).prop_map(
        |(orders, crashes)| {
            let mut evidence = Evidence::default();
            let mut seqs = [0_i64; 5];
            for (customer, poison) in orders {
                seqs[customer] += 1;
                let order = facts(customer, seqs[customer]);
                evidence.published.push(record(&order));
                if poison {
                    evidence.dead_lettered.push(record(&order));
                } else {
                    evidence.billed.push(order.clone());
                }
                evidence.placed.push(order);
            }
            for (at, back) in crashes {
                let at = at.index(evidence.published.len());
                let again = evidence.published[at.saturating_sub(back)..at].to_vec();
                evidence.published.splice(at..at, again);
            }
            evidence.placed_by_now.clone_from(&evidence.placed);
            evidence
        },
    )
}

proptest! {
    #[test]
    fn a_right_history_is_never_blamed(evidence in right_history()) {
        let verdict = judge(&evidence);
        prop_assert!(verdict.is_clean(), "{}", verdict);
        prop_assert_eq!(verdict.wire_duplicates, evidence.published.len() - evidence.placed.len());
        prop_assert_eq!(verdict.dead_lettered.len(), evidence.dead_lettered.len());
    }

    #[test]
    fn a_loss_planted_anywhere_is_found(mut evidence in right_history(), at in any::<prop::sample::Index>()) {
        let victim = evidence.placed[at.index(evidence.placed.len())].clone();
        evidence.billed.retain(|f| *f != victim);
        evidence.dead_lettered.retain(|r| r.content != Content::Order(victim.clone()));
        prop_assert_eq!(judge(&evidence).lost, one(&victim));
    }

    #[test]
    fn a_rolled_back_order_that_was_published_is_found(mut evidence in right_history(), at in any::<prop::sample::Index>()) {
        let victim = evidence.placed.remove(at.index(evidence.placed.len()));
        evidence.placed_by_now.retain(|f| *f != victim);
        prop_assert_eq!(judge(&evidence).phantom, one(&victim));
    }

    #[test]
    fn a_double_effect_planted_anywhere_is_found(mut evidence in right_history(), from in any::<prop::sample::Index>(), to in any::<prop::sample::Index>()) {
        prop_assume!(!evidence.billed.is_empty());
        let victim = evidence.billed[from.index(evidence.billed.len())].clone();
        let to = to.index(evidence.billed.len() + 1);
        evidence.billed.insert(to, victim.clone());
        prop_assert_eq!(judge(&evidence).doubled, one(&victim));
    }

    #[test]
    fn an_inversion_planted_anywhere_is_found(mut evidence in right_history(), at in any::<prop::sample::Index>()) {
        prop_assume!(!evidence.billed.is_empty());
        let victim = evidence.billed.remove(at.index(evidence.billed.len()));
        let overtaken = evidence.billed.iter().any(|f| f.customer == victim.customer && f.seq > victim.seq);
        evidence.billed.push(victim.clone());
        let found = judge(&evidence).billed_out_of_order;
        prop_assert_eq!(found, if overtaken { one(&victim) } else { BTreeSet::new() });
    }
}
