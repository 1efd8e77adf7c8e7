//! One Kafka node (KRaft, broker and controller in one process) on loopback.
//!
//! Its directory is formatted once; `formatted` is written after that and a directory without it is begun
//! anew, so an interrupted format is no state to know about. The configuration is written at each start.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use super::files::{self, Bundle};
use super::native::fill;
use super::probe;
use super::process::Signal;
use super::record::Record;
use super::service::Service;
use crate::command;
use crate::error::{Error, Result};
use crate::tools::{self, Need};

const BUNDLE: Bundle = Bundle {
    name: "kafka",
    pom: include_str!("../../kafka/pom.xml"),
    goal: "copy-dependencies",
    options: &[],
    megabytes: 55,
};
const SERVER: &str = include_str!("../../kafka/server.properties");
const LOGGING: &str = include_str!("../../kafka/log4j2.properties");
/// What makes it shut down in order, and how long that may take.
pub(crate) const STOP: (Signal, Duration) = (Signal::Terminate, Duration::from_secs(20));

pub(crate) fn mark(record: &Record) -> String {
    format!("-Dbaton.stack={}", record.mark)
}

/// What [`prepare`] takes from the machine.
pub(crate) fn needs(stack: &Path) -> Vec<Need> {
    let maven = files::is_missing(stack, BUNDLE).then_some(Need::Maven);
    [Need::Java].into_iter().chain(maven).collect()
}

/// Gets what the broker needs and writes its configuration; does not start it.
pub(crate) fn prepare(stack: &Path, record: &Record) -> Result<Service> {
    let java = tools::java()?;
    let jars = files::ensure(stack, BUNDLE)?;
    let classpath = format!("{}/*", jars.display());
    let home = stack.join("kafka");
    fs::create_dir_all(&home).map_err(Error::io("create", &home))?;
    let data = home.join("data");
    let server = home.join("server.properties");
    let logging = home.join("log4j2.properties");
    let log = stack.join("logs/kafka.log");
    write(
        &server,
        &fill(
            SERVER,
            &[
                ("port", &record.kafka_port.to_string()),
                ("controller_port", &record.controller_port.to_string()),
                ("proxied_port", &record.proxied_port.to_string()),
                ("proxy_port", &record.proxy_port.to_string()),
                ("data", &data.display().to_string()),
            ],
        ),
    )?;
    write(&logging, &fill(LOGGING, &[("log", &log.display().to_string())]))?;

    let formatted = home.join("formatted");
    if !formatted.exists() {
        files::remove_tree(&data)?;
        format(&java, &classpath, record, &server)?;
        write(&formatted, "")?;
    }
    let args = [
        "-Xms256m",
        "-Xmx1g",
        "-XX:+ExitOnOutOfMemoryError",
        "-Djava.awt.headless=true",
        &mark(record),
        &format!("-Dlog4j2.configurationFile={}", logging.display()),
        "-cp",
        &classpath,
        "kafka.Kafka",
        &server.display().to_string(),
    ]
    .map(str::to_owned);
    Ok(Service {
        name: "kafka 4.3.0".to_owned(),
        address: record.kafka_brokers.clone(),
        program: java,
        args: args.into(),
        mark: mark(record),
        children: None,
        account: None,
        log,
        probe: probe::kafka,
    })
}

fn format(java: &PathBuf, classpath: &str, record: &Record, server: &Path) -> Result<()> {
    // 16 bytes in URL-safe base64: hex digits are among its letters, and the last one may only be a few.
    let id: String = record.mark.chars().filter(char::is_ascii_hexdigit).take(21).chain(['A']).collect();
    let mut command = Command::new(java);
    command.args(["-cp", classpath, "kafka.tools.StorageTool", "format", "-t", &id, "-c"]).arg(server);
    command::quiet(&mut command).map(drop)
}

fn write(path: &Path, text: &str) -> Result<()> {
    fs::write(path, text).map_err(Error::io("write", path))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_configuration_says_what_the_tests_rely_on() {
        let values = [
            ("port", "1"),
            ("controller_port", "2"),
            ("proxied_port", "3"),
            ("proxy_port", "4"),
            ("data", "/d"),
        ];
        let text = fill(SERVER, &values);
        for line in [
            "auto.create.topics.enable=false",
            "advertised.listeners=PLAINTEXT://127.0.0.1:1,PROXIED://127.0.0.1:4",
            "controller.quorum.voters=1@127.0.0.1:2",
            "log.dirs=/d",
        ] {
            assert!(text.lines().any(|found| found == line), "{line}");
        }
    }
}
