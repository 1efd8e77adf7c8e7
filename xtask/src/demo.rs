//! `cargo xtask demo`: the whole story on the real Postgres and the real Kafka, one line a step.
//!
//! ```text
//! stack ▶ build ▶ set up ▶ two relays, a consumer ▶ orders flow ▶ SIGKILL one relay ▶ the other takes over
//!       ▶ a relay comes back ▶ SIGKILL the consumer ▶ drain ▶ check: nothing lost, invented, doubled, reordered
//! ```
//!
//! Every child is killed when this ends, however it ends, unless `--keep` leaves the last ones running. Their output is
//! in `demo/` beside the stack; a step that fails shows the end of it.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use serde_json::Value;

use crate::error::{Error, Result};
use crate::paths::Paths;
use crate::stack::{self, Deadline, Stack, Stopwatch, briefly};
use crate::{check, command, tools};

/// Short leases, so that a takeover can be watched. The default is 10 s.
const LEASE: &str = "3s";

/// Orders placed, and how many of them a second.
const ORDERS: &str = "5000";
const RATE: &str = "200/s";

/// # Errors
///
/// When a step fails, or the check finds anything but nothing.
pub(crate) fn demo(paths: &Paths, keep: bool) -> Result<()> {
    let watch = Stopwatch::start();
    tools::ensure(tools::BUILD)?;
    tell("bringing Postgres and Kafka up, or using those that are");
    let stack = stack::ensure(paths, None)?;
    tell("building (the first time this takes minutes)");
    check::build_programs(paths)?;
    let mut stage = Stage::new(paths, stack)?;
    story(&mut stage)?;
    if keep {
        stage.leave_running();
    }
    tell(&format!("that took {:.0} s", watch.seconds()));
    Ok(())
}

fn story(stage: &mut Stage) -> Result<()> {
    tell("setting up: migrations for outbox and inbox, the tables and topics of the orders service");
    // On servers of our own the demo starts afresh; on given ones nothing of anybody's is dropped.
    stage.run("orders", if stage.stack.ours { &["setup", "--fresh"] } else { &["setup"] })?;

    tell("starting two relays, which share the 8 shards by leases, and the consumer that bills orders");
    stage.start_relay("relay-a")?;
    stage.start_relay("relay-b")?;
    stage.start("bill", "orders", &["bill"], &[])?;
    stage.wait_for("both relays to hold shards", 30, |s| s.holders() == ["relay-a", "relay-b"])?;
    tell(&stage.status()?.shares());
    tell(&format!(
        "they show themselves, as long as they run: relay-a at {}, relay-b at {}",
        stage.address("relay-a")?,
        stage.address("relay-b")?
    ));

    tell(&format!(
        "placing {ORDERS} orders at {RATE}, each in one transaction with its message; 1 in 500 is poison, 1 in 50 fails twice"
    ));
    stage.start(
        "place",
        "orders",
        &[
            "place",
            "--count",
            ORDERS,
            "--rate",
            RATE,
            "--keys",
            "200",
            "--writers",
            "8",
            "--poison",
            "0.002",
            "--flaky",
            "0.02",
        ],
        &[],
    )?;
    stage.wait_for("orders to flow", 30, |s| s.lowest_position() > 300)?;

    tell("SIGKILL for relay-a, in the middle of it: no clean-up code runs");
    stage.kill("relay-a")?;
    let watch = Stopwatch::start();
    stage.wait_for("relay-b to take over", 30, |s| s.holders() == ["relay-b"])?;
    tell(&format!(
        "relay-b holds all shards {:.1} s later (leases last {LEASE}): {}",
        watch.seconds(),
        stage.status()?.generations()
    ));

    tell(
        "starting relay-a again: it gets its share back by a hand-over, without waiting for a lease to run out",
    );
    stage.start_relay("relay-a")?;
    stage.wait_for("relay-a to hold its share", 30, |s| s.holders() == ["relay-a", "relay-b"])?;
    tell(&stage.status()?.shares());

    tell("SIGKILL for the consumer, and another one in its place");
    stage.kill("bill")?;
    stage.start("bill", "orders", &["bill"], &[])?;

    tell("waiting for the last order");
    stage.wait_until_ended("place", 120)?;
    tell("waiting until everything committed is published");
    stage.run("baton", &["relay", "--until-empty"])?;
    tell(
        "comparing what was placed, what is on the topic, what was billed and what is in the dead-letter topic",
    );
    stage.run("orders", &["check", "--wait", "60"])
}

fn tell(line: &str) {
    println!("demo: {line}");
}

/// The running programs of a demo.
struct Stage {
    bin: PathBuf,
    logs: PathBuf,
    stack: Stack,
    children: Vec<(String, Child)>,
}

impl Stage {
    fn new(paths: &Paths, stack: Stack) -> Result<Self> {
        let logs = paths.stack.parent().unwrap_or(&paths.stack).join("demo");
        fs::create_dir_all(&logs).map_err(Error::io("create", &logs))?;
        Ok(Self { bin: paths.bin.clone(), logs, stack, children: Vec::new() })
    }

    fn command(&self, program: &str, args: &[&str]) -> Command {
        let mut command = Command::new(self.bin.join(program));
        command
            .args(args)
            .env("DATABASE_URL", &self.stack.database_url)
            .env("KAFKA_BROKERS", &self.stack.kafka_brokers)
            .env("BATON_LEASE__TTL", LEASE)
            .env_remove("BATON_STACK_DIR")
            .current_dir(&self.logs)
            .stdin(Stdio::null());
        command
    }

    /// Runs a program to its end; what it prints is part of the story.
    fn run(&self, program: &str, args: &[&str]) -> Result<()> {
        let shown = format!("{program} {}", args.join(" "));
        let status = self
            .command(program, args)
            .env("RUST_LOG", "warn")
            .status()
            .map_err(|source| Error::Io { what: format!("start {shown}"), source })?;
        if status.success() {
            return Ok(());
        }
        Err(Error::failed(format!("`{shown}` ended with {status}; the logs are in {}", self.logs.display())))
    }

    fn start_relay(&mut self, owner: &str) -> Result<()> {
        // Two relays on one host need two ports.
        let env = [("BATON_RELAY__OWNER", owner), ("BATON_HTTP__LISTEN", "127.0.0.1:0")];
        self.start(owner, "baton", &["relay"], &env)
    }

    /// Where a relay answers HTTP, as the last start in its log says.
    fn address(&self, name: &str) -> Result<String> {
        let log = self.log(name);
        let text = fs::read_to_string(&log).map_err(Error::io("read", &log))?;
        let named = text.rsplit_once("serves http://").and_then(|(_, rest)| rest.split_once('/'));
        let named = named.map(|(address, _)| format!("http://{address}/"));
        named.ok_or_else(|| Error::failed(format!("{} does not name an address", log.display())))
    }

    fn start(&mut self, name: &str, program: &str, args: &[&str], env: &[(&str, &str)]) -> Result<()> {
        let log = self.log(name);
        let out = File::options().create(true).append(true).open(&log).map_err(Error::io("open", &log))?;
        let err = out.try_clone().map_err(Error::io("open", &log))?;
        let child = self
            .command(program, args)
            .envs(env.iter().copied())
            .stdout(out)
            .stderr(err)
            .spawn()
            .map_err(|source| Error::Io { what: format!("start {program}"), source })?;
        self.children.push((name.to_owned(), child));
        Ok(())
    }

    fn log(&self, name: &str) -> PathBuf {
        self.logs.join(format!("{name}.log"))
    }

    /// SIGKILL.
    fn kill(&mut self, name: &str) -> Result<()> {
        let Some(index) = self.children.iter().position(|(n, _)| n == name) else { return Ok(()) };
        let (_, mut child) = self.children.remove(index);
        child
            .kill()
            .and_then(|()| child.wait())
            .map_err(|source| Error::Io { what: format!("kill {name}"), source })?;
        Ok(())
    }

    fn status(&self) -> Result<Status> {
        let output = command::quiet(&mut self.command("baton", &["status", "--json"]))?;
        serde_json::from_slice(&output.stdout)
            .map(Status)
            .map_err(|error| Error::failed(format!("`baton status --json` did not print json: {error}")))
    }

    fn wait_for(&mut self, what: &str, seconds: u64, reached: impl Fn(&Status) -> bool) -> Result<()> {
        let deadline = Deadline::after(Duration::from_secs(seconds));
        loop {
            let status = self.status()?;
            if reached(&status) {
                return Ok(());
            }
            self.all_alive()?;
            if deadline.passed() {
                return Err(Error::failed(format!(
                    "waited {seconds} s for {what}; {}; the logs are in {}",
                    status.shares(),
                    self.logs.display()
                )));
            }
            briefly();
        }
    }

    fn wait_until_ended(&mut self, name: &str, seconds: u64) -> Result<()> {
        let deadline = Deadline::after(Duration::from_secs(seconds));
        while self.children.iter().any(|(n, _)| n == name) {
            self.all_alive()?;
            if deadline.passed() {
                return Err(Error::failed(format!("{name} did not end within {seconds} s")));
            }
            briefly();
        }
        Ok(())
    }

    /// Takes out who has ended well; who has ended badly is an error with the end of its log.
    fn all_alive(&mut self) -> Result<()> {
        let mut index = 0;
        while let Some((name, child)) = self.children.get_mut(index) {
            match child.try_wait() {
                Ok(None) => index += 1,
                Ok(Some(status)) if status.success() => drop(self.children.remove(index)),
                Ok(Some(status)) => {
                    let name = name.clone();
                    return Err(Error::failed(format!(
                        "{name} ended with {status}:\n{}",
                        command::log_tail(&self.log(&name))
                    )));
                }
                Err(source) => return Err(Error::Io { what: format!("wait for {name}"), source }),
            }
        }
        Ok(())
    }

    fn leave_running(&mut self) {
        for relay in ["relay-a", "relay-b"] {
            if let Ok(address) = self.address(relay) {
                tell(&format!("{relay} shows itself at {address}"));
            }
        }
        for (name, child) in self.children.drain(..) {
            tell(&format!(
                "{name} goes on as process {}, its log is {}",
                child.id(),
                show(&self.logs, &name)
            ));
        }
        tell("look at it with: eval \"$(cargo xtask env)\"; target/debug/baton status");
    }
}

fn show(logs: &Path, name: &str) -> String {
    logs.join(format!("{name}.log")).display().to_string()
}

impl Drop for Stage {
    fn drop(&mut self) {
        for (_, child) in &mut self.children {
            // Gone already, or killed now: either way it is over.
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

/// What `baton status --json` says.
struct Status(Value);

impl Status {
    fn shards(&self) -> impl Iterator<Item = &Value> {
        self.0.get("shards").and_then(Value::as_array).into_iter().flatten()
    }

    /// Who holds every shard, each once, in order of name; a shard without a valid lease counts as `nobody`.
    fn holders(&self) -> Vec<&str> {
        let mut holders: Vec<&str> = self
            .shards()
            .map(|s| match (s["owner"].as_str(), s["lease_left_seconds"].as_f64()) {
                (Some(owner), Some(left)) if left > 0.0 => owner,
                _ => "nobody",
            })
            .collect();
        holders.sort_unstable();
        holders.dedup();
        holders
    }

    fn lowest_position(&self) -> i64 {
        self.shards().filter_map(|s| s["cursor"]["position"].as_i64()).min().unwrap_or(0)
    }

    fn shares(&self) -> String {
        let relays = self.0.get("relays").and_then(Value::as_array);
        let shares: Vec<String> = relays
            .into_iter()
            .flatten()
            .map(|r| format!("{} holds shards {}", r["owner"].as_str().unwrap_or("?"), r["shards"]))
            .collect();
        if shares.is_empty() { "no relay holds a shard".to_owned() } else { shares.join(", ") }
    }

    fn generations(&self) -> String {
        let generations: Vec<String> = self.shards().map(|s| s["generation"].to_string()).collect();
        format!("generations {}", generations.join(" "))
    }
}
