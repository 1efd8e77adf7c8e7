//! What all benchmarks share: the two servers, the programs, and how much is to be measured.

use std::path::PathBuf;

use sqlx::{Connection as _, PgConnection};

use crate::arena::Arena;
use crate::proc::Servers;

pub(crate) type Result<T> = std::result::Result<T, Box<dyn std::error::Error + Send + Sync>>;

/// How much is measured.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Tier {
    /// What the bars are stated for.
    Full,
    /// About a minute for one benchmark, to see whether something broke.
    Quick,
}

impl Tier {
    pub(crate) fn choose<T>(self, full: T, quick: T) -> T {
        match self {
            Self::Full => full,
            Self::Quick => quick,
        }
    }
}

#[derive(Debug)]
pub(crate) struct Lab {
    pub(crate) admin_url: String,
    pub(crate) brokers: String,
    /// Where `baton` lies.
    pub(crate) bin: PathBuf,
    pub(crate) servers: Servers,
    pub(crate) tier: Tier,
    /// The server's version and the database's time of day, for the record of a run.
    pub(crate) postgres: String,
    pub(crate) date: String,
}

impl Lab {
    pub(crate) async fn open(tier: Tier) -> Result<Self> {
        let variable = |name: &str| {
            std::env::var(name).map_err(|_| {
                format!("{name} is not set: run `cargo xtask bench`, or eval \"$(cargo xtask env)\"")
            })
        };
        let (admin_url, brokers) = (variable("DATABASE_URL")?, variable("KAFKA_BROKERS")?);
        let own = std::env::current_exe()?;
        let bin = match std::env::var_os("BATON_BIN_DIR") {
            Some(bin) => PathBuf::from(bin),
            None => own.parent().ok_or("this program lies nowhere")?.to_owned(),
        };
        let baton = bin.join("baton");
        if !baton.is_file() {
            return Err(
                format!("{} is not there: run `cargo build --workspace --bins`", baton.display()).into()
            );
        }
        let mut admin = PgConnection::connect(&admin_url).await?;
        let (postgres, date): (String, String) = sqlx::query_as(
            r#"SELECT current_setting('server_version'), to_char(now() AT TIME ZONE 'UTC', 'YYYY-MM-DD"T"HH24:MI:SS"Z"')"#,
        )
        .fetch_one(&mut admin)
        .await?;
        let servers = Servers::find(&mut admin, &brokers).await?;
        Ok(Self { admin_url, brokers, bin, servers, tier, postgres, date })
    }

    /// A database and a topic that nobody else uses.
    pub(crate) async fn arena(&self) -> Result<Arena> {
        Arena::open(self).await
    }
}
