//! Many idle connections: their memory, measured and as counted, and their effect on an active one.
//! `FASTPS_CLIENTS` sets the number of clients, each with one connection for calls and one for frames.

use crate::ledger::{PATIENT, gradient, pull, register};
use crate::peer::{Answers, EXCHANGE, call, connect, message};
use crate::stubs::{CLIENT, SLICE, Shard, bytes, config, header, push, within};
use fastps_client::{Client, ConnectOptions};
use fastps_core::error::Kind;
use fastps_core::optim::{Optimizer, Sgd};
use fastps_core::tensor::SliceId;
use fastps_core::verbs::PushOptions;
use fastps_core::verbs::prelude::*;
use fastps_server::{Server, ServerConfig};
use fastps_transport::convert::{self, Answer, Read};
use std::io::{BufRead, BufReader, Read as _, Write};
use std::net::TcpStream;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

const AT_MOST: u64 = 64 << 10;

/// A server in its own process, so that its memory can be measured.
struct Process {
    child: Child,
    address: String,
}

impl Process {
    fn start(memory_limit: u64) -> Self {
        let program = env!("CARGO_BIN_EXE_fastps-server");
        let limit = memory_limit.to_string();
        let arguments = ["--listen", "127.0.0.1:0", "--memory-limit", &limit, "--lease-ms", "600000"];
        let mut child = Command::new(program).args(arguments).stdout(Stdio::piped()).spawn().unwrap();
        let mut line = String::new();
        BufReader::new(child.stdout.as_mut().unwrap()).read_line(&mut line).unwrap();
        let address = line.rsplit(' ').next().unwrap().trim().to_owned();
        Self { child, address }
    }

    /// The resident memory of the process, in bytes.
    fn resident(&self) -> u64 {
        let status = std::fs::read_to_string(format!("/proc/{}/status", self.child.id())).unwrap();
        let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).unwrap();
        line.trim().trim_end_matches(" kB").parse::<u64>().unwrap() << 10
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn options() -> PushOptions {
    PushOptions { timeout: PATIENT, ..PushOptions::default() }
}

/// Steps on a tensor of one whole slice; returns how many.
fn work(client: &Client, name: &str) {
    register(client, name, SLICE as usize, Optimizer::Sgd(Sgd { lr: 1.0, ..Sgd::default() }));
    let ones = [gradient(name, vec![-1.0; SLICE as usize])];
    for _ in 0..100 {
        client.push(&ones, &options()).unwrap();
    }
    assert_eq!(pull(client, vec![name.into()])[0], vec![100.0; SLICE as usize]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn clients_at_rest_take_little_and_disturb_nobody() {
    let clients = std::env::var("FASTPS_CLIENTS").map_or(300, |n| n.parse::<u64>().unwrap());
    // The idle connections and one active one fit; they would not fit if all were active.
    let server = Process::start((96 << 20) + 2 * clients * AT_MOST);
    let mut shard = Shard::connect(&server.address, CLIENT).await;
    let mut stream = shard.exchange().await;
    let (route, slice) = shard.create(&mut stream, "w", &vec![0.0; SLICE as usize]).await;
    let (addresses, options) =
        ([server.address.clone()], ConnectOptions { timeout: PATIENT, ..Default::default() });
    let active =
        tokio::task::spawn_blocking(move || Client::connect(&addresses, options).unwrap()).await.unwrap();
    let client = active.clone();
    tokio::task::spawn_blocking(move || work(&client, "alone")).await.unwrap();
    let (before, counted) = (server.resident(), shard.counter("memory_connections").await);

    let mut idle = Vec::new();
    for k in 0..clients {
        let control = Shard::connect(&server.address, CLIENT + 1 + k).await;
        let mut requests = connect(&server.address, 4 << 20).await;
        let (response, sending) = call(&mut requests, EXCHANGE);
        idle.push((control, requests, sending, Answers::of(response).await));
    }
    let (resident, counted_now) = (server.resident(), shard.counter("memory_connections").await);
    let each = resident.saturating_sub(before) / (2 * clients);
    println!("{clients} clients: {each} bytes of memory per connection");
    assert!(each <= AT_MOST, "a connection at rest takes {each} bytes");
    assert!(counted_now - counted <= 2 * clients * AT_MOST, "{counted_now} bytes are counted");
    assert_eq!(shard.counter("connections").await, 2 * clients + 3);
    assert_eq!(shard.counter("connections_refused").await, 0);
    let client = active.clone();
    // benchmarks/connections.py measures the speed.
    tokio::task::spawn_blocking(move || work(&client, "among")).await.unwrap();

    // Some become active in turn, and then idle again.
    for (n, (_, _, sending, answers)) in idle.iter_mut().take(4).enumerate() {
        for sequence in 1..3 {
            let mut frame = push(route, slice, 10 * n as u64 + sequence, &vec![-1.0; SLICE as usize]);
            header(&mut frame).client = CLIENT + 1 + n as u64;
            header(&mut frame).want_values = true;
            sending.send_data(message(&frame), false).unwrap();
            let (_, answer) = answers.next().await;
            let values = bytes(&vec![2.0 * n as f32 + sequence as f32; SLICE as usize]);
            assert!(matches!(answer, Answer::Values { payload, .. } if payload == values));
        }
        // On a busy machine, earlier ones may already be idle.
        let at_work = shard.counter("memory_connections").await;
        assert!(at_work > counted_now + (1 << 20), "{at_work} bytes are counted for what works");
    }
    // Dropping a client waits for its runtime.
    tokio::task::spawn_blocking(move || drop(active)).await.unwrap();
    let (begin, frames) = (Instant::now(), 4 * (1 << 20));
    while shard.counter("memory_connections").await > counted_now + frames {
        assert!(begin.elapsed() < PATIENT, "they do not rest again");
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    let (_, _, sending, answers) = &mut idle[0];
    let mut frame = convert::read_frame(7, route, SliceId(slice), Read::Values);
    header(&mut frame).client = CLIENT + 1;
    sending.send_data(message(&frame), false).unwrap();
    assert_eq!(answers.next().await.0, 7);
}

#[test]
fn the_memory_of_closed_connections_is_given_back() {
    let server = Process::start(1 << 30);
    // The client also raises this process's limit of open files.
    let options = ConnectOptions { timeout: PATIENT, ..ConnectOptions::default() };
    let client = Client::connect(std::slice::from_ref(&server.address), options).unwrap();
    let before = server.resident();
    let open = |_| {
        let mut socket = TcpStream::connect(&server.address).unwrap();
        socket.write_all(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\x04\0\0\0\0\0").unwrap();
        // The server has started to serve it.
        socket.read_exact(&mut [0; 9]).unwrap();
        socket
    };
    let open: Vec<_> = (0..1200).map(open).collect();
    let taken = server.resident() - before;
    println!("{taken} bytes of memory for {} connections", open.len());
    assert!(taken > 8 << 20, "no memory to return");
    drop(open);
    let begin = Instant::now();
    while server.resident() > before + taken / 4 {
        assert!(begin.elapsed() < PATIENT, "{} of {taken} bytes stay", server.resident() - before);
        std::thread::sleep(Duration::from_millis(50));
    }
    client.stats(PATIENT).unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn work_for_which_there_is_no_memory_ends_its_connection() {
    let server = Server::start(&ServerConfig { memory_limit: Some(32 << 20), ..config() }).unwrap();
    let address = &server.addresses()[0];
    let mut shard = Shard::connect(address, CLIENT).await;
    let mut stream = shard.exchange().await;
    let (route, slice) = shard.create(&mut stream, "w", &vec![0.0; SLICE as usize]).await;
    let mut resting = Vec::new();
    for _ in 0..2 {
        let mut requests = connect(address, 4 << 20).await;
        let (response, sending) = call(&mut requests, EXCHANGE);
        resting.push((requests, sending, Answers::of(response).await));
    }
    let counter = |name: &str| server.counters()[0].iter().find(|(n, _)| *n == name).unwrap().1;
    for k in 0.. {
        let n = ((counter("memory_limit") - counter("memory_used")).saturating_sub(1 << 20) / 8).min(SLICE);
        if n < 1000 {
            break;
        }
        shard.create(&mut stream, &format!("filler {k}"), &vec![0.0; n as usize]).await;
    }
    // Small frames fit in the memory of an idle connection; a large one does not.
    let (_, sending, answers) = &mut resting[0];
    sending.send_data(message(&convert::read_frame(1, route, SliceId(slice), Read::Version)), false).unwrap();
    assert_eq!(answers.next().await.0, 1);
    sending.send_data(message(&push(route, slice, 1, &vec![1.0; SLICE as usize])), false).unwrap();
    assert!(within(answers.stream.data()).await.is_none_or(|data| data.is_err()));
    // A new stream gets an error with a message.
    let mut requests = connect(address, 4 << 20).await;
    let (response, _sending) = call(&mut requests, EXCHANGE);
    let response = within(response).await.unwrap();
    let status = tonic::Status::from_header_map(response.headers()).unwrap();
    let error = convert::error_from_status(&status);
    assert_eq!((error.kind, error.shard), (Kind::Capacity, Some(0)), "{error}");
    // The other connections continue.
    let (_, sending, answers) = &mut resting[1];
    sending.send_data(message(&convert::read_frame(2, route, SliceId(slice), Read::Version)), false).unwrap();
    assert_eq!(answers.next().await.0, 2);
    assert!(matches!(
        stream.ask(push(route, slice, 2, &vec![1.0; SLICE as usize])).await,
        Answer::Receipt(_)
    ));
}
