//! A world for one test: a migrated database, a topic, a handler that can be told what to do.

use std::collections::BTreeMap;
use std::future::Future;
use std::io::Write;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock};
use std::time::Duration;

use baton_consumer::{Builder, Consumer, Delivery, Handler, Kafka, Policy, Raw, Verdict, run};
use rdkafka::admin::{AdminClient, AdminOptions, NewTopic, TopicReplication};
use rdkafka::client::DefaultClientContext;
use rdkafka::consumer::{BaseConsumer, Consumer as _};
use rdkafka::message::{Header, Headers, OwnedHeaders, OwnedMessage};
use rdkafka::producer::{FutureProducer, FutureRecord};
use rdkafka::{ClientConfig, Message, Offset, TopicPartitionList};
use sqlx::postgres::{PgConnectOptions, PgPoolOptions};
use sqlx::{AssertSqlSafe, Connection, Executor, PgConnection, PgPool, Postgres, Transaction};
use tokio::sync::{Semaphore, oneshot};
use tokio::task::JoinHandle;
use tokio::time::{Instant, timeout};

/// The hard time-out of a test.
const LIMIT: Duration = Duration::from_secs(90);
/// How long a state may take to come about.
const PATIENCE: Duration = Duration::from_secs(40);

/// Runs one test in a world of its own.
pub(crate) fn in_world<F: Future<Output = ()>>(partitions: i32, test: impl FnOnce(Arc<World>) -> F) {
    capture_log();
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
    runtime.block_on(async {
        let world = Arc::new(World::make(partitions).await);
        timeout(LIMIT, test(Arc::clone(&world))).await.expect("the test took longer than its hard time-out");
    });
    runtime.shutdown_background();
}

/// Asks until there is an answer, boundedly, and then reports the last one that was none.
pub(crate) async fn eventually<T, F>(what: &str, mut ask: impl FnMut() -> F) -> T
where
    F: Future<Output = Result<T, String>>,
{
    within(PATIENCE, what, &mut ask).await
}

/// As [`eventually`], for what takes as long as a test may.
pub(crate) async fn lasting<T, F>(what: &str, mut ask: impl FnMut() -> F) -> T
where
    F: Future<Output = Result<T, String>>,
{
    within(LIMIT, what, &mut ask).await
}

async fn within<T, F>(patience: Duration, what: &str, ask: &mut impl FnMut() -> F) -> T
where
    F: Future<Output = Result<T, String>>,
{
    let deadline = Instant::now() + patience;
    loop {
        match ask().await {
            Ok(answer) => return answer,
            Err(status) => {
                assert!(Instant::now() < deadline, "waited in vain until {what}; at last: {status}");
            }
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

pub(crate) struct World {
    pub(crate) name: String,
    pub(crate) topic: String,
    pub(crate) pool: PgPool,
    pub(crate) options: PgConnectOptions,
    admin: AdminClient<DefaultClientContext>,
    producer: FutureProducer,
}

/// A record to produce. Its headers make it a CloudEvent unless others are given.
pub(crate) struct Send<'a> {
    pub(crate) key: Option<&'a [u8]>,
    pub(crate) payload: Option<&'a [u8]>,
    pub(crate) headers: Vec<(&'a str, Option<&'a [u8]>)>,
    pub(crate) partition: i32,
    pub(crate) timestamp: Option<i64>,
}

impl<'a> Send<'a> {
    pub(crate) fn new(id: &'a str, payload: &'a str) -> Self {
        let headers =
            vec![("ce_source", Some(&b"/test"[..])), ("ce_id", Some(id.as_bytes())), ("ce_type", Some(b"t"))];
        Self { key: Some(b"k"), payload: Some(payload.as_bytes()), headers, partition: 0, timestamp: None }
    }

    pub(crate) fn keyed(mut self, key: &'a str) -> Self {
        self.key = Some(key.as_bytes());
        self
    }

    pub(crate) fn to(mut self, partition: i32) -> Self {
        self.partition = partition;
        self
    }
}

impl World {
    async fn make(partitions: i32) -> Self {
        let name = format!("consumer_{}", uuid::Uuid::new_v4().simple());
        let mut admin =
            PgConnection::connect(&database_url()).await.expect("DATABASE_URL must name a running Postgres");
        admin.execute(AssertSqlSafe(format!("CREATE DATABASE {name}"))).await.unwrap();
        let options = database_url().parse::<PgConnectOptions>().unwrap().database(&name);
        let pool = PgPoolOptions::new().max_connections(12).connect_with(options.clone()).await.unwrap();
        baton_migrations::migrate_inbox(&mut pool.acquire().await.unwrap()).await.unwrap();
        pool.execute(
            "CREATE TABLE effect (nr bigserial PRIMARY KEY, key text, payload bytea, at_offset bigint)",
        )
        .await
        .unwrap();
        let admin: AdminClient<_> = client().create().unwrap();
        let producer = client().set("enable.idempotence", "true").create().unwrap();
        let world = Self { topic: name.clone(), name, pool, options, admin, producer };
        world.create_topic(&world.topic, partitions).await;
        world
    }

    pub(crate) async fn create_topic(&self, topic: &str, partitions: i32) {
        let new = NewTopic::new(topic, partitions, TopicReplication::Fixed(1));
        let answers = self.admin.create_topics([&new], &AdminOptions::new()).await.unwrap();
        assert!(answers.iter().all(Result::is_ok), "{answers:?}");
        // A broker may take a moment to tell of a topic that it has made.
        eventually(&format!("topic {topic} is told of"), || async {
            let told = self.partitions(topic).await;
            if told == usize::try_from(partitions).unwrap() {
                Ok(())
            } else {
                Err(format!("{told} partitions"))
            }
        })
        .await;
    }

    /// Deletes a topic, and waits until nobody tells of it any more.
    pub(crate) async fn delete_topic(&self, topic: &str) {
        let answers = self.admin.delete_topics(&[topic], &AdminOptions::new()).await.unwrap();
        assert!(answers.iter().all(Result::is_ok), "{answers:?}");
        eventually(&format!("topic {topic} is gone"), || async {
            match self.partitions(topic).await {
                0 => Ok(()),
                told => Err(format!("{told} partitions")),
            }
        })
        .await;
    }

    /// Removes records below an offset, as retention does.
    pub(crate) async fn expire(&self, partition: i32, below: i64) {
        let mut list = TopicPartitionList::new();
        list.add_partition_offset(&self.topic, partition, Offset::Offset(below)).unwrap();
        self.admin.delete_records(&list, &AdminOptions::new()).await.unwrap();
    }

    pub(crate) fn kafka(&self) -> Kafka {
        Kafka::new(brokers())
            .property("session.timeout.ms", "6000")
            .property("heartbeat.interval.ms", "500")
            .property("fetch.wait.max.ms", "50")
    }

    pub(crate) fn builder(&self) -> Builder {
        self.builder_on(self.pool.clone())
    }

    pub(crate) fn builder_on(&self, pool: PgPool) -> Builder {
        let quick = Policy { base: Duration::from_millis(20), factor: 2.0, cap: Duration::from_millis(200) };
        Consumer::builder("billing", pool, self.kafka())
            .group(self.group())
            .topics([&self.topic])
            .retry(quick)
    }

    pub(crate) fn group(&self) -> String {
        format!("{}-group", self.name)
    }

    pub(crate) fn dlt(&self) -> String {
        format!("{}.billing.dlt", self.topic)
    }

    pub(crate) async fn pool_of(&self, connections: u32) -> PgPool {
        PgPoolOptions::new().max_connections(connections).connect_with(self.options.clone()).await.unwrap()
    }

    /// Produces one record and gives its offset.
    pub(crate) async fn send(&self, record: Send<'_>) -> i64 {
        self.send_to(&self.topic, record).await
    }

    /// The same to another topic.
    pub(crate) async fn send_to(&self, topic: &str, record: Send<'_>) -> i64 {
        let mut headers = OwnedHeaders::new();
        for (key, value) in &record.headers {
            headers = headers.insert(Header { key, value: *value });
        }
        let mut outgoing = FutureRecord::<[u8], [u8]>::to(topic).partition(record.partition).headers(headers);
        outgoing.key = record.key;
        outgoing.payload = record.payload;
        outgoing.timestamp = record.timestamp;
        self.producer.send(outgoing, Duration::from_secs(10)).await.expect("produce").offset
    }

    /// Produces many, of a hundred keys, by the batch.
    pub(crate) async fn send_many(&self, records: i64) {
        let sent = (0..records).map(|nr| {
            let (id, key) = (nr.to_string(), format!("k{}", nr % 100));
            let record = FutureRecord::<str, str>::to(&self.topic)
                .partition(0)
                .headers(ce_headers(&id))
                .key(&key)
                .payload("pay");
            self.producer.send_result(record).map_err(|(error, _)| error).expect("produce")
        });
        let sent: Vec<_> = sent.collect();
        for delivery in sent {
            delivery.await.expect("the producer lives").expect("produce");
        }
    }

    /// The effects in the order in which they were applied: key and payload.
    pub(crate) async fn effects(&self) -> Vec<(String, String)> {
        sqlx::query_as("SELECT key, convert_from(coalesce(payload, ''), 'UTF8') FROM effect ORDER BY nr")
            .fetch_all(&self.pool)
            .await
            .unwrap()
    }

    pub(crate) async fn effect_keys(&self) -> Vec<String> {
        self.effects().await.into_iter().map(|(key, _)| key).collect()
    }

    pub(crate) async fn eventually_effects(&self, count: usize) -> Vec<String> {
        eventually(&format!("{count} effects are there"), || async {
            let keys = self.effect_keys().await;
            if keys.len() == count { Ok(keys) } else { Err(format!("{} effects: {keys:?}", keys.len())) }
        })
        .await
    }

    /// Key, state, cause, error of the inbox rows by key.
    pub(crate) async fn rows(&self) -> BTreeMap<String, (String, Option<String>, Option<String>)> {
        let rows: Vec<(String, String, Option<String>, Option<String>)> =
            sqlx::query_as("SELECT key, state, cause, error FROM inbox.message")
                .fetch_all(&self.pool)
                .await
                .unwrap();
        rows.into_iter().map(|(key, state, cause, error)| (key, (state, cause, error))).collect()
    }

    /// Idempotency key, state and attempts of what was set aside, in order.
    pub(crate) async fn parked(&self) -> Vec<(String, String, i32)> {
        sqlx::query_as("SELECT idempotency_key, state, attempts FROM inbox.parked ORDER BY sequence")
            .fetch_all(&self.pool)
            .await
            .unwrap()
    }

    /// Waits until those that are set aside and not settled are in these states, in order.
    pub(crate) async fn eventually_parked(&self, expected: &[(&str, &str)]) {
        eventually(&format!("{expected:?} is set aside"), || async {
            let parked = self.parked().await;
            let unsettled = parked.iter().filter(|(_, state, _)| state != "done");
            let found: Vec<(&str, &str)> =
                unsettled.map(|(key, state, _)| (key.as_str(), state.as_str())).collect();
            if found == expected { Ok(()) } else { Err(format!("{parked:?}")) }
        })
        .await;
    }

    /// The group's committed offset.
    pub(crate) async fn committed(&self, partition: i32) -> Option<i64> {
        self.committed_by(&self.group(), partition).await
    }

    async fn committed_by(&self, group: &str, partition: i32) -> Option<i64> {
        self.committed_on(&self.topic, group, partition).await
    }

    pub(crate) async fn committed_on(&self, topic: &str, group: &str, partition: i32) -> Option<i64> {
        let (group, topic) = (group.to_owned(), topic.to_owned());
        tokio::task::spawn_blocking(move || {
            let consumer: BaseConsumer = client().set("group.id", group).create().unwrap();
            let mut list = TopicPartitionList::new();
            list.add_partition(&topic, partition);
            let list = consumer.committed_offsets(list, Duration::from_secs(10)).unwrap();
            let offset = list.elements()[0].offset();
            match offset {
                Offset::Offset(offset) => Some(offset),
                _ => None,
            }
        })
        .await
        .unwrap()
    }

    pub(crate) async fn eventually_committed(&self, partition: i32, offset: i64) {
        self.eventually_committed_by(&self.group(), partition, offset).await;
    }

    pub(crate) async fn eventually_committed_by(&self, group: &str, partition: i32, offset: i64) {
        lasting(&format!("offset {offset} of partition {partition} is committed"), || async {
            let committed = self.committed_by(group, partition).await;
            if committed == Some(offset) { Ok(()) } else { Err(format!("{committed:?}")) }
        })
        .await;
    }

    /// Everything that a topic holds, in offset order within a partition.
    pub(crate) async fn read(&self, topic: &str) -> Vec<OwnedMessage> {
        let topic = topic.to_owned();
        tokio::task::spawn_blocking(move || {
            let consumer: BaseConsumer =
                client().set("enable.partition.eof", "true").set("group.id", "none").create().unwrap();
            let metadata = consumer.fetch_metadata(Some(&topic), Duration::from_secs(10)).unwrap();
            let partitions = metadata.topics()[0].partitions().len();
            let mut list = TopicPartitionList::new();
            for partition in 0..partitions {
                let partition = i32::try_from(partition).unwrap();
                list.add_partition_offset(&topic, partition, Offset::Beginning).unwrap();
            }
            consumer.assign(&list).unwrap();
            let (mut ended, mut found) = (0, Vec::new());
            while ended < partitions {
                match consumer.poll(Duration::from_secs(10)).expect("a record or the end of a partition") {
                    Ok(message) => found.push(message.detach()),
                    Err(rdkafka::error::KafkaError::PartitionEOF(_)) => ended += 1,
                    Err(error) => panic!("{error}"),
                }
            }
            found
        })
        .await
        .unwrap()
    }

    pub(crate) async fn partitions(&self, topic: &str) -> usize {
        let topic = topic.to_owned();
        tokio::task::spawn_blocking(move || {
            let consumer: BaseConsumer = client().create().unwrap();
            consumer.fetch_metadata(Some(&topic), Duration::from_secs(10)).unwrap().topics()[0]
                .partitions()
                .len()
        })
        .await
        .unwrap()
    }

    pub(crate) async fn eventually_letters(&self, count: usize) -> Vec<OwnedMessage> {
        eventually(&format!("{count} dead letters are there"), || async {
            let letters = self.read(&self.dlt()).await;
            if letters.len() == count { Ok(letters) } else { Err(format!("{} letters", letters.len())) }
        })
        .await
    }
}

impl Drop for World {
    /// On a thread of its own, because a test that fails unwinds within its runtime.
    fn drop(&mut self) {
        let (database, topic) = (self.name.clone(), self.topic.clone());
        let clean = move || {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
            runtime.block_on(async {
                if let Ok(mut connection) = PgConnection::connect(&database_url()).await {
                    let drop = format!("DROP DATABASE IF EXISTS {database} WITH (FORCE)");
                    let _ = connection.execute(AssertSqlSafe(drop)).await;
                }
                let admin: AdminClient<DefaultClientContext> = client().create().unwrap();
                let own = ["billing", "metered", "expired", "late"];
                let own =
                    own.iter().flat_map(|consumer| [format!("{consumer}.dlt"), format!("{consumer}.replay")]);
                let topics: Vec<String> = own
                    .map(|own| format!("{topic}.{own}"))
                    .chain([format!("{topic}-dlt"), topic.clone()])
                    .collect();
                let topics: Vec<&str> = topics.iter().map(String::as_str).collect();
                let _ = admin.delete_topics(&topics, &AdminOptions::new()).await;
            });
        };
        let _ = std::thread::spawn(clean).join();
    }
}

/// What makes a record a CloudEvent.
pub(crate) fn ce_headers(id: &str) -> OwnedHeaders {
    OwnedHeaders::new()
        .insert(Header { key: "ce_source", value: Some("/test") })
        .insert(Header { key: "ce_id", value: Some(id) })
}

/// Header names and values of a record, in order.
pub(crate) fn headers(message: &OwnedMessage) -> Vec<(String, Option<Vec<u8>>)> {
    let headers = message.headers().into_iter().flat_map(Headers::iter);
    headers.map(|header| (header.key.to_owned(), header.value.map(<[u8]>::to_vec))).collect()
}

/// The text of one header.
pub(crate) fn header(message: &OwnedMessage, name: &str) -> Option<String> {
    let value = headers(message).into_iter().find(|(given, _)| given == name)?.1?;
    Some(String::from_utf8(value).unwrap())
}

/// A consumer that runs as a task.
pub(crate) struct Running {
    stop: Option<oneshot::Sender<()>>,
    task: JoinHandle<Result<(), run::Error>>,
}

impl Running {
    pub(crate) fn start(consumer: Consumer) -> Self {
        let (stop, stopped) = oneshot::channel();
        let running = consumer.run(async { drop(stopped.await) });
        let task = tokio::spawn(async move {
            let ended = running.await;
            if let Err(error) = &ended {
                println!("the consumer ended: {error:?}");
            }
            ended
        });
        Self { stop: Some(stop), task }
    }

    /// Asks it to stop and waits until it has.
    pub(crate) async fn stop(mut self) -> Result<(), run::Error> {
        self.ask_to_stop();
        self.ended().await
    }

    pub(crate) fn ask_to_stop(&mut self) {
        if let Some(stop) = self.stop.take() {
            let _ = stop.send(());
        }
    }

    pub(crate) async fn ended(self) -> Result<(), run::Error> {
        timeout(PATIENCE, self.task)
            .await
            .expect("the consumer did not end in time")
            .expect("the consumer panicked")
    }
}

/// A handler that does what the payload says, and then writes its effect.
///
/// `permanent`, `panic`; `flaky:N` (transient until attempt N); `gate` (waits for [`Probe::open`]);
/// `transient` (for ever); `sick` (transient until [`Probe::heal`]); `away` (an outage until then). Anything else just succeeds.
#[derive(Clone)]
pub(crate) struct Probe(Arc<ProbeState>);

struct ProbeState {
    gate: Semaphore,
    entered: AtomicU64,
    healed: AtomicBool,
    calls: Mutex<Vec<(String, u32)>>,
}

impl Probe {
    pub(crate) fn new() -> Self {
        Self(Arc::new(ProbeState {
            gate: Semaphore::new(0),
            entered: AtomicU64::new(0),
            healed: AtomicBool::new(false),
            calls: Mutex::new(Vec::new()),
        }))
    }

    /// Lets `count` gates through.
    pub(crate) fn open(&self, count: usize) {
        self.0.gate.add_permits(count);
    }

    /// Waits until so many calls have come to a gate.
    pub(crate) async fn entered(&self, count: u64) {
        eventually(&format!("{count} calls have come to the gate"), || async {
            let entered = self.0.entered.load(Ordering::SeqCst);
            if entered >= count { Ok(()) } else { Err(format!("{entered}")) }
        })
        .await;
    }

    /// What was sick or away is well from now on.
    pub(crate) fn heal(&self) {
        self.0.healed.store(true, Ordering::SeqCst);
    }

    /// The attempts on one key.
    pub(crate) fn attempts_on(&self, key: &str) -> Vec<u32> {
        self.calls().into_iter().filter(|(called, _)| called == key).map(|(_, attempt)| attempt).collect()
    }

    /// Key and attempt of every call.
    pub(crate) fn calls(&self) -> Vec<(String, u32)> {
        self.0.calls.lock().unwrap().clone()
    }
}

impl Handler for Probe {
    type Payload = Raw;

    async fn handle(&self, delivery: &Delivery<Raw>, tx: &mut Transaction<'_, Postgres>) -> Verdict {
        let text = delivery.payload().0.as_ref().map(|payload| String::from_utf8_lossy(payload).into_owned());
        let text = text.unwrap_or_default();
        self.0.calls.lock().unwrap().push((delivery.idempotency_key().to_owned(), delivery.attempt()));
        let effect = sqlx::query("INSERT INTO effect (key, payload, at_offset) VALUES ($1, $2, $3)")
            .bind(delivery.idempotency_key())
            .bind(delivery.raw().map(AsRef::<[u8]>::as_ref))
            .bind(delivery.offset());
        if let Err(error) = effect.execute(&mut **tx).await {
            return error.into();
        }
        if text.starts_with("gate") {
            self.0.entered.fetch_add(1, Ordering::SeqCst);
            self.0.gate.acquire().await.unwrap().forget();
            // Says whether the transaction is still there.
            if let Err(error) = sqlx::query("SELECT 1").execute(&mut **tx).await {
                return error.into();
            }
        }
        match text.as_str() {
            "permanent" => Verdict::permanent("the handler says no"),
            "panic" => panic!("the handler fell over"),
            "transient" => Verdict::transient("not yet"),
            sick if sick.starts_with("sick") && !self.0.healed.load(Ordering::SeqCst) => {
                Verdict::transient("not well yet")
            }
            "away" if !self.0.healed.load(Ordering::SeqCst) => Verdict::outage("the provider is away"),
            flaky if flaky.starts_with("flaky:") => {
                let until: u32 = flaky["flaky:".len()..].parse().unwrap();
                if delivery.attempt() < until { Verdict::transient("not yet") } else { Verdict::done() }
            }
            _ => Verdict::done_with(&text),
        }
    }
}

pub(crate) fn database_url() -> String {
    std::env::var("DATABASE_URL").expect("DATABASE_URL says where Postgres is; `cargo xtask env` prints it")
}

pub(crate) fn brokers() -> String {
    std::env::var("KAFKA_BROKERS").expect("KAFKA_BROKERS says where Kafka is; `cargo xtask env` prints it")
}

fn client() -> ClientConfig {
    let mut config = ClientConfig::new();
    config.set("bootstrap.servers", brokers());
    config
}

static LOG: OnceLock<Mutex<Vec<u8>>> = OnceLock::new();

struct Captured;

impl Write for Captured {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        LOG.get_or_init(Mutex::default).lock().unwrap().extend_from_slice(bytes);
        // Shown with a test that fails.
        print!("{}", String::from_utf8_lossy(bytes));
        Ok(bytes.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

fn capture_log() {
    let filter = tracing_subscriber::EnvFilter::new("baton_consumer=debug");
    let _ = tracing_subscriber::fmt()
        .with_ansi(false)
        .with_env_filter(filter)
        .with_writer(|| Captured)
        .try_init();
}

/// The lines logged so far that hold all of these texts. Names of topics tell tests apart.
pub(crate) fn logged(texts: &[&str]) -> Vec<String> {
    let log = LOG.get_or_init(Mutex::default).lock().unwrap();
    let log = String::from_utf8_lossy(&log);
    log.lines().filter(|line| texts.iter().all(|text| line.contains(text))).map(str::to_owned).collect()
}

pub(crate) async fn eventually_logged(texts: &[&str]) {
    eventually(&format!("the log says {texts:?}"), || async {
        if logged(texts).is_empty() { Err("it does not".to_owned()) } else { Ok(()) }
    })
    .await;
}
