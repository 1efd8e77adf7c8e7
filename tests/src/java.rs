//! Kafka's own command line tools and client, as a second opinion that shares no code with us.

use std::time::Duration;

use crate::failure::{Failure, Outcome};
use crate::harness::Site;
use crate::own_stack::kafka_jars;
use crate::process::Launch;

const VIRTUAL_MACHINE: [&str; 3] = ["-Xmx256m", "-XX:TieredStopAtLevel=1", "-Dfile.encoding=UTF-8"];

/// How long a compiler may take on a busy machine.
const COMPILE: Duration = Duration::from_secs(60);

/// One of Kafka's tools, by the name of its class, with the broker of this site as its first arguments.
///
/// # Errors
///
/// When Kafka's jars are nowhere.
pub async fn kafka_tool(site: &Site, class: &str) -> Outcome<Launch> {
    let jars = kafka_jars().await?;
    let name = class.rsplit('.').next().unwrap_or(class);
    Ok(site
        .launch(name, "java")
        .args(VIRTUAL_MACHINE)
        .arg("-cp")
        .arg(format!("{}/*", jars.display()))
        .arg(class)
        .args(["--bootstrap-server", &site.place().brokers]))
}

/// A program of ours over Kafka's own client: a class and its source, compiled into the site's directory.
///
/// # Errors
///
/// When Kafka's jars are nowhere, there is no `javac`, or it refuses the source.
pub async fn kafka_program(site: &Site, class: &str, source: &str) -> Outcome<Launch> {
    let jars = format!("{}/*", kafka_jars().await?.display());
    let file = site.directory().join(format!("{class}.java"));
    std::fs::write(&file, source)?;
    let compiler = site
        .launch("javac", "javac")
        .args(["-encoding", "UTF-8", "-cp", &jars, "-d"])
        .arg(site.directory())
        .arg(&file);
    let compiled = compiler.finish(COMPILE).await.map_err(|failure| {
        let words =
            "compile with javac, which this test needs: install a JDK (Debian: openjdk-17-jdk-headless)";
        Failure::new(format!("{words}: {failure}"))
    })?;
    compiled.success()?;
    let path = format!("{jars}:{}", site.directory().display());
    Ok(site.launch(class, "java").args(VIRTUAL_MACHINE).args(["-cp", &path, class]))
}
