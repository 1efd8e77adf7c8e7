//! The recovery story is told as it always was, and can fail.

#[path = "../examples/recovery/story.rs"]
mod story;

#[test]
fn the_recovery_story_comes_out_as_it_must() {
    let told = story::tell();
    assert!(told.holds(), "{}", told.text());
    let text = told.text();
    for line in [
        "claim before expiry: refused",
        "takeover attempt: 2",
        "stale completion: refused",
        "result owner: worker-b",
        "old heartbeat: refused",
        "claim after three spent attempts: dead",
        "heartbeat in time: keeps ownership",
        "completion at exactly the expiry: refused",
        "effects without key: 2",
        "effects with key: 1",
        "same key with another payload: refused",
    ] {
        assert!(text.lines().any(|said| said == line), "{line:?} is missing in\n{text}");
    }
    assert_eq!(text.lines().last(), Some("assertions: PASS"));
}

#[test]
fn a_check_that_comes_out_otherwise_fails_the_story() {
    let mut told = story::Told::default();
    assert_eq!(told.text(), "assertions: FAIL", "a story without checks shows nothing");
    told.check("attempt", 2, 2);
    told.check("completion", "accepted", "refused");
    told.check("attempt", 3, 3);
    assert_eq!(
        told.text(),
        "attempt: 2\ncompletion: accepted (must be refused)\nattempt: 3\nassertions: FAIL"
    );
}
