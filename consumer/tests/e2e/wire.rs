//! Kafka's protocol by hand, as far as a record needs it that no client library would produce or show.

use std::time::Duration;

use rdkafka::ClientConfig;
use rdkafka::consumer::{BaseConsumer, Consumer};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

use crate::fixture::brokers;

/// Produces one record to partition 0 with headers of any bytes.
pub(crate) async fn produce(topic: &str, payload: &[u8], headers: &[(&[u8], &[u8])]) {
    let mut record = vec![0];
    varint(&mut record, 0);
    varint(&mut record, 0);
    varint(&mut record, -1);
    bytes(&mut record, payload);
    varint(&mut record, i64::try_from(headers.len()).unwrap());
    for (name, value) in headers {
        bytes(&mut record, name);
        bytes(&mut record, value);
    }
    let mut framed = Vec::new();
    bytes(&mut framed, &record);

    // From the attributes on, which is what the checksum covers.
    let mut body = Vec::new();
    body.extend(0_i16.to_be_bytes());
    body.extend(0_i32.to_be_bytes());
    body.extend(1_700_000_000_000_i64.to_be_bytes());
    body.extend(1_700_000_000_000_i64.to_be_bytes());
    body.extend((-1_i64).to_be_bytes());
    body.extend((-1_i16).to_be_bytes());
    body.extend((-1_i32).to_be_bytes());
    body.extend(1_i32.to_be_bytes());
    body.extend(&framed);

    let mut batch = Vec::new();
    batch.extend(0_i64.to_be_bytes());
    batch.extend(i32::try_from(body.len() + 9).unwrap().to_be_bytes());
    batch.extend((-1_i32).to_be_bytes());
    batch.push(2);
    batch.extend(crc32c(&body).to_be_bytes());
    batch.extend(&body);

    let mut request = Vec::new();
    request.extend((-1_i16).to_be_bytes());
    request.extend((-1_i16).to_be_bytes());
    request.extend(10_000_i32.to_be_bytes());
    request.extend(1_i32.to_be_bytes());
    string(&mut request, topic);
    request.extend(1_i32.to_be_bytes());
    request.extend(0_i32.to_be_bytes());
    request.extend(i32::try_from(batch.len()).unwrap().to_be_bytes());
    request.extend(&batch);
    let answer = call(topic, 0, 3, &request).await;
    // Array, topic, array, partition, then the error code.
    let at = 4 + 2 + topic.len() + 4 + 4;
    assert_eq!(answer[at..at + 2], [0, 0], "the broker refuses the record: {answer:?}");
}

/// The bytes that partition 0 of a topic holds, uncompressed record batches.
pub(crate) async fn fetch(topic: &str) -> Vec<u8> {
    let mut request = Vec::new();
    request.extend((-1_i32).to_be_bytes());
    request.extend(1_000_i32.to_be_bytes());
    request.extend(1_i32.to_be_bytes());
    request.extend(1_000_000_i32.to_be_bytes());
    request.push(0);
    request.extend(1_i32.to_be_bytes());
    string(&mut request, topic);
    request.extend(1_i32.to_be_bytes());
    request.extend(0_i32.to_be_bytes());
    request.extend(0_i64.to_be_bytes());
    request.extend(1_000_000_i32.to_be_bytes());
    call(topic, 1, 4, &request).await
}

/// One request to the leader of partition 0, and its answer without the header.
async fn call(topic: &str, api: i16, version: i16, body: &[u8]) -> Vec<u8> {
    let leader = leader(topic).await;
    let mut stream = TcpStream::connect(leader).await.unwrap();
    let mut request = Vec::new();
    request.extend(api.to_be_bytes());
    request.extend(version.to_be_bytes());
    request.extend(7_i32.to_be_bytes());
    string(&mut request, "wire");
    request.extend(body);
    stream.write_all(&i32::try_from(request.len()).unwrap().to_be_bytes()).await.unwrap();
    stream.write_all(&request).await.unwrap();
    let length = stream.read_i32().await.unwrap();
    assert_eq!(stream.read_i32().await.unwrap(), 7);
    let mut answer = vec![0; usize::try_from(length).unwrap() - 4];
    stream.read_exact(&mut answer).await.unwrap();
    answer
}

async fn leader(topic: &str) -> (String, u16) {
    let topic = topic.to_owned();
    tokio::task::spawn_blocking(move || {
        let client: BaseConsumer = ClientConfig::new().set("bootstrap.servers", brokers()).create().unwrap();
        let metadata = client.fetch_metadata(Some(&topic), Duration::from_secs(10)).unwrap();
        let leader = metadata.topics()[0].partitions()[0].leader();
        let broker = metadata.brokers().iter().find(|broker| broker.id() == leader).unwrap();
        (broker.host().to_owned(), u16::try_from(broker.port()).unwrap())
    })
    .await
    .unwrap()
}

fn string(to: &mut Vec<u8>, text: &str) {
    to.extend(i16::try_from(text.len()).unwrap().to_be_bytes());
    to.extend(text.as_bytes());
}

fn bytes(to: &mut Vec<u8>, value: &[u8]) {
    varint(to, i64::try_from(value.len()).unwrap());
    to.extend(value);
}

fn varint(to: &mut Vec<u8>, value: i64) {
    let mut zigzag = ((value << 1) ^ (value >> 63)).cast_unsigned();
    while zigzag >= 0x80 {
        to.push(u8::try_from(zigzag & 0x7f).unwrap() | 0x80);
        zigzag >>= 7;
    }
    to.push(u8::try_from(zigzag).unwrap());
}

fn crc32c(bytes: &[u8]) -> u32 {
    !bytes.iter().fold(!0_u32, |crc, byte| {
        (0..8).fold(
            crc ^ u32::from(*byte),
            |crc, _| if crc & 1 == 1 { (crc >> 1) ^ 0x82f6_3b78 } else { crc >> 1 },
        )
    })
}
