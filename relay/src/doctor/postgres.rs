//! The part of the doctor that asks Postgres: the server, its transactions, and the outbox in it.

use std::time::Duration;

use sqlx::postgres::PgConnection;

use super::{Finding, Level, Used, lasted};
use crate::database::{self, Cluster, Error, answer};
use crate::settings::Settings;
use crate::{guards, status};

/// How long each statement may take.
const PATIENCE: Duration = Duration::from_secs(10);

/// Connections that one relay takes: four of its own, and one to show what waits.
const CONNECTIONS_A_RELAY: i64 = 5;

/// What a lease never lasts: no setting asks for more.
const FAR: Duration = Duration::from_secs(24 * 3600);

/// How many rows of each shard, waiting and published, are looked at for their topics.
const ROWS: i64 = 1_000;

/// The oldest server that is supported.
const OLDEST: i32 = 15;

#[derive(Debug, sqlx::FromRow)]
struct Server {
    version: i32,
    fsync: bool,
    full_page_writes: bool,
    autovacuum: bool,
    synchronous_commit: String,
    connections_left: i64,
    sees_all: bool,
    /// Quoted where it has to be.
    role: String,
}

#[derive(Debug, sqlx::FromRow)]
struct Transaction {
    pid: i32,
    role: String,
    database: String,
    application: String,
    state: String,
    age: f64,
    is_here: bool,
}

#[derive(Debug, sqlx::FromRow)]
struct Prepared {
    gid: String,
    role: String,
    database: String,
    age: f64,
    is_here: bool,
}

/// Examines the server and the outbox. Returned: the topics in use, where they are known.
pub(super) async fn examine(
    settings: &Settings,
    long: Duration,
    findings: &mut Vec<Finding>,
) -> Option<Vec<Used>> {
    let mut connection = match database::connect(settings, "doctor", PATIENCE).await {
        Ok(connection) => connection,
        Err(error) => {
            findings.push(Finding::failed("postgres", &error));
            return None;
        }
    };
    match own_sessions(settings, &mut connection).await {
        Ok(()) => findings.push(Finding::ok("pooler", "each connection has a session of its own")),
        Err(error) => {
            findings.push(Finding::failed("pooler", &error));
            if matches!(error, Error::Pooler { .. }) {
                // What is prepared on one session would be asked of another.
                return None;
            }
        }
    }
    let server = server(&mut connection, findings).await;
    let transactions = transactions(&mut connection, long, findings).await;
    if let Err(error) = server.and(transactions) {
        // A connection on which a statement failed is not used again.
        findings.push(Finding::failed("postgres", &error));
        return None;
    }
    match outbox(&mut connection, findings).await {
        Ok(topics) => Some(topics),
        Err((check, error)) => {
            findings.push(Finding::failed(check, &error));
            None
        }
    }
}

async fn own_sessions(settings: &Settings, connection: &mut PgConnection) -> Result<(), Error> {
    let mut another = database::connect(settings, "doctor", PATIENCE).await?;
    database::own_sessions(settings, connection, &mut another, PATIENCE).await
}

async fn server(connection: &mut PgConnection, findings: &mut Vec<Finding>) -> Result<(), Error> {
    let asked = sqlx::query_as(include_str!("../../queries/doctor_server.sql")).fetch_one(connection);
    let server: Server = answer("reading the server's settings", PATIENCE, asked).await?;
    judge_server(&server, findings);
    Ok(())
}

/// What the settings of the server mean to an outbox.
fn judge_server(server: &Server, findings: &mut Vec<Finding>) {
    let before = findings.len();
    let major = server.version / 10_000;
    if major < OLDEST {
        let found = format!("Postgres {major} is older than Baton supports");
        findings.push(Finding::new(
            "postgres",
            Level::Error,
            found,
            format!("use Postgres {OLDEST} or newer"),
        ));
    }
    let lost = "a crash of the machine may take back what it has committed, and with it messages that are already published";
    for (is_on, name) in [(server.fsync, "fsync"), (server.full_page_writes, "full_page_writes")] {
        if !is_on {
            let advice = format!("run `ALTER SYSTEM SET {name} = on` and reload");
            findings.push(Finding::new("postgres", Level::Warning, format!("{name} is off: {lost}"), advice));
        }
    }
    if !server.autovacuum {
        let found = "autovacuum is off: leases are updated all the time, and what that leaves behind is never cleared away";
        let advice = "run `ALTER SYSTEM SET autovacuum = on` and reload";
        findings.push(Finding::new("postgres", Level::Warning, found, advice));
    }
    if server.synchronous_commit == "off" {
        let found = "synchronous_commit is off: a crash takes back the newest commits of producers; none of them is published before \
                     it is on disk, which takes some milliseconds more";
        let advice = "turn it on for producers that must not lose what they have committed";
        findings.push(Finding::new("postgres", Level::Note, found, advice));
    }
    if server.connections_left < CONNECTIONS_A_RELAY {
        let found = format!(
            "{} connections are left for this role, and a relay takes {CONNECTIONS_A_RELAY}",
            server.connections_left.max(0)
        );
        let advice =
            "raise max_connections, or the limit of the role or the database, or let producers use fewer";
        findings.push(Finding::new("connections", Level::Warning, found, advice));
    }
    if findings.len() == before {
        let found = format!("Postgres {major}, {} connections left", server.connections_left);
        findings.push(Finding::ok("postgres", found));
    }
    if !server.sees_all {
        let found = "this role does not see transactions of other roles, so long ones may be missing here";
        let advice = format!("run `GRANT pg_read_all_stats TO {}` as a superuser", server.role);
        findings.push(Finding::new("transactions", Level::Note, found, advice));
    }
}

async fn transactions(
    connection: &mut PgConnection,
    long: Duration,
    findings: &mut Vec<Finding>,
) -> Result<(), Error> {
    let before = findings.len();
    let asked = sqlx::query_as(include_str!("../../queries/doctor_transactions.sql"))
        .bind(long.as_secs_f64())
        .fetch_all(&mut *connection);
    let open: Vec<Transaction> = answer("looking for long transactions", PATIENCE, asked).await?;
    findings.extend(open.iter().map(judge_transaction));
    let asked = sqlx::query_as(include_str!("../../queries/doctor_prepared.sql"))
        .bind(long.as_secs_f64())
        .fetch_all(connection);
    let prepared: Vec<Prepared> = answer("looking for prepared transactions", PATIENCE, asked).await?;
    findings.extend(prepared.iter().map(judge_prepared));
    if findings.len() == before {
        findings
            .push(Finding::ok("transactions", format!("none is older than {}", lasted(long.as_secs_f64()))));
    }
    Ok(())
}

/// What a transaction of another database does here, which is little: what vacuum may clear away, and who waits for a lock,
/// is decided database by database. But every snapshot names the ids that run in the whole cluster.
const ELSEWHERE: &str = "snapshots of this database go back to it as well, which keeps neither publishing nor vacuum waiting here \
                         once the statement that took one has ended";

/// Only transactions of the outbox's own database hold back its vacuum and its leaves.
fn judge_transaction(open: &Transaction) -> Finding {
    let Transaction { pid, role, database, application, state, age, is_here } = open;
    let what = format!(
        "a transaction is open for {} ({state}; pid {pid}, role {role}, database {database}, application {application:?})",
        lasted(*age)
    );
    if !is_here {
        let advice = format!("nothing for the outbox; {database} has what it keeps vacuum from");
        return Finding::new("transactions", Level::Note, format!("{what}: {ELSEWHERE}"), advice);
    }
    let found = format!(
        "{what}: publishing goes on, but vacuum cannot clear away anything newer, and a slot that it has read is not emptied"
    );
    let advice = format!("end it where it comes from, or run `SELECT pg_terminate_backend({pid})`");
    Finding::new("transactions", Level::Warning, found, advice)
}

fn judge_prepared(prepared: &Prepared) -> Finding {
    let Prepared { role, database, age, is_here, .. } = prepared;
    let gid = prepared.gid.replace('\'', "''");
    let what = format!(
        "the transaction '{gid}' (role {role}, database {database}) was prepared {} ago and not ended",
        lasted(*age)
    );
    if !is_here {
        let advice = format!("nothing for the outbox; {database} has what it keeps vacuum from");
        return Finding::new("prepared transactions", Level::Note, format!("{what}: {ELSEWHERE}"), advice);
    }
    let found = format!(
        "{what}: what it enqueued is not published, vacuum cannot clear away anything newer, and it outlives restarts"
    );
    let advice = format!(
        "ask its coordinator, then run `COMMIT PREPARED '{gid}'` or `ROLLBACK PREPARED '{gid}'` in the database {database}"
    );
    Finding::new("prepared transactions", Level::Warning, found, advice)
}

/// The outbox: what a start would check, and what stands still. With an error, the check that failed.
async fn outbox(
    connection: &mut PgConnection,
    findings: &mut Vec<Finding>,
) -> Result<Vec<Used>, (&'static str, Error)> {
    let is_relays = match database::needs(connection, PATIENCE).await {
        Ok(()) => {
            findings.push(Finding::ok("privileges", "this role may do what a relay does"));
            true
        }
        // Enough to look at everything else.
        Err(Error::Denied { .. })
            if reads_only(connection).await.map_err(|error| ("privileges", error))? =>
        {
            let found = "this role may look and not publish: whether a relay's role may do what it must is not examined";
            let advice = "to examine that too, run `baton doctor` as the relay's role";
            findings.push(Finding::new("privileges", Level::Note, found, advice));
            false
        }
        Err(error @ Error::NotMigrated) => return Err(("migrations", error)),
        Err(error) => return Err(("privileges", error)),
    };
    let cluster = match database::identify(connection, PATIENCE).await {
        Ok((outbox, cluster)) => {
            findings.push(Finding::ok("recovery", format!("{} is the primary", outbox.database)));
            Some(cluster)
        }
        Err(Error::NoSettings) => {
            let (found, advice) = (database::WITHOUT_SETTINGS, database::NO_SETTINGS);
            findings.push(Finding::new("settings", Level::Error, found, advice));
            None
        }
        Err(error @ Error::Recovery) => return Err(("recovery", error)),
        Err(error) => return Err(("migrations", error)),
    };
    guards(connection, cluster, is_relays, findings).await.map_err(|error| ("guards", error))?;
    cursors(connection, findings).await.map_err(|error| ("cursors", error))?;
    leases(connection, findings).await.map_err(|error| ("leases", error))?;
    stopped(connection, findings).await.map_err(|error| ("shards", error))?;
    parked(connection, findings).await.map_err(|error| ("parked", error))?;
    let asked =
        sqlx::query_as(include_str!("../../queries/doctor_topics.sql")).bind(ROWS).fetch_all(connection);
    let rows: Vec<(String, i64)> =
        answer("reading the topics in use", PATIENCE, asked).await.map_err(|error| ("topics", error))?;
    Ok(rows.into_iter().map(|(topic, waiting)| Used { topic, waiting }).collect())
}

/// Whether this is one of the roles that are made for looking.
async fn reads_only(connection: &mut PgConnection) -> Result<bool, Error> {
    let asked = sqlx::query_scalar(include_str!("../../queries/doctor_reads_only.sql")).fetch_one(connection);
    answer("asking which role this is", PATIENCE, asked).await
}

async fn guards(
    connection: &mut PgConnection,
    cluster: Option<Cluster>,
    is_relays: bool,
    findings: &mut Vec<Finding>,
) -> Result<(), Error> {
    let mut violations = Vec::new();
    match cluster {
        None => {}
        Some(Cluster::Stored(stored)) => {
            violations.extend(guards::judge_cluster(stored, guards::cluster(connection, PATIENCE).await?));
        }
        Some(Cluster::NotToBeAsked) if !is_relays => {}
        Some(Cluster::NotToBeAsked) => findings.push(Finding::new(
            "guards",
            Level::Warning,
            "this role may not ask which cluster this is, so a relay would not notice every restored database",
            "run `GRANT EXECUTE ON FUNCTION pg_control_system() TO baton_relay` as a superuser",
        )),
    }
    violations.extend(guards::judge(&guards::facts(connection, PATIENCE).await?));
    if violations.is_empty() {
        let found = "the sequence is ahead and gives out one number after the other, nothing names a transaction to come";
        findings.push(Finding::ok("guards", found));
    }
    let all = violations
        .iter()
        .map(|violation| Finding::new("guards", Level::Error, violation.found(), violation.advice()));
    findings.extend(all);
    Ok(())
}

/// A relay that claims a shard without a cursor does not know where to begin, and ends its session.
async fn cursors(connection: &mut PgConnection, findings: &mut Vec<Finding>) -> Result<(), Error> {
    let asked = sqlx::query_scalar(include_str!("../../queries/doctor_cursors.sql")).fetch_one(connection);
    let without: Vec<i16> = answer("looking for shards without a cursor", PATIENCE, asked).await?;
    if without.is_empty() {
        findings.push(Finding::ok("cursors", "every shard has one"));
        return Ok(());
    }
    let named = without.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ");
    let found = format!(
        "shards without a cursor: {named}: what of them is published is not known, and a relay that claims one loses its session"
    );
    let advice = "restore outbox.advance and outbox.fence from a backup, or stop the relays and run `baton rebase`, which gives each a \
                  cursor: what the table still holds of those shards is published again";
    findings.push(Finding::new("cursors", Level::Error, found, advice));
    Ok(())
}

async fn leases(connection: &mut PgConnection, findings: &mut Vec<Finding>) -> Result<(), Error> {
    let asked = sqlx::query_as(include_str!("../../queries/doctor_leases.sql"))
        .bind(FAR.as_secs_f64())
        .fetch_all(&mut *connection);
    let endless: Vec<(Option<i16>, Option<String>, String)> =
        answer("looking for endless leases", PATIENCE, asked).await?;
    if endless.is_empty() {
        findings.push(Finding::ok("leases", "every lease ends"));
    }
    for (shard, owner, until) in endless {
        let owner = owner.unwrap_or_default();
        findings.push(match shard {
            Some(shard) => Finding::new(
                "leases",
                Level::Error,
                format!("the lease of shard {shard} ends at {until}: unless {owner} lives, nobody publishes it"),
                format!(
                    "make sure that {owner} is stopped, then run `UPDATE outbox.shard SET owner = NULL, lease_until = NULL WHERE \
                     shard = {shard}`"
                ),
            ),
            None => {
                let quoted = owner.replace('\'', "''");
                Finding::new(
                    "leases",
                    Level::Warning,
                    format!("the relay {owner} counts as alive until {until}: the others leave it its share"),
                    format!("run `DELETE FROM outbox.relay WHERE owner = '{quoted}'`"),
                )
            }
        });
    }
    let asked = sqlx::query_as(include_str!("../../queries/doctor_relays.sql"))
        .bind(FAR.as_secs_f64())
        .fetch_one(connection);
    let (alive, gone): (i64, i64) = answer("counting relays", PATIENCE, asked).await?;
    findings.push(match (alive, gone) {
        (0, _) => Finding::new(
            "relays",
            Level::Warning,
            "no relay runs: nothing is published",
            "start `baton relay`",
        ),
        (_, 0) => Finding::ok("relays", format!("{alive} run")),
        (_, gone) => Finding::new(
            "relays",
            Level::Note,
            format!("{alive} run; {gone} on the list died more than a day ago"),
            "nothing: the next relay that stops takes them off the list",
        ),
    });
    Ok(())
}

async fn stopped(connection: &mut PgConnection, findings: &mut Vec<Finding>) -> Result<(), Error> {
    let stopped: Vec<Finding> = status::stopped(connection)
        .await?
        .into_iter()
        .map(|(shard, stopped)| {
            let status::Stopped { id, topic, cause, error, advice, age_seconds, .. } = stopped;
            let found = format!(
                "shard {shard} stands still at the message {id} for the topic {topic} for {}: {cause}: {error}",
                lasted(age_seconds)
            );
            Finding::new("shards", Level::Error, found, advice.unwrap_or("see the relay's log"))
        })
        .collect();
    if stopped.is_empty() {
        findings.push(Finding::ok("shards", "none stands still for want of room for what Kafka refuses"));
    }
    findings.extend(stopped);
    Ok(())
}

async fn parked(connection: &mut PgConnection, findings: &mut Vec<Finding>) -> Result<(), Error> {
    let parked = status::parked(connection).await?;
    let causes: Vec<String> =
        parked.by_cause.iter().map(|(cause, count)| format!("{count} {cause}")).collect();
    let causes = causes.join(", ");
    let waiting = parked.retrying + parked.blocked + parked.dead;
    if parked.dead > 0 {
        let found = format!(
            "{} messages are dead, {} wait behind them or are tried ({causes})",
            parked.dead,
            waiting - parked.dead
        );
        let advice = "look at `baton parked list --state dead`, mend what it says, then `baton parked requeue` or `discard`";
        findings.push(Finding::new("parked", Level::Error, found, advice));
    } else if waiting > 0 {
        let found = format!("{waiting} messages are parked, none of them dead ({causes})");
        let advice = "look at `baton parked list` and mend what it says; they are tried by themselves";
        findings.push(Finding::new("parked", Level::Warning, found, advice));
    } else {
        findings.push(Finding::ok("parked", "nothing is parked because Kafka refuses it"));
    }
    if !parked.paused_topics.is_empty() {
        let found = format!("operators have paused {}", parked.paused_topics.join(", "));
        findings.push(Finding::new(
            "parked",
            Level::Note,
            found,
            "`baton resume --topic …` publishes what waits",
        ));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sound() -> Server {
        Server {
            version: 150_018,
            fsync: true,
            full_page_writes: true,
            autovacuum: true,
            synchronous_commit: "on".to_owned(),
            connections_left: 90,
            sees_all: true,
            role: "app".to_owned(),
        }
    }

    #[test]
    fn a_server_as_it_is_installed_is_well() {
        let mut findings = Vec::new();
        judge_server(&sound(), &mut findings);
        assert!(findings.len() == 1 && findings[0].level == Level::Ok, "{findings:?}");
    }

    #[test]
    fn a_transaction_of_another_database_is_not_blamed_for_what_it_does_not_hold_back() {
        let here = Transaction {
            pid: 7,
            role: "app".to_owned(),
            database: "shop".to_owned(),
            application: String::new(),
            state: "idle in transaction".to_owned(),
            age: 600.0,
            is_here: true,
        };
        let found = judge_transaction(&here);
        assert!(found.level == Level::Warning && found.found.contains("vacuum cannot clear"), "{found:?}");
        let elsewhere = judge_transaction(&Transaction { is_here: false, ..here });
        assert!(
            elsewhere.level == Level::Note && !elsewhere.found.contains("vacuum cannot"),
            "{elsewhere:?}"
        );
        let prepared = Prepared {
            gid: "o'clock".to_owned(),
            role: String::new(),
            database: "shop".to_owned(),
            age: 1.0,
            is_here: true,
        };
        let found = judge_prepared(&prepared);
        assert!(found.level == Level::Warning && found.advice.unwrap().contains("'o''clock'"));
        assert_eq!(judge_prepared(&Prepared { is_here: false, ..prepared }).level, Level::Note);
    }

    #[test]
    fn each_setting_that_costs_or_risks_something_is_named_with_what_to_do() {
        for (server, level, words, to_do) in [
            (Server { version: 140_005, ..sound() }, Level::Error, "Postgres 14 is older", "15 or newer"),
            (Server { fsync: false, ..sound() }, Level::Warning, "fsync is off", "SET fsync = on"),
            (
                Server { full_page_writes: false, ..sound() },
                Level::Warning,
                "full_page_writes is off",
                "SET full_page_writes = on",
            ),
            (Server { autovacuum: false, ..sound() }, Level::Warning, "autovacuum is off", "autovacuum = on"),
            (
                Server { synchronous_commit: "off".to_owned(), ..sound() },
                Level::Note,
                "synchronous_commit is off",
                "turn it on",
            ),
            (
                Server { connections_left: 4, ..sound() },
                Level::Warning,
                "4 connections are left",
                "max_connections",
            ),
        ] {
            let mut findings = Vec::new();
            judge_server(&server, &mut findings);
            let [Finding { level: seen, found, advice: Some(advice), .. }] = findings.as_slice() else {
                panic!("{findings:?}")
            };
            assert!(*seen == level && found.contains(words) && advice.contains(to_do), "{findings:?}");
        }
    }
}
