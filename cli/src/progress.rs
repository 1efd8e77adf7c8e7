//! How far a run is: a bar that is drawn anew on a terminal, a line now and then elsewhere. On stderr, so that a script has stdout for itself.

use std::io::{IsTerminal as _, Write as _};
use std::time::Duration;

use tokio::time::Instant;

const WIDTH: u64 = 30;
const LINE_EVERY: Duration = Duration::from_secs(5);

/// What a run shows of itself.
pub(crate) struct Progress {
    shown: Shown,
    total: u64,
    began: Instant,
    due: Instant,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Shown {
    Bar,
    Lines,
}

impl Progress {
    /// Of `total` items.
    pub(crate) fn new(total: u64) -> Self {
        let shown = if std::io::stderr().is_terminal() { Shown::Bar } else { Shown::Lines };
        let now = Instant::now();
        Self { shown, total, began: now, due: now + LINE_EVERY }
    }

    /// So many are sent in all, by whomever, `own` by this run.
    pub(crate) fn show(&mut self, sent: u64, own: u64) {
        let rate = own as f64 / self.began.elapsed().as_secs_f64().max(0.001);
        match self.shown {
            Shown::Bar => {
                eprint!("\r{}\x1b[K", bar(sent, self.total, rate));
                // A terminal that is gone shows nothing.
                drop(std::io::stderr().flush());
            }
            Shown::Lines if Instant::now() >= self.due => {
                self.due = Instant::now() + LINE_EVERY;
                eprintln!("{}", line(sent, self.total, rate));
            }
            Shown::Lines => {}
        }
    }

    /// The last word: the bar is left as it is.
    pub(crate) fn end(&self) {
        if self.shown == Shown::Bar {
            eprintln!();
        }
    }
}

fn bar(sent: u64, total: u64, rate: f64) -> String {
    let filled = (WIDTH * sent.min(total)).checked_div(total).unwrap_or(WIDTH);
    let bar: String = (0..WIDTH).map(|at| if at < filled { '█' } else { '░' }).collect();
    format!("{bar} {}", line(sent, total, rate))
}

fn line(sent: u64, total: u64, rate: f64) -> String {
    let left = total.saturating_sub(sent) as f64;
    let eta = if rate > 0.0 { format!(", about {:.0} s left", left / rate) } else { String::new() };
    format!("{sent} of {total} sent, {rate:.0}/s{}", if sent < total { eta.as_str() } else { "" })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_bar_is_as_full_as_its_plan_is_sent() {
        assert_eq!(bar(0, 0, 0.0).matches('█').count(), 30);
        assert_eq!(bar(250, 500, 10.0).matches('█').count(), 15);
        assert_eq!(line(250, 500, 10.0), "250 of 500 sent, 10/s, about 25 s left");
        assert_eq!(line(500, 500, 10.0), "500 of 500 sent, 10/s");
        assert_eq!(line(0, 500, 0.0), "0 of 500 sent, 0/s");
    }
}
