//! The stack without docker: both servers as processes of this machine, on free loopback ports.
//!
//! ```text
//! record ─▶ running? ─ both answer ─────────────────────────────▶ reused
//!              └─ else ─▶ tools, files, ports, configuration ─▶ both started at once ─▶ record
//! ```
//!
//! A dead half is started again with its data and, where it is still free, on its port; a living half is
//! left alone. The record is written before anything starts, so that `down` finds what an interrupted `up`
//! has begun.

use std::fs;
use std::path::{Path, PathBuf};
use std::thread;

use super::files;
use super::process::{self, Signal};
use super::record::{Record, Way};
use super::service::{self, Outcome, Service};
use super::wait::Stopwatch;
use super::{Flavour, Stack, kafka, ports, postgres};
use crate::error::{Error, Result};
use crate::tools;

pub(crate) fn up(stack: &Path, wanted: Option<Flavour>) -> Result<Stack> {
    if !cfg!(target_os = "linux") {
        return Err(Error::failed(
            "the native stack needs Linux: start a docker engine, or set DATABASE_URL and KAFKA_BROKERS",
        ));
    }
    let watch = Stopwatch::start();
    let mut record = Record::load(stack)?.map_or_else(|| fresh(stack), Ok)?;
    let postgres_runs = service::runs(&postgres::mark(&record));
    let kafka_runs = service::runs(&kafka::mark(&record));
    if let Some(flavour) = wanted
        && postgres_runs
        && !postgres::is_flavour(&record.postgres, flavour)
    {
        return Err(Error::failed(format!(
            "the stack is up with {}: run `cargo xtask down` first, or give another BATON_STACK_DIR",
            record.postgres
        )));
    }
    if postgres_runs && kafka_runs && Stack::of(&record).answers().is_ok() {
        crate::say!("postgres ({}) is already up at 127.0.0.1:{}", record.postgres, record.postgres_port);
        crate::say!("kafka is already up at {}", record.kafka_brokers);
        return Ok(Stack::of(&record));
    }
    if !postgres_runs {
        // Children that outlive a killed postmaster may hold its port.
        let orphans = || service::find(&postgres::mark(&record), Some(&postgres::children(&record)));
        process::end(orphans, Signal::Kill, postgres::STOP.1)?;
        postgres::choose(&mut record, wanted)?;
    }
    // All at once: each call of apt-get takes its time.
    let mut needs = kafka::needs(stack);
    needs.extend(postgres::needs(stack, &record));
    tools::ensure(&needs)?;
    choose_ports(stack, &mut record, postgres_runs, kafka_runs)?;
    record.way = Way::Native;
    let logs = stack.join("logs");
    fs::create_dir_all(&logs).map_err(Error::io("create", &logs))?;

    // Preparing decides where Postgres lives, so it comes before the record; starting comes after.
    let postgres = postgres::prepare(stack, &mut record)?;
    record.save(stack)?;
    let kafka = kafka::prepare(stack, &record)?;
    let (postgres_came, kafka_came) = thread::scope(|scope| {
        let kafka = scope.spawn(|| report(&kafka, watch));
        (report(&postgres, watch), kafka.join())
    });
    let kafka_came = kafka_came.unwrap_or_else(|_| Err(Error::failed("starting kafka panicked")));
    match (postgres_came, kafka_came) {
        (Ok(()), Ok(())) => Ok(Stack::of(&record)),
        (Err(error), Ok(())) | (Ok(()), Err(error)) => Err(error),
        (Err(first), Err(second)) => Err(Error::failed(format!("{first}\n{second}"))),
    }
}

fn report(service: &Service, watch: Stopwatch) -> Result<()> {
    let how = match service.ensure()? {
        Outcome::Reused => "is already up",
        Outcome::Started => "is up",
    };
    crate::say!("{} {how} at {} ({:.1} s)", service.name, service.address, watch.seconds());
    Ok(())
}

/// Ends what runs with the record's mark.
pub(crate) fn down(record: &Record) -> Result<()> {
    let (kafka, postgres, children) =
        (kafka::mark(record), postgres::mark(record), postgres::children(record));
    for (name, mark, children, (signal, patience)) in [
        ("kafka", kafka.as_str(), None, kafka::STOP),
        ("postgres", postgres.as_str(), Some(children.as_str()), postgres::STOP),
    ] {
        if service::find(mark, children).is_empty() {
            crate::say!("{name} was not up");
            continue;
        }
        process::end(|| service::find(mark, None), signal, patience)?;
        // Children of a server that was killed; those of one that shut down are gone before it.
        process::end(|| service::find(mark, children), Signal::Kill, patience)?;
        crate::say!("{name} is down");
    }
    Ok(())
}

/// Deletes the data, not what Maven brought.
pub(crate) fn wipe(stack: &Path, record: &Record) -> Result<()> {
    for dir in [&stack.join("kafka"), &stack.join("logs"), &record.postgres_home] {
        if dir.as_os_str().is_empty() {
            continue;
        }
        files::remove_tree(dir)?;
    }
    let path = stack.join("record");
    fs::remove_file(&path).map_err(Error::io("remove", &path))
}

/// Whether at least one server of the record runs.
pub(crate) fn runs_in_part(record: &Record) -> bool {
    service::runs(&postgres::mark(record)) || service::runs(&kafka::mark(record))
}

/// Whether both servers of the record run.
pub(crate) fn is_up(record: &Record) -> bool {
    service::runs(&postgres::mark(record)) && service::runs(&kafka::mark(record))
}

pub(crate) fn fresh(stack: &Path) -> Result<Record> {
    let source = Path::new("/proc/sys/kernel/random/uuid");
    let mark = fs::read_to_string(source).map_err(Error::io("read", source))?.trim().to_owned();
    let mut record = Record {
        way: Way::Native,
        database_url: String::new(),
        kafka_brokers: String::new(),
        mark,
        postgres: String::new(),
        postgres_home: PathBuf::new(),
        postgres_port: 0,
        kafka_port: 0,
        controller_port: 0,
        proxied_port: 0,
        proxy_port: 0,
    };
    choose_ports(stack, &mut record, false, false)?;
    Ok(record)
}

/// Keeps the ports of what runs and those that are free; chooses others for the rest.
fn choose_ports(stack: &Path, record: &mut Record, postgres_runs: bool, kafka_runs: bool) -> Result<()> {
    let free = |port: u16| port != 0 && ports::becomes_free(port);
    let keep_postgres = postgres_runs || free(record.postgres_port);
    // The port for a proxy is not asked for: a test's proxy may be listening on it.
    let keep_kafka =
        kafka_runs || [record.kafka_port, record.controller_port, record.proxied_port].into_iter().all(free);
    if !keep_postgres || !keep_kafka {
        let [first, second, third, fourth, fifth] = ports::choose(
            files::digest(&stack.display().to_string()),
            // Kept but not listened on yet, these would look free.
            &[record.postgres_port, record.kafka_port, record.controller_port, record.proxied_port],
        )?;
        if !keep_postgres {
            record.postgres_port = first;
        }
        if !keep_kafka {
            (record.kafka_port, record.controller_port) = (second, third);
            (record.proxied_port, record.proxy_port) = (fourth, fifth);
        }
    }
    record.database_url = postgres::url(record.postgres_port);
    record.kafka_brokers = format!("127.0.0.1:{}", record.kafka_port);
    Ok(())
}

/// A template with each `{name}` replaced.
pub(crate) fn fill(template: &str, values: &[(&str, &str)]) -> String {
    values.iter().fold(template.to_owned(), |text, (name, value)| text.replace(&format!("{{{name}}}"), value))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_template_is_filled_in_everywhere() {
        assert_eq!(fill("{a}-{b}-{a}", &[("a", "1"), ("b", "2")]), "1-2-1");
    }
}
