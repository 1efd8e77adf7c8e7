//! Who uses how much of the machine, by `/proc`.
//!
//! * A process: its user and system time so far, its resident memory now and at most.
//! * Postgres: the postmaster (parent of the backend we talk to), its children that live, and those it has reaped.
//! * The broker: whoever listens on the port of the first of `KAFKA_BROKERS`.
//!
//! A server on another machine or in a container cannot be seen: then there is no figure, and the reason is told. Postgres
//! and the broker are counted as a whole, so whatever else uses them meanwhile counts too.

use std::collections::HashMap;
use std::fs;

use sqlx::PgConnection;

use crate::lab::Result;

/// `utime` and its like count in these, on every Linux that matters here.
const TICKS_PER_SECOND: f64 = 100.0;

/// Resident memory of a process, in bytes.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Memory {
    pub(crate) now: f64,
    /// The most since it started.
    pub(crate) peak: f64,
}

struct Stat {
    parent: u32,
    own: f64,
    /// Of children that ended and were waited for.
    reaped: f64,
}

fn stat(pid: u32) -> Option<Stat> {
    let text = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // The name in parentheses may hold anything; the state follows it.
    let fields: Vec<&str> = text.rsplit_once(')')?.1.split_whitespace().collect();
    let ticks = |n: usize| fields.get(n)?.parse::<f64>().ok();
    Some(Stat {
        parent: fields.get(1)?.parse().ok()?,
        own: (ticks(11)? + ticks(12)?) / TICKS_PER_SECOND,
        reaped: (ticks(13)? + ticks(14)?) / TICKS_PER_SECOND,
    })
}

/// User and system seconds of a process so far, without its children.
pub(crate) fn cpu_seconds(pid: u32) -> Result<f64> {
    Ok(stat(pid).ok_or_else(|| format!("process {pid} is gone"))?.own)
}

/// The same in nanoseconds' resolution, by the scheduler's own count; of threads that live.
pub(crate) fn fine_cpu_seconds(pid: u32) -> Result<f64> {
    let mut nanoseconds = 0.0;
    for thread in fs::read_dir(format!("/proc/{pid}/task"))? {
        let text = fs::read_to_string(thread?.path().join("schedstat"))?;
        nanoseconds += text.split_whitespace().next().ok_or("an empty schedstat")?.parse::<f64>()?;
    }
    Ok(nanoseconds / 1e9)
}

pub(crate) fn memory(pid: u32) -> Result<Memory> {
    let status = fs::read_to_string(format!("/proc/{pid}/status"))?;
    let bytes = |name: &str| -> Result<f64> {
        let line = status.lines().find_map(|line| line.strip_prefix(name));
        let kib = line.and_then(|rest| rest.split_whitespace().next()).ok_or_else(|| format!("no {name}"))?;
        Ok(kib.parse::<f64>()? * 1024.0)
    };
    Ok(Memory { now: bytes("VmRSS:")?, peak: bytes("VmHWM:")? })
}

/// The two servers, where they can be seen.
#[derive(Debug)]
pub(crate) struct Servers {
    postmaster: Option<u32>,
    broker: Option<u32>,
    /// Why one of them cannot be seen.
    pub(crate) unseen: Vec<String>,
}

/// CPU seconds since some moment.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct ServerCpu {
    pub(crate) postgres: Option<f64>,
    pub(crate) broker: Option<f64>,
}

impl Servers {
    pub(crate) async fn find(admin: &mut PgConnection, brokers: &str) -> Result<Self> {
        let mut unseen = Vec::new();
        let postmaster = postmaster(admin).await?;
        if postmaster.is_none() {
            unseen.push("Postgres is no process of this machine: its CPU is n/a".to_owned());
        }
        let broker = broker(brokers);
        if broker.is_none() {
            unseen.push("no process of this machine listens on the broker's port: its CPU is n/a".to_owned());
        }
        Ok(Self { postmaster, broker, unseen })
    }

    /// CPU seconds since each was started.
    pub(crate) fn cpu(&self) -> ServerCpu {
        ServerCpu {
            postgres: self.postmaster.and_then(family_cpu),
            broker: self.broker.and_then(|pid| stat(pid).map(|stat| stat.own)),
        }
    }
}

impl ServerCpu {
    pub(crate) fn since(self, earlier: Self) -> Self {
        let minus = |a: Option<f64>, b: Option<f64>| a.zip(b).map(|(a, b)| a - b);
        Self { postgres: minus(self.postgres, earlier.postgres), broker: minus(self.broker, earlier.broker) }
    }
}

/// The parent of our backend, if that is a process here: its title must name our connection's port.
async fn postmaster(admin: &mut PgConnection) -> Result<Option<u32>> {
    let (pid, port): (i32, Option<i32>) =
        sqlx::query_as("SELECT pg_backend_pid(), inet_client_port()").fetch_one(admin).await?;
    let pid = u32::try_from(pid)?;
    let title = fs::read_to_string(format!("/proc/{pid}/cmdline")).unwrap_or_default();
    let ours = title.contains("postgres") && port.is_some_and(|port| title.contains(&format!("({port})")));
    Ok(stat(pid).filter(|_| ours).map(|stat| stat.parent))
}

fn family_cpu(head: u32) -> Option<f64> {
    let own = stat(head)?;
    let children = processes().filter_map(stat).filter(|child| child.parent == head);
    Some(own.own + own.reaped + children.map(|child| child.own).sum::<f64>())
}

fn processes() -> impl Iterator<Item = u32> {
    let entries = fs::read_dir("/proc").into_iter().flatten().flatten();
    entries.filter_map(|entry| entry.file_name().to_str()?.parse().ok())
}

/// Who listens on the port of the first address.
fn broker(brokers: &str) -> Option<u32> {
    let first = brokers.split(',').next()?.trim();
    let (host, port) = first.rsplit_once(':')?;
    if !["127.0.0.1", "localhost", "[::1]"].contains(&host) {
        return None;
    }
    let inode = listening().remove(&port.parse().ok()?)?;
    let wanted = format!("socket:[{inode}]");
    processes().find(|pid| {
        let descriptors = fs::read_dir(format!("/proc/{pid}/fd")).into_iter().flatten().flatten();
        descriptors.filter_map(|fd| fs::read_link(fd.path()).ok()).any(|link| link.to_str() == Some(&wanted))
    })
}

/// Listening ports and their sockets' inodes.
fn listening() -> HashMap<u16, u64> {
    const LISTEN: &str = "0A";
    let tables =
        ["/proc/net/tcp", "/proc/net/tcp6"].map(|table| fs::read_to_string(table).unwrap_or_default());
    let row = |line: &str| {
        let fields: Vec<&str> = line.split_whitespace().collect();
        let (_, port) = fields.get(1)?.rsplit_once(':')?;
        if *fields.get(3)? != LISTEN {
            return None;
        }
        Some((u16::from_str_radix(port, 16).ok()?, fields.get(9)?.parse().ok()?))
    };
    tables.iter().flat_map(|table| table.lines().skip(1).filter_map(row)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn this_process_has_used_the_machine() {
        let pid = std::process::id();
        let memory = memory(pid).unwrap();
        assert!(memory.now > 0.0 && memory.peak >= memory.now);
        assert!(cpu_seconds(pid).unwrap() >= 0.0);
    }

    #[test]
    fn a_listener_is_found_by_its_port_and_nobody_by_another() {
        let socket = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let address = socket.local_addr().unwrap().to_string();
        assert_eq!(broker(&address), Some(std::process::id()));
        drop(socket);
        assert_eq!(broker(&address), None);
    }
}
