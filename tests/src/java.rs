//! Kafka's own command line tools, as a second opinion that shares no code with us.

use crate::failure::Outcome;
use crate::harness::Site;
use crate::own_stack::kafka_jars;
use crate::process::Launch;

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
        .args(["-Xmx256m", "-XX:TieredStopAtLevel=1", "-Dfile.encoding=UTF-8", "-cp"])
        .arg(format!("{}/*", jars.display()))
        .arg(class)
        .args(["--bootstrap-server", &site.place().brokers]))
}
