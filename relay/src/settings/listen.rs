//! Where the relay answers HTTP.

use std::fmt;
use std::str::FromStr;

/// An address to listen on, or none.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Listen {
    /// Nothing is served.
    Off,
    /// `host:port`; port 0 is any free one.
    At(String),
}

impl Default for Listen {
    /// `127.0.0.1:9464`: this machine only, because what is served names topics and owners.
    fn default() -> Self {
        Self::At("127.0.0.1:9464".to_owned())
    }
}

impl fmt::Display for Listen {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Off => "off",
            Self::At(address) => address,
        })
    }
}

impl FromStr for Listen {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let text = text.trim();
        if text == "off" {
            return Ok(Self::Off);
        }
        let port = |text: &str| text.parse::<u16>().ok();
        match text.rsplit_once(':') {
            // A bare IPv6 address has colons of its own, so it stands in brackets.
            Some((host, number))
                if port(number).is_some()
                    && !host.is_empty()
                    && (!host.contains(':') || host.starts_with('[') && host.ends_with(']')) =>
            {
                Ok(Self::At(text.to_owned()))
            }
            _ => Err(format!(
                "`{text}` is not an address; write host:port like 127.0.0.1:9464 or [::]:9464 (port 0 = any free one), or off"
            )),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_is_a_host_and_a_port_or_off() {
        for text in ["127.0.0.1:9464", "0.0.0.0:0", "[::1]:65535", "localhost:80", "off"] {
            assert_eq!(text.parse::<Listen>().map(|listen| listen.to_string()), Ok(text.to_owned()));
        }
        for text in
            ["", "on", "9464", ":9464", "localhost", "localhost:", "::1:9464", "127.0.0.1:65536", "a:b"]
        {
            let error = text.parse::<Listen>().unwrap_err();
            assert!(error.contains("host:port") && error.contains("off"), "{text}: {error}");
        }
    }
}
