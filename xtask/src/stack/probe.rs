//! Asking a server whether it serves, in its own protocol and without a password.
//!
//! Postgres gets a startup message: a request for authentication means that it accepts sessions, SQLSTATE
//! 57P03 that it is still starting or already stopping. Kafka gets a Metadata request: it serves once it
//! names at least one live broker (a port that is open says nothing, it opens long before).

use std::io::{self, Read, Write};
use std::net::{TcpStream, ToSocketAddrs};
use std::time::Duration;

const TIMEOUT: Duration = Duration::from_secs(3);

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Answer {
    Ready,
    /// Why not, for people.
    NotReady(String),
}

/// `address` is `host:port`.
pub(crate) fn postgres(address: &str) -> Answer {
    match ask_postgres(address) {
        Ok(answer) => answer,
        Err(error) => Answer::NotReady(error.to_string()),
    }
}

/// `address` is `host:port`.
pub(crate) fn kafka(address: &str) -> Answer {
    match ask_kafka(address) {
        Ok(0) => Answer::NotReady("it knows of no live broker yet".to_owned()),
        Ok(_) => Answer::Ready,
        Err(error) => Answer::NotReady(error.to_string()),
    }
}

fn connect(address: &str) -> io::Result<TcpStream> {
    let mut last = io::Error::new(io::ErrorKind::NotFound, "the host name has no address");
    for address in address.to_socket_addrs()? {
        match TcpStream::connect_timeout(&address, TIMEOUT) {
            Ok(stream) => {
                stream.set_read_timeout(Some(TIMEOUT))?;
                stream.set_write_timeout(Some(TIMEOUT))?;
                return Ok(stream);
            }
            Err(error) => last = error,
        }
    }
    Err(last)
}

fn ask_postgres(address: &str) -> io::Result<Answer> {
    const PROTOCOL: i32 = 3 << 16;
    let mut message = PROTOCOL.to_be_bytes().to_vec();
    message.extend_from_slice(b"user\0baton\0database\0baton\0\0");
    let mut stream = connect(address)?;
    // The length counts itself.
    write_sized(&mut stream, &message, 4)?;
    let mut kind = [0];
    stream.read_exact(&mut kind)?;
    let body = read_sized(&mut stream, 4)?;
    Ok(match kind[0] {
        b'R' => Answer::Ready,
        b'E' => refusal(&body),
        _ => Answer::NotReady("what answers there is not Postgres".to_owned()),
    })
}

/// An ErrorResponse: fields of one letter and a text. Any refusal but "starting up" comes from a server
/// that serves; whom it lets in is for the real clients to find out.
fn refusal(body: &[u8]) -> Answer {
    let field = |letter: u8| {
        body.split(|byte| *byte == 0)
            .find(|field| field.first() == Some(&letter))
            .map(|field| String::from_utf8_lossy(&field[1..]).into_owned())
    };
    match field(b'C').as_deref() {
        Some("57P03") => Answer::NotReady(field(b'M').unwrap_or_default()),
        _ => Answer::Ready,
    }
}

/// How many live brokers the one at `address` knows of.
fn ask_kafka(address: &str) -> io::Result<i32> {
    const METADATA: i16 = 3;
    const VERSION: i16 = 1;
    const CORRELATION: i32 = 0x6261;
    let mut request = Vec::new();
    request.extend_from_slice(&METADATA.to_be_bytes());
    request.extend_from_slice(&VERSION.to_be_bytes());
    request.extend_from_slice(&CORRELATION.to_be_bytes());
    request.extend_from_slice(&5_i16.to_be_bytes());
    request.extend_from_slice(b"xtask");
    // No topic is asked for, so the answer begins with the brokers and is small.
    request.extend_from_slice(&0_i32.to_be_bytes());
    let mut stream = connect(address)?;
    write_sized(&mut stream, &request, 0)?;
    let body = read_sized(&mut stream, 0)?;
    match (number(&body, 0), number(&body, 4)) {
        (Some(CORRELATION), Some(brokers)) => Ok(brokers),
        _ => Err(io::Error::new(io::ErrorKind::InvalidData, "what answers there is not Kafka")),
    }
}

fn number(body: &[u8], at: usize) -> Option<i32> {
    Some(i32::from_be_bytes(body.get(at..at + 4)?.try_into().ok()?))
}

fn write_sized(stream: &mut TcpStream, body: &[u8], own: usize) -> io::Result<()> {
    let size = i32::try_from(body.len() + own).map_err(io::Error::other)?;
    let mut message = size.to_be_bytes().to_vec();
    message.extend_from_slice(body);
    stream.write_all(&message)
}

fn read_sized(stream: &mut impl Read, own: usize) -> io::Result<Vec<u8>> {
    const LIMIT: usize = 1 << 20;
    let mut size = [0; 4];
    stream.read_exact(&mut size)?;
    let size = usize::try_from(i32::from_be_bytes(size)).ok().and_then(|size| size.checked_sub(own));
    let Some(size) = size.filter(|size| *size <= LIMIT) else {
        return Err(io::Error::new(io::ErrorKind::InvalidData, "the answer is in another protocol"));
    };
    let mut body = vec![0; size];
    stream.read_exact(&mut body)?;
    Ok(body)
}

#[cfg(test)]
mod tests {
    use std::net::TcpListener;
    use std::thread;

    use super::*;

    /// A server that reads one request and answers with these bytes.
    fn answering(bytes: &'static [u8]) -> String {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap().to_string();
        thread::spawn(move || {
            let (mut stream, _) = listener.accept().unwrap();
            let mut request = [0; 256];
            let _ = stream.read(&mut request);
            stream.write_all(bytes).unwrap();
        });
        address
    }

    #[test]
    fn postgres_that_asks_for_a_password_is_ready() {
        assert_eq!(postgres(&answering(b"R\0\0\0\x08\0\0\0\x03")), Answer::Ready);
    }

    #[test]
    fn postgres_that_is_starting_is_not_ready() {
        let answer = postgres(&answering(b"E\0\0\0\x18C57P03\0Mstarting up\0\0"));
        assert_eq!(answer, Answer::NotReady("starting up".to_owned()));
    }

    #[test]
    fn postgres_that_refuses_this_user_is_ready() {
        assert_eq!(postgres(&answering(b"E\0\0\0\x11C28000\0Mno\0\0\0")), Answer::Ready);
    }

    #[test]
    fn kafka_without_a_live_broker_is_not_ready() {
        let none = answering(b"\0\0\0\x08\0\0\x62\x61\0\0\0\0");
        assert!(matches!(kafka(&none), Answer::NotReady(_)));
        assert_eq!(kafka(&answering(b"\0\0\0\x08\0\0\x62\x61\0\0\0\x01")), Answer::Ready);
    }

    #[test]
    fn another_server_on_the_port_is_not_taken_for_ours() {
        let web = b"HTTP/1.1 400 Bad Request\r\n\r\n";
        assert!(matches!(postgres(&answering(web)), Answer::NotReady(_)));
        assert!(matches!(kafka(&answering(web)), Answer::NotReady(_)));
    }

    #[test]
    fn a_closed_port_is_not_ready() {
        let address = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().to_string();
        assert!(matches!(kafka(&address), Answer::NotReady(_)));
    }
}
