//! HTTP as far as tests need it: one request over a connection of its own, and Prometheus' text format read strictly.

use std::collections::BTreeMap;
use std::time::Duration;

use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tokio::time::timeout;

use crate::failure::{Failure, Outcome};
use crate::process::Process;
use crate::wait::eventually;

/// How long an answer may take: longer than anything that serves tests promises.
const PATIENCE: Duration = Duration::from_secs(20);

/// What came back.
#[derive(Debug, Clone)]
pub struct Answer {
    /// The status code.
    pub code: u16,
    head: String,
    /// The body, as text.
    pub body: String,
}

impl Answer {
    /// A header's value.
    #[must_use]
    pub fn header(&self, name: &str) -> Option<&str> {
        self.head.lines().skip(1).find_map(|line| {
            let (found, value) = line.split_once(':')?;
            found.eq_ignore_ascii_case(name).then(|| value.trim())
        })
    }
}

/// GET.
///
/// # Errors
///
/// When nobody answers in time, or not in HTTP.
pub async fn get(address: &str, path: &str) -> Outcome<Answer> {
    request(address, "GET", path).await
}

/// A request without a body.
///
/// # Errors
///
/// As [`get`].
pub async fn request(address: &str, method: &str, path: &str) -> Outcome<Answer> {
    send(address, method, path, &[], &[]).await
}

/// A request with headers of its own and a body.
///
/// # Errors
///
/// As [`get`].
pub async fn send(
    address: &str,
    method: &str,
    path: &str,
    headers: &[(&str, &str)],
    body: &[u8],
) -> Outcome<Answer> {
    let mut request = format!(
        "{method} {path} HTTP/1.1\r\nHost: {address}\r\nContent-Length: {}\r\nConnection: close\r\n",
        body.len()
    );
    for (name, value) in headers {
        request.push_str(&format!("{name}: {value}\r\n"));
    }
    request.push_str("\r\n");
    let exchange = async {
        let mut stream = TcpStream::connect(address).await?;
        stream.write_all(request.as_bytes()).await?;
        stream.write_all(body).await?;
        let mut answer = Vec::new();
        stream.read_to_end(&mut answer).await?;
        Ok::<_, std::io::Error>(answer)
    };
    let asked = || format!("{method} http://{address}{path}");
    let answer = match timeout(PATIENCE, exchange).await {
        Ok(answer) => answer.map_err(|error| Failure::from(error).during(asked()))?,
        Err(_) => crate::fail!("{} was not answered within {PATIENCE:?}", asked()),
    };
    let text = String::from_utf8_lossy(&answer);
    let Some((head, body)) = text.split_once("\r\n\r\n") else {
        crate::fail!("{} was answered by {text:?}", asked());
    };
    let code = head.split(' ').nth(1).and_then(|code| code.parse().ok());
    let code = code.ok_or_else(|| Failure::new(format!("{} was answered by {head:?}", asked())))?;
    Ok(Answer { code, head: head.to_owned(), body: body.to_owned() })
}

/// Where a relay with `http.listen = 127.0.0.1:0` serves, as its log says.
///
/// # Errors
///
/// When it does not say so for half a minute.
pub async fn address_of(relay: &Process) -> Outcome<String> {
    eventually("the relay's log to name its address", Duration::from_secs(30), async || {
        let log = relay.stderr();
        let named = log.split_once("serves http://").and_then(|(_, rest)| rest.split_once('/'));
        named.map(|(address, _)| address.to_owned()).ok_or_else(|| Failure::new(log))
    })
    .await
}

/// A page of metrics.
#[derive(Debug)]
pub struct Exposition {
    /// The type of each metric.
    pub types: BTreeMap<String, String>,
    /// Each series, as it is written, with its value.
    pub series: BTreeMap<String, f64>,
}

impl Exposition {
    /// Reads the text format 0.0.4: every sample belongs to the metric announced above it, none twice; histograms rise.
    ///
    /// # Errors
    ///
    /// Names the first line that is not as the format says.
    pub fn read(text: &str) -> Outcome<Self> {
        let mut page = Self { types: BTreeMap::new(), series: BTreeMap::new() };
        let (mut helped, mut current) = (String::new(), (String::new(), String::new()));
        let mut bucket = 0.0;
        for line in text.lines() {
            let wrong = |what: &str| Failure::new(format!("{what}: {line}"));
            if let Some(rest) = line.strip_prefix("# HELP ") {
                let (name, help) = rest.split_once(' ').ok_or_else(|| wrong("no help"))?;
                if help.len() < 10 {
                    return Err(wrong("help that does not help"));
                }
                name.clone_into(&mut helped);
                continue;
            }
            if let Some(rest) = line.strip_prefix("# TYPE ") {
                let (name, kind) = rest.split_once(' ').ok_or_else(|| wrong("no type"))?;
                if name != helped {
                    return Err(wrong("a type without its help"));
                }
                if page.types.insert(name.to_owned(), kind.to_owned()).is_some() {
                    return Err(wrong("announced twice"));
                }
                current = (name.to_owned(), kind.to_owned());
                bucket = 0.0;
                continue;
            }
            let (series, value) = line.rsplit_once(' ').ok_or_else(|| wrong("no value"))?;
            let value: f64 = value.parse().map_err(|_| wrong("a value that is no number"))?;
            let name = series.split('{').next().unwrap_or_default();
            let suffix = name.strip_prefix(&current.0).ok_or_else(|| wrong("a sample of another metric"))?;
            let allowed: &[&str] =
                if current.1 == "histogram" { &["_bucket", "_sum", "_count"] } else { &[""] };
            if !allowed.contains(&suffix) {
                return Err(wrong("not a sample of this type"));
            }
            if suffix == "_bucket" {
                if value < bucket {
                    return Err(wrong("a bucket below the one before"));
                }
                bucket = value;
            }
            if page.series.insert(series.to_owned(), value).is_some() {
                return Err(wrong("twice"));
            }
        }
        Ok(page)
    }

    /// The value of one series, labels and all, as `name{label="value"}`.
    ///
    /// # Errors
    ///
    /// When there is none.
    pub fn value(&self, series: &str) -> Outcome<f64> {
        let found = self.series.get(series).copied();
        found.ok_or_else(|| {
            let there: Vec<_> = self.series.keys().collect();
            Failure::new(format!("there is no {series} among {there:?}"))
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const GOOD: &str = "# HELP a_total What it counts.\n# TYPE a_total counter\na_total{x=\"1\"} 3\n\
        # HELP h_seconds How long it takes.\n# TYPE h_seconds histogram\nh_seconds_bucket{le=\"1.0\"} 1\n\
        h_seconds_bucket{le=\"+Inf\"} 2\nh_seconds_sum 1.5\nh_seconds_count 2\n";

    #[test]
    fn a_page_of_metrics_is_read() {
        let page = Exposition::read(GOOD).unwrap();
        assert_eq!(page.types["a_total"], "counter");
        assert_eq!(page.value("a_total{x=\"1\"}").unwrap(), 3.0);
        assert!(page.value("a_total").is_err());
    }

    #[test]
    fn what_a_scraper_would_refuse_is_refused() {
        for (from, to) in [
            ("# TYPE a_total counter\n", ""),
            ("a_total{x=\"1\"} 3", "a_total{x=\"1\"} three"),
            ("a_total{x=\"1\"} 3\n", "a_total{x=\"1\"} 3\na_total{x=\"1\"} 3\n"),
            ("le=\"+Inf\"} 2", "le=\"+Inf\"} 0"),
            ("h_seconds_sum", "g_seconds_sum"),
            ("# HELP a_total What it counts.\n", ""),
        ] {
            assert!(GOOD.contains(from), "{from}");
            assert!(Exposition::read(&GOOD.replacen(from, to, 1)).is_err(), "{to}");
        }
    }
}
