//! What was typed. By hand, because an argument parser would be most of this crate's build.
//!
//! Anything not understood is a usage error (exit 2) that names it and shows the usage of that command.

use crate::error::{Error, Result};
use crate::stack::Flavour;

pub(crate) const USAGE: &str = "\
usage: cargo xtask COMMAND

  up [--postgres debian|embedded]  bring Postgres and Kafka up, or reuse those that are up;
                                   --postgres starts natively, with the distribution's server
                                   or with PostgreSQL 18 by Maven
  down [--wipe]                    end what `up` started; --wipe deletes its data as well
  env                              print both addresses, for: eval \"$(cargo xtask env)\"
  demo [--keep]                    tell the whole story on real servers: orders flow, a relay is
                                   killed, nothing is lost or doubled; --keep leaves it running
  test [FILTER...]                 bring the stack up and pass every check, and every test whose
                                   name contains one of the filters
  bench [NAME] [--check] [--quick] measure beside the limit: drain, latency, held_xmin, backlog,
                                   payloads, takeover, idle, enqueue_tax, inbox, sick_key; without
                                   a name all; --check fails below the recorded bar; --quick takes a minute

DATABASE_URL and KAFKA_BROKERS, both set, are used instead of a stack of our own.
BATON_STACK_DIR says where that lies (target/stack).";

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Task {
    Help,
    Up {
        postgres: Option<Flavour>,
    },
    Down {
        wipe: bool,
    },
    Env,
    Demo {
        keep: bool,
    },
    Test {
        filter: Vec<String>,
    },
    /// What `baton-bench` is told.
    Bench {
        args: Vec<String>,
    },
}

/// What `baton-bench` can measure.
const BENCHES: [&str; 10] = [
    "drain",
    "latency",
    "held_xmin",
    "backlog",
    "payloads",
    "takeover",
    "idle",
    "enqueue_tax",
    "inbox",
    "sick_key",
];

/// Understands the arguments after the program's name.
pub(crate) fn parse(args: impl IntoIterator<Item = String>) -> Result<Task> {
    let mut args = args.into_iter();
    let Some(command) = args.next() else {
        return Err(Error::Usage(format!("a command is missing\n\n{USAGE}")));
    };
    // `--name=value` and `--name value` alike.
    let rest = args.flat_map(|arg| match arg.split_once('=') {
        Some((name, value)) if name.starts_with("--") => vec![name.to_owned(), value.to_owned()],
        _ => vec![arg],
    });
    let rest: Vec<String> = rest.collect();
    let rest: Vec<&str> = rest.iter().map(String::as_str).collect();
    match (command.as_str(), rest.as_slice()) {
        ("help" | "--help" | "-h", _) | (_, ["--help" | "-h"]) => Ok(Task::Help),
        ("up", []) => Ok(Task::Up { postgres: None }),
        ("up", ["--postgres", "debian"]) => Ok(Task::Up { postgres: Some(Flavour::Debian) }),
        ("up", ["--postgres", "embedded"]) => Ok(Task::Up { postgres: Some(Flavour::Embedded) }),
        ("down", []) => Ok(Task::Down { wipe: false }),
        ("down", ["--wipe"]) => Ok(Task::Down { wipe: true }),
        ("env", []) => Ok(Task::Env),
        ("demo", []) => Ok(Task::Demo { keep: false }),
        ("demo", ["--keep"]) => Ok(Task::Demo { keep: true }),
        ("test", filter) if !filter.iter().any(|name| name.starts_with('-')) => {
            Ok(Task::Test { filter: filter.iter().map(|name| (*name).to_owned()).collect() })
        }
        ("bench", args) if is_bench(args) => {
            Ok(Task::Bench { args: args.iter().map(|arg| (*arg).to_owned()).collect() })
        }
        ("up" | "down" | "env" | "demo" | "test" | "bench", rest) => {
            Err(Error::Usage(format!("{command} does not take {}\n\n{USAGE}", rest.join(" "))))
        }
        _ => Err(Error::Usage(format!("there is no command {command}\n\n{USAGE}"))),
    }
}

/// At most one name, and each flag once.
fn is_bench(args: &[&str]) -> bool {
    let (flags, names): (Vec<&str>, Vec<&str>) = args.iter().partition(|arg| arg.starts_with('-'));
    let known = flags.iter().all(|flag| matches!(*flag, "--check" | "--quick"));
    let once = flags.iter().enumerate().all(|(n, flag)| flags.iter().skip(n + 1).all(|later| later != flag));
    known && once && names.len() <= 1 && names.iter().all(|name| BENCHES.contains(name))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parsed(line: &str) -> Result<Task> {
        parse(line.split_whitespace().map(str::to_owned))
    }

    #[test]
    fn both_spellings_of_a_value_are_understood() {
        for line in ["up --postgres embedded", "up --postgres=embedded"] {
            assert_eq!(parsed(line).unwrap(), Task::Up { postgres: Some(Flavour::Embedded) }, "{line}");
        }
    }

    #[test]
    fn filters_are_kept_in_order() {
        let filter = vec!["one".to_owned(), "two".to_owned()];
        assert_eq!(parsed("test one two").unwrap(), Task::Test { filter });
        assert_eq!(parsed("test").unwrap(), Task::Test { filter: Vec::new() });
    }

    #[test]
    fn a_benchmark_gets_its_flags_in_any_order() {
        for line in ["bench", "bench drain", "bench --check drain", "bench held_xmin --quick --check"] {
            let args = line.split_whitespace().skip(1).map(str::to_owned).collect();
            assert_eq!(parsed(line).unwrap(), Task::Bench { args }, "{line}");
        }
    }

    #[test]
    fn help_is_found_everywhere() {
        for line in ["help", "--help", "-h", "up --help", "test -h"] {
            assert_eq!(parsed(line).unwrap(), Task::Help, "{line}");
        }
    }

    #[test]
    fn what_is_not_understood_is_named_in_a_usage_error() {
        for (line, named) in [
            ("", "missing"),
            ("upp", "upp"),
            ("up --postgres oracle", "oracle"),
            ("up now", "now"),
            ("down --all", "--all"),
            ("env x", "x"),
            ("test --nocapture", "--nocapture"),
            ("bench dran", "dran"),
            ("bench drain idle", "drain idle"),
            ("bench --check --check", "--check"),
            ("bench --full", "--full"),
        ] {
            let error = parsed(line).unwrap_err();
            assert_eq!(error.exit_code(), 2, "{line}");
            assert!(error.to_string().lines().next().unwrap().contains(named), "{line}: {error}");
        }
    }
}
