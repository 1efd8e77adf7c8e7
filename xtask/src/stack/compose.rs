//! The stack by `docker compose`, where an engine answers.
//!
//! `down` may only end what `up` started: services that ran before `up` are used and left alone, which the
//! record remembers as not owned.

use std::env;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use super::Stack;
use super::wait::{self, Deadline};
use crate::command;
use crate::error::{Error, Result};

const SERVICES: [&str; 2] = ["kafka", "postgres"];

/// Whether the compose plugin is there: it checks files without an engine.
pub(crate) fn has_plugin() -> bool {
    command::succeeds("docker", &["compose", "version"])
}

/// Whether an engine answers and the compose plugin is there.
pub(crate) fn is_available() -> bool {
    command::succeeds("docker", &["info"]) && has_plugin()
}

/// Brings both services up and waits until they are healthy and answer at `stack`.
pub(crate) fn up(root: &Path, stack: &Stack) -> Result<()> {
    let mut up = compose(root);
    command::watched(up.args(["up", "--detach", "--wait"])).map_err(|error| {
        Error::failed(format!(
            "{error}\nsee `docker compose logs`, or start natively: cargo xtask up --postgres debian|embedded"
        ))
    })?;
    let deadline = Deadline::after(Duration::from_secs(60));
    while let Err(error) = stack.answers() {
        if deadline.passed() {
            return Err(Error::failed(format!("docker compose says that all is up, but {error}")));
        }
        wait::briefly();
    }
    crate::say!("postgres and kafka are up by docker compose");
    Ok(())
}

pub(crate) fn down(root: &Path, wipe: bool) -> Result<()> {
    let mut down = compose(root);
    down.arg("down");
    if wipe {
        down.arg("--volumes");
    }
    command::watched(&mut down)?;
    crate::say!("docker compose is down");
    Ok(())
}

/// Whether both services run.
pub(crate) fn running(root: &Path) -> Result<bool> {
    let mut ps = compose(root);
    let output = command::quiet(ps.args(["ps", "--services", "--status", "running"]))?;
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    Ok(SERVICES.iter().all(|service| text.lines().any(|line| line == *service)))
}

fn compose(root: &Path) -> Command {
    let mut command = Command::new("docker");
    command.arg("compose").arg("--file").arg(root.join("docker-compose.yml"));
    command
}

/// What `docker-compose.yml` publishes, by the same variables.
pub(crate) fn addresses() -> Result<Stack> {
    let port = |name: &str, default: u16| match env::var(name) {
        Ok(value) if !value.is_empty() => {
            value.parse().map_err(|_| Error::Usage(format!("{name} is no port: {value:?}")))
        }
        _ => Ok(default),
    };
    let (postgres, kafka) = (port("BATON_POSTGRES_PORT", 55432)?, port("BATON_KAFKA_PORT", 59092)?);
    Ok(Stack {
        database_url: super::postgres::url(postgres),
        kafka_brokers: format!("127.0.0.1:{kafka}"),
        ours: true,
    })
}
