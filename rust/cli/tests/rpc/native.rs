//! The native data plane at its edges: DATA cut anywhere, windows of any size, stalled readers and servers,
//! reset streams. The peer is `h2` itself, so the tests control every byte.

use crate::cluster::Cluster;
use crate::ledger::PATIENT;
use crate::peer::{Answers, EXCHANGE, call, connect, message, status};
use crate::stubs::{CLIENT, SLICE, Shard, bytes, config, header, push, start, within};
use bytes::{Buf, Bytes, BytesMut};
use fastps_client::{Client, ConnectOptions, Transport};
use fastps_core::dtype::View;
use fastps_core::optim::{Optimizer, Sgd};
use fastps_core::tensor::{SliceId, TensorSpec};
use fastps_core::verbs::prelude::*;
use fastps_core::verbs::{Gradient, PushError, PushOptions};
use fastps_server::{Server, ServerConfig};
use fastps_transport::convert::{self, Answer, Read};
use h2::Reason;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};

const BYTES: u64 = 4 * SLICE;

/// xorshift64
struct Random(u64);

impl Random {
    fn below(&mut self, n: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 % n as u64) as usize
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn messages_may_be_cut_anywhere() {
    let (server, mut shard, mut stream) = start().await;
    let (route, slice) = shard.create(&mut stream, "w", &[0.0; 3]).await;
    let (big_route, big) = shard.create(&mut stream, "big", &vec![0.0; SLICE as usize]).await;
    let mut random = Random(7);
    // First windows of a few bytes, so that answers trickle; then of the usual size.
    for (window, most) in [(1, 1), (100, 3), (65_535, 40), (4 << 20, 5000), (1 << 30, 300_000)] {
        let mut requests = connect(&server.addresses()[0], window).await;
        let (response, mut sending) = call(&mut requests, EXCHANGE);
        let mut answers = Answers::of(response).await;
        let mut outgoing = BytesMut::new();
        for tag in 0..8 {
            let mut frame = push(route, slice, u64::from(window) * 100 + tag + 1, &[1.0; 3]);
            header(&mut frame).tag = tag;
            outgoing.extend(message(&frame));
        }
        if most > 1000 {
            let mut frame = push(big_route, big, u64::from(window), &vec![1.0; SLICE as usize]);
            header(&mut frame).want_values = true;
            header(&mut frame).tag = 8;
            outgoing.extend(message(&frame));
        }
        let reading = async {
            for tag in 0..8 + u64::from(most > 1000) {
                let (answered, answer) = answers.next().await;
                assert_eq!(answered, tag);
                assert!(matches!(answer, Answer::Receipt(_) | Answer::Values { .. }), "{answer:?}");
            }
        };
        let writing = async {
            while outgoing.has_remaining() {
                let n = (1 + random.below(most)).min(outgoing.len());
                sending.send_data(outgoing.split_to(n).freeze(), false).unwrap();
                if random.below(3) == 0 {
                    tokio::task::yield_now().await;
                }
            }
        };
        tokio::join!(reading, writing);
        // After this half ends, the server ends its own in order.
        sending.send_data(Bytes::new(), true).unwrap();
        assert!(within(answers.stream.data()).await.is_none());
        let trailers = within(answers.stream.trailers()).await.unwrap().unwrap();
        assert_eq!(status(&trailers), "0");
    }
    assert_eq!(stream.pull(route, slice).await.1, bytes(&[-40.0; 3]));
    assert_eq!(stream.pull(big_route, big).await.1, bytes(&vec![-2.0; SLICE as usize]));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn streams_end_alone() {
    let (server, mut shard, mut stream) = start().await;
    let (route, slice) = shard.create(&mut stream, "w", &[0.0; 3]).await;
    let mut requests = connect(&server.addresses()[0], 65_535).await;
    // A native connection serves no other calls.
    let (response, _sending) = call(&mut requests, "/fastps.v1.Control/Hello");
    assert_eq!(status(within(response).await.unwrap().headers()), "12");
    // Reset within a message.
    let (response, mut sending) = call(&mut requests, EXCHANGE);
    let _answers = Answers::of(response).await;
    sending.send_data(message(&push(route, slice, 1, &[1.0; 3])).slice(..20), false).unwrap();
    sending.send_reset(Reason::CANCEL);
    // Ended within a message; no message at all; too large; compressed.
    let too_large = [&[0][..], &(5_u32 << 20).to_be_bytes()].concat();
    for (data, code) in [
        (message(&push(route, slice, 1, &[1.0; 3])).slice(..20), "3"),
        (Bytes::from_static(&[0, 0, 0, 0, 3, 255, 255, 255]), "3"),
        (Bytes::from(too_large), "3"),
        (Bytes::from_static(&[1, 0, 0, 0, 3, 1, 2, 3]), "12"),
    ] {
        let (response, mut sending) = call(&mut requests, EXCHANGE);
        let mut answers = Answers::of(response).await;
        sending.send_data(data, true).unwrap();
        assert!(within(answers.stream.data()).await.is_none());
        let trailers = within(answers.stream.trailers()).await.unwrap().unwrap();
        assert_eq!(status(&trailers), code);
    }
    // The connection still works.
    let (response, mut sending) = call(&mut requests, EXCHANGE);
    let mut answers = Answers::of(response).await;
    sending.send_data(message(&push(route, slice, 1, &[1.0; 3])), false).unwrap();
    assert!(matches!(answers.next().await.1, Answer::Receipt(_)));
    // A stopping server ends the stream in order, and then the connection.
    let stopping = tokio::task::spawn_blocking(move || server.stop(Duration::from_secs(5)));
    assert!(within(answers.stream.data()).await.is_none());
    assert_eq!(status(&within(answers.stream.trailers()).await.unwrap().unwrap()), "0");
    within(stopping).await.unwrap().unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn the_slowest_reader_is_reset_when_memory_is_full() {
    let server = Server::start(&ServerConfig { memory_limit: Some(96 << 20), ..config() }).unwrap();
    let counter = |name: &str| server.counters()[0].iter().find(|(n, _)| *n == name).unwrap().1;
    let mut shard = Shard::connect(&server.addresses()[0], CLIENT).await;
    let mut stream = shard.exchange().await;
    let (route, slice) = shard.create(&mut stream, "w", &vec![0.0; SLICE as usize]).await;
    // From here on this connection has the memory for its answers.
    stream.pull(route, slice).await;
    let pull = message(&convert::read_frame(5, route, SliceId(slice), Read::Values));
    let mut readers = Vec::new();
    for _ in 0..3 {
        let mut requests = connect(&server.addresses()[0], 65_535).await;
        let (response, sending) = call(&mut requests, EXCHANGE);
        readers.push((requests, sending, Answers::of(response).await));
    }
    let mut sequence = 0;
    for (_, sending, _) in &mut readers[..2] {
        // Each pins a different version, twice, and does not read.
        (0..2).for_each(|_| sending.send_data(pull.clone(), false).unwrap());
        tokio::time::sleep(Duration::from_millis(200)).await;
        sequence += 1;
        let receipt = stream.ask(push(route, slice, sequence, &vec![1.0; SLICE as usize])).await;
        assert!(matches!(receipt, Answer::Receipt(_)), "{receipt:?}");
    }
    for k in 0.. {
        let free = counter("memory_limit") - counter("memory_used");
        let n = (free.saturating_sub(BYTES / 2) / 8).min(SLICE);
        if n < 1000 {
            break;
        }
        shard.create(&mut stream, &format!("filler {k}"), &vec![0.0; n as usize]).await;
    }
    assert_eq!(counter("streams_reset"), 0);
    readers[2].1.send_data(pull, false).unwrap();
    tokio::time::sleep(Duration::from_millis(200)).await;
    let receipt = stream.ask(push(route, slice, 3, &vec![1.0; SLICE as usize])).await;
    assert!(matches!(receipt, Answer::Receipt(_)), "{receipt:?}");
    // Only the reader that stalled first was reset, with its connection.
    assert_eq!(counter("streams_reset"), 1);
    let ended = within(async {
        let answers = &mut readers[0].2;
        while let Some(Ok(data)) = answers.stream.data().await {
            let _ = answers.stream.flow_control().release_capacity(data.len());
        }
        answers.stream.trailers().await
    });
    assert!(ended.await.is_err());
    for (reader, values) in [(1, -1.0), (2, -2.0)] {
        let Answer::Values { payload, .. } = readers[reader].2.next().await.1 else { panic!() };
        assert_eq!(payload, bytes(&vec![values; SLICE as usize]));
    }
    assert_eq!(stream.pull(route, slice).await.1, bytes(&vec![-3.0; SLICE as usize]));
}

fn spec(name: &str, elements: usize) -> TensorSpec {
    let optimizer = Optimizer::Sgd(Sgd { lr: 1.0, ..Sgd::default() });
    TensorSpec::new(name, [elements as u64], optimizer)
}

fn options(timeout: Duration) -> PushOptions {
    PushOptions { timeout, ..PushOptions::default() }
}

/// Forwards a connection in pieces of random sizes, with random pauses.
async fn trickle(mut from: impl AsyncReadExt + Unpin, mut to: impl AsyncWriteExt + Unpin, seed: u64) {
    let mut random = Random(seed);
    let mut buffer = vec![0; 1 << 20];
    loop {
        let most = 1 << random.below(21);
        let Ok(n @ 1..) = from.read(&mut buffer[..most]).await else {
            return;
        };
        if random.below(20) == 0 {
            tokio::time::sleep(Duration::from_micros(random.below(3000) as u64)).await;
        }
        if to.write_all(&buffer[..n]).await.is_err() {
            return;
        }
    }
}

/// Steps of random sizes and kinds through a connection that stutters both ways: none may stall.
/// `FASTPS_SOAK` sets how many.
#[test]
fn nothing_stalls() {
    let steps = std::env::var("FASTPS_SOAK").map_or(400, |n| n.parse::<u64>().unwrap());
    let cluster = Cluster::start(1);
    let server = cluster.addresses()[0].clone();
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
    let listener = runtime.block_on(TcpListener::bind("127.0.0.1:0")).unwrap();
    let between = listener.local_addr().unwrap().to_string();
    runtime.spawn(async move {
        for seed in 1.. {
            let (client, _) = listener.accept().await.unwrap();
            let server = TcpStream::connect(&server).await.unwrap();
            let (from_client, to_client) = client.into_split();
            let (from_server, to_server) = server.into_split();
            tokio::spawn(trickle(from_client, to_server, 2 * seed + 1));
            tokio::spawn(trickle(from_server, to_client, 2 * seed + 2));
        }
    });
    std::thread::scope(|scope| {
        for (worker, address) in [&between, &cluster.addresses()[0], &between].into_iter().enumerate() {
            let address = address.clone();
            scope.spawn(move || {
                let options_of = ConnectOptions { timeout: PATIENT, ..ConnectOptions::default() };
                let client = Client::connect(&[address], options_of).unwrap();
                let mut random = Random(worker as u64 + 11);
                let sizes = [1_usize, 1000, 20_000, 258_048, 600_001];
                for size in sizes {
                    let zeros = vec![0.0; size];
                    client
                        .register(spec(&format!("{worker} {size}"), size), View::Float32(&zeros), PATIENT)
                        .unwrap();
                }
                let mut sums = [0.0_f32; 5];
                let mut flying = Vec::new();
                for _ in 0..steps {
                    let k = random.below(sizes.len());
                    let name: Arc<str> = format!("{worker} {}", sizes[k]).into();
                    let values: Arc<Vec<f32>> = Arc::new(vec![-1.0; sizes[k]]);
                    let gradient = || Gradient {
                        name: name.clone(),
                        shape: vec![sizes[k] as u64],
                        values: values.clone(),
                    };
                    sums[k] += 1.0;
                    match random.below(3) {
                        0 => flying.push(client.push_async(vec![gradient()], options(PATIENT)).unwrap()),
                        1 => drop(client.push(&[gradient()], &options(PATIENT)).unwrap()),
                        _ => {
                            let mut check = |_: usize, _: usize, bytes: &[u8]| {
                                let last = bytes.last_chunk::<4>().map(|b| f32::from_le_bytes(*b));
                                assert_eq!(last, Some(sums[k]), "{name}");
                            };
                            client.push_pull(&[gradient()], &options(PATIENT), &mut check).unwrap();
                        }
                    }
                    if random.below(10) == 0 {
                        std::thread::sleep(Duration::from_micros(random.below(12_000) as u64));
                    }
                    if flying.len() > 20 {
                        for ticket in flying.drain(..) {
                            ticket.wait(PATIENT).expect("a push stalls").unwrap();
                        }
                    }
                }
            });
        }
    });
    runtime.shutdown_background();
}

#[test]
fn a_server_on_this_machine_is_reached_without_the_network() {
    let server = Server::start(&ServerConfig { memory_limit: Some(256 << 20), ..config() }).unwrap();
    let address = server.addresses()[0].clone();
    let of = |address: &str, transport| {
        let options = ConnectOptions { timeout: PATIENT, transport, ..ConnectOptions::default() };
        Client::connect(&[address.to_owned()], options).unwrap()
    };
    let clients =
        [Transport::Auto, Transport::Tcp, Transport::Unix, Transport::Shm].map(|way| of(&address, way));
    let localhost = of(&address.replace("127.0.0.1", "localhost"), Transport::Auto);
    clients[0].register(spec("w", 3), View::Float32(&[0.0; 3]), PATIENT).unwrap();
    let values = Arc::new(vec![-1.0; 3]);
    let gradient = || Gradient { name: "w".into(), shape: vec![3], values: values.clone() };
    for (client, way) in clients.iter().chain([&localhost]).zip([
        "shm: ",
        "tcp: asked for",
        "unix: asked for",
        "shm: ",
        "shm: ",
    ]) {
        client.push(&[gradient()], &options(PATIENT)).unwrap();
        let transport = client.transport();
        assert!(transport.len() == 1 && transport[0].1.starts_with(way), "{transport:?}");
    }
    // A proxy between client and server is not bypassed.
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
    let listener = runtime.block_on(TcpListener::bind("127.0.0.1:0")).unwrap();
    let between = listener.local_addr().unwrap().to_string();
    runtime.spawn(async move {
        while let Ok((mut client, _)) = listener.accept().await {
            let mut server = TcpStream::connect(&address).await.unwrap();
            tokio::spawn(async move { drop(tokio::io::copy_bidirectional(&mut client, &mut server).await) });
        }
    });
    let client = of(&between, Transport::Auto);
    client.push(&[gradient()], &options(PATIENT)).unwrap();
    assert!(client.transport()[0].1.starts_with("tcp: "), "{:?}", client.transport());
    let mut sum = [0.0; 3];
    let mut take = |_: usize, _: usize, bytes: &[u8]| {
        let values = bytes.as_chunks().0.iter().map(|value| f32::from_le_bytes(*value));
        sum.iter_mut().zip(values).for_each(|(sum, value)| *sum = value);
    };
    client.pull(&["w".into()], PATIENT, &mut take).unwrap();
    assert_eq!(sum, [6.0; 3]);
    server.stop(Duration::from_secs(5)).unwrap();
    runtime.shutdown_background();
}

/// If the server stops reading, a call returns at its deadline and releases the caller's memory.
#[test]
fn a_callers_memory_comes_back_at_the_deadline() {
    let cluster = Cluster::start(1);
    let server = cluster.addresses()[0].clone();
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
    let listener = runtime.block_on(TcpListener::bind("127.0.0.1:0")).unwrap();
    let between = listener.local_addr().unwrap().to_string();
    let (stop, stopped) = tokio::sync::watch::channel(false);
    runtime.spawn(async move {
        loop {
            let (mut client, _) = listener.accept().await.unwrap();
            let mut server = TcpStream::connect(&server).await.unwrap();
            let mut stopped = stopped.clone();
            tokio::spawn(async move {
                tokio::select! {
                    _ = tokio::io::copy_bidirectional(&mut client, &mut server) => {}
                    () = async { drop(stopped.wait_for(|stop| *stop).await) } => {}
                }
                // The sockets stay open, but are not read.
                std::future::pending::<()>().await;
            });
        }
    });
    let client =
        Client::connect(&[between], ConnectOptions { timeout: PATIENT, ..ConnectOptions::default() })
            .unwrap();
    let n = 40 * SLICE as usize;
    client.register(spec("w", n), View::Float32(&vec![0.0; n]), PATIENT).unwrap();
    stop.send_replace(true);
    let values: Arc<Vec<f32>> = Arc::new(vec![1.0; n]);
    let gradient = Gradient { name: "w".into(), shape: vec![n as u64], values: values.clone() };
    let begin = Instant::now();
    // Long enough to send a first frame, which is then in doubt.
    let error = client.push(&[gradient], &options(Duration::from_secs(3))).unwrap_err();
    assert!(begin.elapsed() < Duration::from_secs(30), "{:?}", begin.elapsed());
    assert!(matches!(error, PushError::Partial(partial) if !partial.in_doubt.is_empty()));
    assert_eq!(Arc::strong_count(&values), 1, "the caller's memory is still in use");
    client.close(Duration::from_secs(3));
    runtime.shutdown_background();
}
