//! A database for each test, dropped at its end, with the roles made for it, whatever happened in it.

use std::path::Path;

use std::panic::{AssertUnwindSafe, resume_unwind};
use std::str::FromStr as _;
use std::time::Duration;

use baton_migrations::{migrate_inbox, migrate_outbox};
use futures_util::FutureExt as _;
use sqlx::migrate::{Migration, MigrationType, Migrator};
use sqlx::postgres::PgConnectOptions;
use sqlx::{AssertSqlSafe, Connection as _, Executor as _, PgConnection, SqlSafeStr as _};

/// An empty database of a test's own.
pub(crate) struct Database {
    options: PgConnectOptions,
    pub(crate) name: String,
}

/// Runs a test on an empty database, for at most a minute.
pub(crate) async fn empty(test: impl AsyncFnOnce(&Database)) {
    with_options("", test).await;
}

/// Runs a test on a database with an outbox of 8 shards.
pub(crate) async fn outbox(test: impl AsyncFnOnce(&Database)) {
    empty(async |db| {
        migrate_outbox(&mut db.connect().await, None, None).await.expect("migrate outbox");
        test(db).await;
    })
    .await;
}

/// The numbers of the files in `outbox/`, in order: what a new outbox is made by.
pub(crate) fn outbox_versions() -> Vec<i64> {
    let mut versions: Vec<i64> = texts("outbox").into_iter().map(|(version, _)| version).collect();
    versions.sort_unstable();
    versions
}

/// The numbered files of a line of migrations.
pub(crate) fn texts(line: &str) -> Vec<(i64, String)> {
    let directory = Path::new(env!("CARGO_MANIFEST_DIR")).join(line);
    let files = std::fs::read_dir(directory)
        .expect("read a line of migrations")
        .map(|file| file.expect("a file").path());
    files
        .filter_map(|path| {
            let version = path.file_name()?.to_str()?.split_once('_')?.0.parse().ok()?;
            Some((version, std::fs::read_to_string(&path).expect("read a migration")))
        })
        .collect()
}

/// Runs a test on a database whose outbox, of 8 shards, an older baton migrated: up to this version, from 2 on.
pub(crate) async fn outbox_of(version: i64, test: impl AsyncFnOnce(&Database)) {
    empty(async |db| {
        let mut texts = texts("outbox");
        texts.retain(|(number, _)| *number <= version);
        texts.sort();
        let migrations = texts.into_iter().map(|(number, text)| {
            let text = AssertSqlSafe(text).into_sql_str();
            Migration::new(number, "older".into(), MigrationType::Simple, text, false)
        });
        let mut migrator = Migrator::with_migrations(migrations.collect());
        migrator.dangerous_set_table_name("outbox._migrations");
        migrator.create_schema("outbox");
        let mut c = db.connect().await;
        migrator.run_direct(None, &mut c, false).await.expect("migrate as an older baton");
        for (sql, number) in [
            (include_str!("../../queries/settings_insert.sql"), 8),
            (include_str!("../../queries/shards_insert.sql"), 8),
            (include_str!("../../queries/cursors_insert.sql"), 0_i64),
        ] {
            let mut query = sqlx::query(sql).bind(number);
            if sql.contains("$2") {
                query = query.bind(3_600_000_000_i64);
            }
            query.execute(&mut c).await.expect("settings as an older baton makes them");
        }
        test(db).await;
    })
    .await;
}

/// Runs a test on a database with an inbox.
pub(crate) async fn inbox(test: impl AsyncFnOnce(&Database)) {
    empty(async |db| {
        migrate_inbox(&mut db.connect().await).await.expect("migrate inbox");
        test(db).await;
    })
    .await;
}

/// Runs a test on an empty database made with these options of `CREATE DATABASE`.
pub(crate) async fn with_options(create: &str, test: impl AsyncFnOnce(&Database)) {
    let url = std::env::var("DATABASE_URL")
        .expect("DATABASE_URL says where a Postgres is; cargo xtask env prints it");
    let options = PgConnectOptions::from_str(&url).expect("DATABASE_URL is a Postgres address");
    let mut admin = PgConnection::connect_with(&options).await.expect("connect to DATABASE_URL");
    let name = format!("baton_migrations_{:016x}", fastrand::u64(..));
    admin
        .execute(AssertSqlSafe(format!("CREATE DATABASE {name} {create}")))
        .await
        .expect("create a database");

    let database = Database { options: options.database(&name), name: name.clone() };
    let test = AssertUnwindSafe(test(&database)).catch_unwind();
    let outcome = tokio::time::timeout(Duration::from_secs(60), test).await;

    admin
        .execute(AssertSqlSafe(format!("DROP DATABASE {name} WITH (FORCE)")))
        .await
        .expect("drop the database");
    // Roles belong to the whole cluster; what they owned went with the database.
    let roles: Vec<String> =
        sqlx::query_scalar("SELECT rolname::text FROM pg_roles WHERE starts_with(rolname::text, $1)")
            .bind(&name)
            .fetch_all(&mut admin)
            .await
            .expect("list the test's roles");
    for role in roles {
        admin.execute(AssertSqlSafe(format!("DROP ROLE {role}"))).await.expect("drop a login role");
    }
    if let Err(panic) = outcome.expect("a test takes at most a minute") {
        resume_unwind(panic);
    }
}

impl Database {
    pub(crate) async fn connect(&self) -> PgConnection {
        PgConnection::connect_with(&self.options).await.expect("connect to the test's database")
    }

    /// A connection of a new login role with these attributes of `CREATE ROLE`.
    pub(crate) async fn login(&self, attributes: &str) -> Login {
        let role = format!("{}_{:08x}", self.name, fastrand::u32(..));
        let mut admin = self.connect().await;
        let create = format!("CREATE ROLE {role} LOGIN PASSWORD 'correct horse' {attributes}");
        admin.execute(AssertSqlSafe(create)).await.expect("create a login role");
        let options = self.options.clone().username(&role).password("correct horse");
        let connection = PgConnection::connect_with(&options).await.expect("connect as the login role");
        Login { connection, role }
    }
}

/// A connection as a role of its own.
pub(crate) struct Login {
    pub(crate) connection: PgConnection,
    pub(crate) role: String,
}

/// The error code and constraint with which Postgres refuses a statement.
pub(crate) async fn refusal(connection: &mut PgConnection, sql: &str) -> (String, Option<String>) {
    let error = connection.execute(AssertSqlSafe(sql)).await.expect_err("the statement should be refused");
    let error = error.into_database_error().expect("refused by the database");
    (error.code().expect("a code").into_owned(), error.constraint().map(str::to_owned))
}

/// One value of a query.
pub(crate) async fn value<T>(connection: &mut PgConnection, sql: &'static str) -> T
where
    T: Send + Unpin + for<'r> sqlx::Decode<'r, sqlx::Postgres> + sqlx::Type<sqlx::Postgres>,
{
    sqlx::query_scalar(sql).fetch_one(connection).await.expect(sql)
}
