//! What `up` writes down about the stack it started, so that the next command finds the same one.
//!
//! The record is a memory of choices (ports, mark, which Postgres), never a claim that something runs:
//! every reader asks the processes and the ports themselves. It is replaced atomically.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use crate::error::{Error, Result};

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Way {
    Native,
    /// `owned`: the services were not running before `up`, so `down` may end them.
    Compose {
        owned: bool,
    },
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Record {
    pub(crate) way: Way,
    pub(crate) database_url: String,
    pub(crate) kafka_brokers: String,
    /// The random id that every process of a native stack has in its command line.
    pub(crate) mark: String,
    /// Which Postgres the native stack runs, `debian-15` for example.
    pub(crate) postgres: String,
    /// Where that Postgres keeps its data (see [`super::postgres`] for why it may be elsewhere).
    pub(crate) postgres_home: PathBuf,
    pub(crate) postgres_port: u16,
    pub(crate) kafka_port: u16,
    pub(crate) controller_port: u16,
    /// Kafka's second listener, and the port it advertises for it, where a test may put a proxy before it. 0 in the
    /// record of a stack that has none.
    pub(crate) proxied_port: u16,
    pub(crate) proxy_port: u16,
}

impl Record {
    fn path(stack: &Path) -> PathBuf {
        stack.join("record")
    }

    /// The record of the stack in this directory, if it was made there: a copied or moved directory would
    /// otherwise take the original's processes for its own.
    ///
    /// # Errors
    ///
    /// When the file is there but cannot be read or understood.
    pub(crate) fn load(stack: &Path) -> Result<Option<Self>> {
        let path = Self::path(stack);
        let text = match fs::read_to_string(&path) {
            Ok(text) => text,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(error) => return Err(Error::io("read", &path)(error)),
        };
        let (made_in, record) = Self::parse(&text).ok_or_else(|| {
            Error::failed(format!(
                "{} cannot be understood: delete it, and end by hand the processes that use {}",
                path.display(),
                stack.display()
            ))
        })?;
        Ok((made_in == stack).then_some(record))
    }

    pub(crate) fn save(&self, stack: &Path) -> Result<()> {
        let path = Self::path(stack);
        let draft = stack.join("record.new");
        fs::write(&draft, self.print(stack)).map_err(Error::io("write", &draft))?;
        fs::rename(&draft, &path).map_err(Error::io("replace", &path))
    }

    fn print(&self, stack: &Path) -> String {
        let way = match self.way {
            Way::Native => "native",
            Way::Compose { owned: true } => "compose",
            Way::Compose { owned: false } => "compose-of-others",
        };
        format!(
            "made_in={}\nway={way}\ndatabase_url={}\nkafka_brokers={}\nmark={}\npostgres={}\n\
             postgres_home={}\npostgres_port={}\nkafka_port={}\ncontroller_port={}\nproxied_port={}\n\
             proxy_port={}\n",
            stack.display(),
            self.database_url,
            self.kafka_brokers,
            self.mark,
            self.postgres,
            self.postgres_home.display(),
            self.postgres_port,
            self.kafka_port,
            self.controller_port,
            self.proxied_port,
            self.proxy_port,
        )
    }

    fn parse(text: &str) -> Option<(PathBuf, Self)> {
        let value = |key: &str| {
            text.lines().find_map(|line| line.strip_prefix(key)?.strip_prefix('=')).map(str::to_owned)
        };
        let way = match value("way")?.as_str() {
            "native" => Way::Native,
            "compose" => Way::Compose { owned: true },
            "compose-of-others" => Way::Compose { owned: false },
            _ => return None,
        };
        let record = Self {
            way,
            database_url: value("database_url")?,
            kafka_brokers: value("kafka_brokers")?,
            mark: value("mark")?,
            postgres: value("postgres")?,
            postgres_home: value("postgres_home")?.into(),
            postgres_port: value("postgres_port")?.parse().ok()?,
            kafka_port: value("kafka_port")?.parse().ok()?,
            controller_port: value("controller_port")?.parse().ok()?,
            proxied_port: value("proxied_port").map_or(Some(0), |port| port.parse().ok())?,
            proxy_port: value("proxy_port").map_or(Some(0), |port| port.parse().ok())?,
        };
        Some((value("made_in")?.into(), record))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_record_reads_back_as_it_was_written() {
        for way in [Way::Native, Way::Compose { owned: true }, Way::Compose { owned: false }] {
            let record = Record {
                way,
                database_url: "postgres://baton:baton@127.0.0.1:1/baton?a=b".to_owned(),
                kafka_brokers: "127.0.0.1:2".to_owned(),
                mark: "m".to_owned(),
                postgres: "debian-15".to_owned(),
                postgres_home: "/var/tmp/x".into(),
                postgres_port: 1,
                kafka_port: 2,
                controller_port: 3,
                proxied_port: 4,
                proxy_port: 5,
            };
            let read = Record::parse(&record.print(Path::new("/s"))).unwrap();
            assert_eq!(read, (PathBuf::from("/s"), record));
        }
    }

    #[test]
    fn a_record_from_before_the_second_listener_is_read() {
        let old = "made_in=/s\nway=native\ndatabase_url=u\nkafka_brokers=b\nmark=m\npostgres=debian-15\n\
                   postgres_home=/h\npostgres_port=1\nkafka_port=2\ncontroller_port=3\n";
        let (_, record) = Record::parse(old).unwrap();
        assert_eq!((record.controller_port, record.proxied_port, record.proxy_port), (3, 0, 0));
    }

    #[test]
    fn a_torn_record_is_not_read() {
        assert_eq!(Record::parse("made_in=/s\nway=native\n"), None);
    }
}
