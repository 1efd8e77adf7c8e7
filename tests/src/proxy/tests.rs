//! Against a server that gives everything back, so that one connection shows both directions.

use tokio::time::timeout;

use super::*;
use crate::{eventually, stays};

const PATIENCE: Duration = Duration::from_secs(10);

/// Gives back what it gets, and ends a connection when its client does.
async fn echo() -> String {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.unwrap();
    let address = listener.local_addr().unwrap().to_string();
    tokio::spawn(async move {
        while let Ok((mut stream, _)) = listener.accept().await {
            tokio::spawn(async move {
                let (mut reads, mut writes) = stream.split();
                tokio::io::copy(&mut reads, &mut writes).await.ok();
                writes.shutdown().await.ok();
            });
        }
    });
    address
}

async fn proxy() -> Proxy {
    Proxy::before(&echo().await).await.unwrap()
}

/// A client that has said this and got it back.
async fn client(proxy: &Proxy, greeting: &str) -> TcpStream {
    let mut client = TcpStream::connect(proxy.address()).await.unwrap();
    ask(&mut client, greeting).await.unwrap();
    client
}

async fn ask(client: &mut TcpStream, text: &str) -> Outcome {
    client.write_all(text.as_bytes()).await?;
    hear(client, text).await
}

async fn hear(client: &mut TcpStream, text: &str) -> Outcome {
    let mut heard = vec![0; text.len()];
    match timeout(PATIENCE, client.read_exact(&mut heard)).await {
        Ok(read) => drop(read?),
        Err(_) => crate::fail!("nothing comes back"),
    }
    assert_eq!(heard, text.as_bytes());
    Ok(())
}

/// Ok while nothing comes and nothing ends.
async fn silence(client: &mut TcpStream) -> Outcome {
    match timeout(Duration::from_millis(300), client.read(&mut [0; 64])).await {
        Err(_) => Ok(()),
        Ok(read) => crate::fail!("{read:?} came"),
    }
}

async fn is_reset(client: &mut TcpStream) {
    let read = timeout(PATIENCE, client.read(&mut [0; 64])).await.unwrap();
    assert_eq!(read.unwrap_err().kind(), io::ErrorKind::ConnectionReset);
}

#[tokio::test]
async fn without_rules_everything_passes_and_an_end_is_an_end() {
    let proxy = proxy().await;
    let mut client = TcpStream::connect(proxy.address()).await.unwrap();
    let sent: Vec<u8> = (0..3_000_000_u32).map(|i| (i % 251) as u8).collect();
    let (mut reads, mut writes) = client.split();
    let mut back = Vec::new();
    let (sending, receiving) = tokio::join!(
        async {
            writes.write_all(&sent).await?;
            writes.shutdown().await
        },
        reads.read_to_end(&mut back),
    );
    sending.unwrap();
    receiving.unwrap();
    assert!(back == sent);
    assert_eq!(proxy.passed(Way::Both), 6_000_000);
    eventually("the connection to be gone", PATIENCE, async || match proxy.connections() {
        0 => Ok(()),
        some => crate::fail!("{some} connections"),
    })
    .await
    .unwrap();
}

#[tokio::test]
async fn a_delay_is_each_ways_own_and_ends_with_the_healing() {
    let proxy = proxy().await;
    let mut client = client(&proxy, "hello").await;
    for (way, at_least) in [(Way::There, 200), (Way::Both, 400)] {
        proxy.delay(way, Duration::from_millis(200));
        let asked = Instant::now();
        ask(&mut client, "are you there").await.unwrap();
        assert!(asked.elapsed() >= Duration::from_millis(at_least), "{way:?}: {:?}", asked.elapsed());
    }
    proxy.delay(Way::Both, Duration::from_secs(3600));
    client.write_all(b"before the healing").await.unwrap();
    silence(&mut client).await.unwrap();
    proxy.heal();
    hear(&mut client, "before the healing").await.unwrap();
}

#[tokio::test]
async fn a_delayed_wire_carries_as_much_as_any() {
    let proxy = proxy().await;
    let mut client = client(&proxy, "hello").await;
    proxy.delay(Way::There, Duration::from_millis(100));
    let sent = vec![7; 20 * CHUNK];
    let asked = Instant::now();
    let (mut reads, mut writes) = client.split();
    let mut back = vec![0; sent.len()];
    let (sending, receiving) = tokio::join!(writes.write_all(&sent), reads.read_exact(&mut back));
    sending.unwrap();
    receiving.unwrap();
    // One after another they would take 2 s.
    let took = asked.elapsed();
    assert!(took >= Duration::from_millis(100) && took < Duration::from_secs(1), "{took:?}");
}

#[tokio::test]
async fn a_bandwidth_is_shared_by_all_connections() {
    let proxy = proxy().await;
    let (mut one, mut other) = (client(&proxy, "one").await, client(&proxy, "other").await);
    proxy.bandwidth(Way::There, NonZeroU32::new(100_000).unwrap());
    let text = "x".repeat(30_000);
    let asked = Instant::now();
    let (first, second) = tokio::join!(ask(&mut one, &text), ask(&mut other, &text));
    first.unwrap();
    second.unwrap();
    assert!(asked.elapsed() >= Duration::from_millis(590), "{:?}", asked.elapsed());
    proxy.heal();
    let asked = Instant::now();
    ask(&mut one, &text).await.unwrap();
    assert!(asked.elapsed() < Duration::from_millis(300), "{:?}", asked.elapsed());
}

#[tokio::test]
async fn what_is_held_arrives_once_it_heals() {
    let proxy = proxy().await;
    let mut client = client(&proxy, "hello").await;
    proxy.hold(Way::Back);
    client.write_all(b"one").await.unwrap();
    silence(&mut client).await.unwrap();
    let mut new = TcpStream::connect(proxy.address()).await.unwrap();
    new.write_all(b"new").await.unwrap();
    silence(&mut new).await.unwrap();
    proxy.heal();
    hear(&mut client, "one").await.unwrap();
    hear(&mut new, "new").await.unwrap();
}

#[tokio::test]
async fn what_is_swallowed_is_gone_and_nothing_follows_the_gap() {
    let proxy = proxy().await;
    let (mut cut, mut idle) = (client(&proxy, "hello").await, client(&proxy, "hello").await);
    proxy.swallow(Way::Back);
    cut.write_all(b"one").await.unwrap();
    silence(&mut cut).await.unwrap();
    assert_eq!(proxy.swallowed(Way::Back), 3);
    assert_eq!(proxy.connections(), 2);
    proxy.heal();
    is_reset(&mut cut).await;
    // It lost nothing.
    ask(&mut idle, "two").await.unwrap();
}

#[tokio::test]
async fn an_end_is_swallowed_like_any_other_news() {
    let proxy = proxy().await;
    let mut client = client(&proxy, "hello").await;
    proxy.swallow(Way::Back);
    client.shutdown().await.unwrap();
    silence(&mut client).await.unwrap();
}

#[tokio::test]
async fn rules_for_only_some_connections_leave_the_others_alone() {
    let proxy = proxy().await;
    let mut cursor = client(&proxy, "\0user\0me\0application_name\0baton cursor me\0").await;
    let mut renewal = client(&proxy, "\0user\0me\0application_name\0baton renewal me\0").await;
    proxy.only("baton cursor");
    proxy.swallow(Way::Both);
    ask(&mut renewal, "more").await.unwrap();
    cursor.write_all(b"more").await.unwrap();
    silence(&mut cursor).await.unwrap();
    stays("the other's answers", Duration::from_millis(200), async || ask(&mut renewal, "again").await)
        .await
        .unwrap();
    proxy.heal();
    is_reset(&mut cursor).await;
}

#[tokio::test]
async fn all_are_reset_and_new_ones_refused_until_it_heals() {
    let proxy = proxy().await;
    let (mut one, mut other) = (client(&proxy, "one").await, client(&proxy, "other").await);
    proxy.reset_all();
    is_reset(&mut one).await;
    is_reset(&mut other).await;
    ask(&mut client(&proxy, "hello").await, "new ones are welcome").await.unwrap();
    proxy.refuse();
    let mut refused = TcpStream::connect(proxy.address()).await.unwrap();
    is_reset(&mut refused).await;
    proxy.heal();
    client(&proxy, "hello").await;
}

#[tokio::test]
async fn what_is_held_is_gone_with_its_connection_also_when_all_heals_at_once() {
    let proxy = proxy().await;
    for _ in 0..20 {
        let mut client = client(&proxy, "hello").await;
        let passed = proxy.passed(Way::There);
        proxy.hold(Way::There);
        client.write_all(b"held").await.unwrap();
        silence(&mut client).await.unwrap();
        proxy.reset_all();
        proxy.heal();
        is_reset(&mut client).await;
        assert_eq!(proxy.passed(Way::There), passed);
    }
}

#[tokio::test]
async fn a_server_that_is_away_is_a_reset() {
    let nobody = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.unwrap().local_addr().unwrap();
    let proxy = Proxy::before(&nobody.to_string()).await.unwrap();
    let mut client = TcpStream::connect(proxy.address()).await.unwrap();
    is_reset(&mut client).await;
}

#[tokio::test]
async fn a_dropped_proxy_takes_its_connections_along() {
    let proxy = proxy().await;
    let mut client = client(&proxy, "hello").await;
    drop(proxy);
    let read = timeout(PATIENCE, client.read(&mut [0; 64])).await.unwrap();
    assert!(matches!(read, Ok(0) | Err(_)));
}

#[test]
fn a_name_is_replaced_on_its_way_and_comes_back_as_it_was() {
    let rules = Rules { renames: Some([b"topic".to_vec(), b"nopic".to_vec()]), ..Rules::default() };
    let mut bytes = b"topic, the topic, topi".to_vec();
    rename(THERE, &mut bytes, &rules);
    assert_eq!(bytes, b"nopic, the nopic, topi");
    rename(BACK, &mut bytes, &rules);
    assert_eq!(bytes, b"topic, the topic, topi");
    rename(THERE, &mut bytes, &Rules::default());
    assert_eq!(bytes, b"topic, the topic, topi");
}
