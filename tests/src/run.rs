//! How a test runs: by itself or among others, with a hard time-out, and with everything cleared up at its end.
//!
//! ```text
//! gate (not timed) ─▶ body, at most `limit` ─▶ its children die with it ─▶ databases, topics, outputs go
//!                          └ at limit + 30 s, should even that hang: names, exit(101), the guard kills what is left
//! ```
//!
//! A body that panics, fails or runs out of time is reported with what it waited for and with the end of each child's
//! output.

use std::any::{Any, type_name_of_val};
use std::io::Write;
use std::panic::{AssertUnwindSafe, resume_unwind};
use std::pin::pin;
use std::sync::mpsc::{self, RecvTimeoutError, Sender};
use std::time::Duration;

use futures_util::FutureExt;
use tokio::sync::RwLock;
use tokio::time::timeout;

use crate::failure::Outcome;
use crate::harness::Harness;
use crate::wait::{WAITS, Waits};

/// What clearing up may take before the watchdog ends the whole test program.
const GRACE: Duration = Duration::from_secs(30);

/// Beside what a test may run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Load {
    /// Beside others.
    Light,
    /// Alone: it loads the machine or measures something.
    Alone,
}

static GATE: RwLock<()> = RwLock::const_new(());

/// Runs `body` as a test that ends within `limit`.
///
/// # Panics
///
/// When the body fails, panics or runs out of time: that is how a test is red.
pub fn test<B>(limit: Duration, load: Load, body: B)
where
    B: AsyncFnOnce(&mut Harness) -> Outcome,
{
    let name = test_name(type_name_of_val(&body));
    let runtime = match tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build() {
        Ok(runtime) => runtime,
        Err(error) => panic!("no runtime for {name}: {error}"),
    };
    let red = runtime.block_on(async {
        let (_beside, _alone) = match load {
            Load::Light => (Some(GATE.read().await), None),
            Load::Alone => (None, Some(GATE.write().await)),
        };
        run(&name, limit, body).await
    });
    // A blocking call into a client library may be under way; it must not keep the next test waiting.
    runtime.shutdown_timeout(Duration::from_secs(2));
    match red {
        None => {}
        Some(Red::Failed(words)) => panic!("{name}: {words}"),
        // It has been printed where it happened.
        Some(Red::Panicked(panic)) => resume_unwind(panic),
    }
}

/// A line that is seen even when the test passes: the figure of something that must be shown.
pub fn figure(line: &str) {
    // The handle itself, because the test runner catches what goes through `eprintln!`.
    writeln!(std::io::stderr().lock(), "figure: {line}").ok();
}

/// Why a test is red.
enum Red {
    Failed(String),
    Panicked(Box<dyn Any + Send>),
}

async fn run<B>(name: &str, limit: Duration, body: B) -> Option<Red>
where
    B: AsyncFnOnce(&mut Harness) -> Outcome,
{
    let mut harness = match Harness::start(name) {
        Ok(harness) => harness,
        Err(failure) => return Some(Red::Failed(failure.to_string())),
    };
    let waits = Waits::default();
    let _watchdog = Watchdog::start(name.to_owned(), limit + GRACE, waits.clone());
    let red = WAITS
        .scope(waits.clone(), async {
            let mut body = pin!(AssertUnwindSafe(body(&mut harness)).catch_unwind());
            match timeout(limit, body.as_mut()).await {
                Ok(Ok(Ok(()))) => None,
                Ok(Ok(Err(failure))) => Some(Red::Failed(failure.to_string())),
                Ok(Err(panic)) => Some(Red::Panicked(panic)),
                Err(_) => Some(Red::Failed(format!("ran out of its {limit:?}; {}", waits.show()))),
            }
        })
        .await;
    if red.is_some() {
        eprintln!("{}", harness.outputs());
    }
    harness.clear_up(red.is_some()).await;
    red
}

/// `e2e::relay::name_of_the_test::{{closure}}` without the crate and without the closure.
fn test_name(closure: &str) -> String {
    let path = closure.split("::{{closure}}").next().unwrap_or(closure);
    path.split_once("::").map_or(path, |(_, path)| path).to_owned()
}

/// Ends the program when a test does not even end by being dropped: a blocked thread, a hanging destructor.
struct Watchdog {
    _alive: Sender<()>,
}

impl Watchdog {
    fn start(name: String, limit: Duration, waits: Waits) -> Self {
        let (alive, end) = mpsc::channel();
        std::thread::spawn(move || {
            if end.recv_timeout(limit) == Err(RecvTimeoutError::Timeout) {
                let mut stderr = std::io::stderr().lock();
                writeln!(stderr, "{name} hangs and cannot be ended; {}", waits.show()).ok();
                std::process::exit(101);
            }
        });
        Self { _alive: alive }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{eventually, fail};

    #[test]
    fn a_test_is_named_after_the_function_it_is_in() {
        let body = async |_: &mut Harness| -> Outcome { Ok(()) };
        assert_eq!(
            test_name(type_name_of_val(&body)),
            "run::tests::a_test_is_named_after_the_function_it_is_in"
        );
    }

    fn panic_text(panic: &(dyn Any + Send)) -> String {
        let text = panic.downcast_ref::<String>().map(String::as_str);
        text.or_else(|| panic.downcast_ref::<&str>().copied()).unwrap_or("panicked").to_owned()
    }

    fn red(limit: Duration, body: impl AsyncFnOnce(&mut Harness) -> Outcome) -> String {
        let panic =
            std::panic::catch_unwind(AssertUnwindSafe(|| test(limit, Load::Light, body))).unwrap_err();
        panic_text(&*panic)
    }

    #[test]
    fn a_body_that_runs_out_of_time_is_red_with_what_it_waited_for() {
        let text = red(Duration::from_millis(200), async |_| {
            eventually("godot", Duration::from_secs(60), async || -> Outcome { fail!("nobody") }).await
        });
        assert!(text.contains("ran out of its 200ms; it has waited 0.2 s for godot"), "{text}");
    }

    #[test]
    fn a_body_that_fails_or_panics_is_red_with_its_own_words() {
        let second = Duration::from_secs(10);
        assert!(red(second, async |_| -> Outcome { fail!("no {}", 1) }).contains("no 1"));
        assert!(red(second, async |_| -> Outcome { panic!("no {}", 2) }).contains("no 2"));
    }

    #[test]
    fn children_of_a_body_that_panics_are_killed() {
        let mut id = 0;
        let text = red(Duration::from_secs(10), async |harness| {
            let child = crate::Launch::new("sleep", harness.directory(), "sleep").arg("63").start()?;
            id = child.id();
            panic!("on purpose")
        });
        assert!(text.contains("on purpose"), "{text}");
        test(Duration::from_secs(10), Load::Light, async |_| {
            eventually("its death", Duration::from_secs(5), async || {
                let state = std::fs::read_to_string(format!("/proc/{id}/stat")).unwrap_or_default();
                if state.is_empty() || state.contains(") Z") { Ok(()) } else { fail!("{state}") }
            })
            .await
        });
    }
}
