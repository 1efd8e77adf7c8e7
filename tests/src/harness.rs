//! What a test works with: a site of its own (a database, a prefix for topics), programs started in it, and a directory
//! for their output. All of it goes when the test ends, whichever way.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use sqlx::postgres::PgConnection;
use sqlx::{Connection, PgPool};
use tokio::sync::OnceCell;
use tokio::time::timeout;

use crate::database::{self, Schema, Stamp};
use crate::failure::Outcome;
use crate::kafka::{Kafka, topic_prefix};
use crate::place::{self, Place};
use crate::process::Launch;
use crate::wait::eventually;

/// How many lines of each output are shown when a test fails.
const SHOWN_LINES: usize = 60;

/// How long clearing up may take; what is left then is for the next sweep.
const CLEAR_UP: Duration = Duration::from_secs(30);

/// One test's belongings.
#[derive(Debug)]
pub struct Harness {
    directory: PathBuf,
    sites: Vec<(Place, Site)>,
}

impl Harness {
    /// Belongings for the test of this name.
    pub(crate) fn start(name: &str) -> Outcome<Self> {
        let scratch = place::scratch()?;
        forget_the_dead(&scratch);
        let directory = scratch.join(format!("{}.{}", name.replace("::", "."), std::process::id()));
        std::fs::create_dir_all(&directory)?;
        Ok(Self { directory, sites: Vec::new() })
    }

    /// A site on the shared stack, both migration lines done, with 8 shards.
    ///
    /// # Errors
    ///
    /// When no stack is named by the environment, or it does not answer.
    pub async fn site(&mut self) -> Outcome<Site> {
        self.site_at(&Place::shared()?, Schema::Both { shards: 8 }).await
    }

    /// A site on the given servers.
    ///
    /// # Errors
    ///
    /// When they do not answer.
    pub async fn site_at(&mut self, place: &Place, schema: Schema) -> Outcome<Site> {
        let stamp = database::stamp(place).await?;
        sweep_once(place, stamp.epoch).await;
        let (own, pool) = database::create(place, &stamp, schema).await?;
        let kafka = Kafka::new(&own.brokers);
        let directory = self.directory.clone();
        let site = Site { place: own, pool, kafka, stamp, directory, launches: Arc::default() };
        self.sites.push((place.clone(), site.clone()));
        Ok(site)
    }

    /// Takes a site away before the test ends: for tests that need hundreds, one after another.
    pub async fn leave(&mut self, site: &Site) {
        if let Some(at) = self.sites.iter().position(|(_, of_test)| of_test.stamp.random == site.stamp.random)
        {
            let (admin, site) = self.sites.swap_remove(at);
            take_away(&admin, &site).await;
        }
    }

    /// Where the children write and run.
    #[must_use]
    pub fn directory(&self) -> &Path {
        &self.directory
    }

    /// The end of what each child printed, for a failed test.
    pub(crate) fn outputs(&self) -> String {
        let Ok(entries) = std::fs::read_dir(&self.directory) else { return String::new() };
        let mut paths: Vec<PathBuf> = entries
            .filter_map(|entry| Some(entry.ok()?.path()))
            .filter(|path| path.extension().is_some_and(|end| end == "out" || end == "err"))
            .collect();
        paths.sort();
        let mut shown = String::new();
        for path in paths {
            let text = std::fs::read(&path).unwrap_or_default();
            let text = String::from_utf8_lossy(&text);
            let lines: Vec<&str> = text.lines().collect();
            if lines.is_empty() {
                continue;
            }
            let first = lines.len().saturating_sub(SHOWN_LINES);
            shown.push_str(&format!("--- {} (line {} on)\n", path.display(), first + 1));
            for line in &lines[first..] {
                shown.push_str(line);
                shown.push('\n');
            }
        }
        shown
    }

    /// Drops databases and topics, and the outputs unless somebody will want to read them. Best effort: what stays is
    /// swept an hour later.
    pub(crate) async fn clear_up(self, failed: bool) {
        for (admin, site) in &self.sites {
            take_away(admin, site).await;
        }
        if !failed {
            std::fs::remove_dir_all(&self.directory).ok();
        }
    }
}

/// Drops what a site has on its servers.
async fn take_away(admin: &Place, site: &Site) {
    let clear = async {
        site.pool.close().await;
        let dropped = database::drop_database(admin, &site.stamp).await;
        let deleted = site.kafka.delete_topics_of(&site.topic_prefix()).await;
        let forgotten = site.kafka.delete_groups_of(&site.topic_prefix()).await;
        dropped.and(deleted).and(forgotten)
    };
    match timeout(CLEAR_UP, clear).await {
        Ok(Ok(())) => {}
        Ok(Err(failure)) => eprintln!("left for the next sweep: {failure}"),
        Err(_) => eprintln!("left for the next sweep: it was not gone within {CLEAR_UP:?}"),
    }
}

/// A database and a set of topics on some servers. Cheap to clone.
#[derive(Debug, Clone)]
pub struct Site {
    place: Place,
    pool: PgPool,
    kafka: Kafka,
    stamp: Stamp,
    directory: PathBuf,
    launches: Arc<AtomicU32>,
}

impl Site {
    /// Where it is; the URL names this site's own database.
    #[must_use]
    pub fn place(&self) -> &Place {
        &self.place
    }

    /// Where its programs write and run.
    #[must_use]
    pub fn directory(&self) -> &Path {
        &self.directory
    }

    /// Up to eight connections to the database.
    #[must_use]
    pub fn pool(&self) -> &PgPool {
        &self.pool
    }

    /// One more connection, outside the pool.
    ///
    /// # Errors
    ///
    /// When the server does not let us in.
    pub async fn connect(&self) -> Outcome<PgConnection> {
        database::connect(&self.place.database_url).await
    }

    /// The cluster's topics.
    #[must_use]
    pub fn kafka(&self) -> &Kafka {
        &self.kafka
    }

    /// A new topic whose name ends with `label`.
    ///
    /// # Errors
    ///
    /// When the broker refuses or does not answer.
    pub async fn topic(&self, label: &str, partitions: usize) -> Outcome<String> {
        self.topic_with(label, partitions, &[]).await
    }

    /// A new topic with settings of its own.
    ///
    /// # Errors
    ///
    /// When the broker refuses or does not answer.
    pub async fn topic_with(
        &self,
        label: &str,
        partitions: usize,
        settings: &[(&str, &str)],
    ) -> Outcome<String> {
        let name = self.topic_name(label);
        self.kafka.create_topic(&name, partitions, settings).await?;
        Ok(name)
    }

    /// The name that a topic or a consumer group of this label has or would have.
    #[must_use]
    pub fn topic_name(&self, label: &str) -> String {
        format!("{}{label}", self.topic_prefix())
    }

    fn topic_prefix(&self) -> String {
        topic_prefix(self.stamp.epoch, &self.stamp.random)
    }

    /// How many committed messages no cursor covers yet.
    ///
    /// # Errors
    ///
    /// When the database does not answer.
    pub async fn pending(&self) -> Outcome<i64> {
        let mut connection = self.connect().await?;
        let status = baton_relay::status::read(&mut connection).await?;
        connection.close().await?;
        Ok(status.pending.count)
    }

    /// Waits until the cursors cover every committed message.
    ///
    /// # Errors
    ///
    /// When some still wait after half a minute.
    pub async fn emptied(&self) -> Outcome {
        eventually("everything to be published", Duration::from_secs(30), async || {
            let pending = self.pending().await?;
            if pending == 0 { Ok(()) } else { crate::fail!("{pending} messages wait") }
        })
        .await
    }

    /// A key of each of the eight shards, in the order of the shards.
    ///
    /// # Errors
    ///
    /// When the database does not answer.
    pub async fn key_of_each_shard(&self) -> Outcome<Vec<String>> {
        Ok(sqlx::query_scalar(
            "SELECT DISTINCT ON (outbox.shard_of(key, 0)) key
             FROM (SELECT 'key-' || i AS key FROM generate_series(1, 200) i) keys
             ORDER BY outbox.shard_of(key, 0), key",
        )
        .fetch_all(&self.pool)
        .await?)
    }

    /// A program started in this site: it gets `DATABASE_URL`, `KAFKA_BROKERS` and readable logs.
    #[must_use]
    pub fn launch(&self, name: &str, program: impl Into<PathBuf>) -> Launch {
        let number = self.launches.fetch_add(1, Ordering::Relaxed);
        Launch::new(&format!("{number:02}-{name}"), &self.directory, program)
            .env("DATABASE_URL", &self.place.database_url)
            .env("KAFKA_BROKERS", &self.place.brokers)
            .env("RUST_LOG", "info")
            .env("RUST_BACKTRACE", "1")
    }

    /// `baton` with these arguments.
    ///
    /// # Errors
    ///
    /// When it has not been built.
    pub fn baton(&self, args: &[&str]) -> Outcome<Launch> {
        let name = format!("baton-{}", args.first().unwrap_or(&""));
        Ok(self.launch(&name, place::program("baton")?).env("BATON_HTTP__LISTEN", "off").args(args))
    }

    /// `baton relay` by this owner's name, with a lease of 3 s so that takeovers are seen soon.
    ///
    /// # Errors
    ///
    /// When it has not been built.
    pub fn relay(&self, owner: &str) -> Outcome<Launch> {
        Ok(self.as_relay(self.launch(owner, place::program("baton")?).arg("relay"), owner))
    }

    /// Sets what every relay of the tests is set to.
    #[must_use]
    pub fn as_relay(&self, launch: Launch, owner: &str) -> Launch {
        launch.env("BATON_RELAY__OWNER", owner).env("BATON_LEASE__TTL", "3s").env("BATON_HTTP__LISTEN", "off")
    }
}

/// Takes away what others left on those servers; once in this process and by at most one test.
async fn sweep_once(place: &Place, now: i64) {
    static SWEPT: OnceCell<()> = OnceCell::const_new();
    SWEPT
        .get_or_init(async || {
            database::sweep(place, now).await.ok();
            Kafka::new(&place.brokers).sweep(now).await.ok();
        })
        .await;
}

/// Removes the outputs of failed tests whose process is no more. They have been there to be read until the next run.
fn forget_the_dead(scratch: &Path) {
    let Ok(entries) = std::fs::read_dir(scratch) else { return };
    for path in entries.filter_map(|entry| Some(entry.ok()?.path())) {
        let process = path.extension().and_then(|end| end.to_str()?.parse::<u32>().ok());
        if process.is_some_and(|process| !Path::new("/proc").join(process.to_string()).exists()) {
            std::fs::remove_dir_all(&path).ok();
        }
    }
}

#[cfg(test)]
mod tests;
