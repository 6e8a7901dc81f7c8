//! Shared memory between real clients and servers: whenever it is cut, nothing is lost or applied twice;
//! without memory for it, the Unix socket is used.
#![cfg(target_os = "linux")]

use crate::cluster::Cluster;
use crate::ledger::AtTheEnd;
use crate::stubs::{CLIENT, Shard, hello, timed};
use fastps_client::{Client, ConnectOptions, Transport};
use fastps_core::dtype::View;
use fastps_core::optim::{Optimizer, Sgd};
use fastps_core::tensor::TensorSpec;
use fastps_core::verbs::prelude::*;
use fastps_core::verbs::{Fate, Gradient, PushError, PushOptions};
use rustix::net::{Shutdown, SocketAddrUnix, getpeername, shutdown};
use rustix::process::{PidfdFlags, PidfdGetfdFlags, getpid, pidfd_getfd, pidfd_open};
use std::collections::HashMap;
use std::io::{Read, Write};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

const PATIENT: Duration = Duration::from_mins(1);
const SLICE: usize = 258_048;
/// Tensors of three slices and of one, and some small ones.
const SIZES: [usize; 6] = [2 * SLICE + 5, SLICE, 1000, 10, 1, 4097];

fn connect(
    address: &str,
    transport: Transport,
    timeout: Duration,
) -> fastps_core::error::Result<Arc<Client>> {
    let options = ConnectOptions { timeout, transport, ..ConnectOptions::default() };
    Client::connect(&[address.to_owned()], options)
}

fn name(k: usize) -> Arc<str> {
    format!("w {k}").into()
}

fn register(client: &Client, k: usize) {
    register_full(client, name(k), SIZES[k], 0.0);
}

/// Registers a tensor with `value` in every element.
fn register_full(client: &Client, name: Arc<str>, elements: usize, value: f32) {
    try_register(client, name, elements, value).unwrap();
}

/// Registers tensors until there is no memory for small ones either.
fn fill(client: &Client) {
    for elements in [1 << 14, 1 << 11] {
        let register = |k| try_register(client, format!("{elements} {k}").into(), elements, 0.0);
        assert!((0..1_000).any(|k| register(k).is_err()), "tensors of {elements} elements take all memory");
    }
}

fn try_register(
    client: &Client,
    name: Arc<str>,
    elements: usize,
    value: f32,
) -> fastps_core::error::Result<()> {
    let optimizer = Optimizer::Sgd(Sgd { lr: 1.0, ..Sgd::default() });
    let spec = TensorSpec::new(name, [elements as u64], optimizer);
    client.register(spec, View::Float32(&vec![value; elements]), PATIENT)
}

/// Adds 1 to every element.
fn ones() -> Vec<Gradient> {
    let gradient = |(k, n): (usize, &usize)| Gradient {
        name: name(k),
        shape: vec![*n as u64],
        values: Arc::new(vec![-1.0; *n]),
    };
    SIZES.iter().enumerate().map(gradient).collect()
}

fn options(timeout: Duration) -> PushOptions {
    PushOptions { timeout, ..PushOptions::default() }
}

/// The expected value of each slice, by tensor and first element.
type Ledger = Mutex<HashMap<(Arc<str>, usize), u32>>;

/// Pushes once and counts the applied slices after every doubt has settled. Returns the number of doubts.
fn push_and_enter(client: &Client, timeout: Duration, ledger: &Ledger) -> usize {
    let whole = |name: &Arc<str>| {
        let k = (0..SIZES.len()).find(|k| *self::name(*k) == **name).unwrap();
        (0..SIZES[k]).step_by(SLICE).map(|first| (name.clone(), first)).collect::<Vec<_>>()
    };
    let (applied, doubts) = match client.push(&ones(), &options(timeout)) {
        Ok(_) => ((0..SIZES.len()).flat_map(|k| whole(&name(k))).collect::<Vec<_>>(), 0),
        Err(PushError::Refused(_)) => (Vec::new(), 0),
        Err(PushError::Partial(partial)) => {
            let mut applied: Vec<_> = partial.receipts.iter().flat_map(|(name, _)| whole(name)).collect();
            applied.extend(partial.applied.iter().map(|(name, part, _)| (name.clone(), part.start)));
            for doubt in &partial.in_doubt {
                match doubt.result(PATIENT).unwrap() {
                    Fate::Applied { .. } => applied.push((doubt.tensor().clone(), doubt.elements().start)),
                    Fate::Fenced => {}
                    Fate::Unknown => panic!("unknown: {doubt:?}"),
                }
            }
            (applied, partial.in_doubt.len())
        }
    };
    let mut ledger = ledger.lock().unwrap();
    for slice in applied {
        *ledger.entry(slice).or_default() += 1;
    }
    doubts
}

/// The name of a server's Unix socket.
fn socket_name(address: &str) -> String {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let answer = runtime
        .block_on(async { Shard::connect(address, CLIENT).await.control.hello(timed(hello(CLIENT))).await });
    format!("fastps-{:016x}", answer.unwrap().into_inner().server)
}

/// This process's connections to the Unix socket of this name.
fn sockets(name: &str) -> Vec<OwnedFd> {
    let this = pidfd_open(getpid(), PidfdFlags::empty()).unwrap();
    let numbers = std::fs::read_dir("/proc/self/fd").unwrap().flatten();
    let numbers = numbers.filter_map(|entry| entry.file_name().to_str()?.parse().ok());
    let files = numbers.filter_map(|number| pidfd_getfd(&this, number, PidfdGetfdFlags::empty()).ok());
    let is_ours = |file: &OwnedFd| {
        let peer = getpeername(file).ok().and_then(|peer| SocketAddrUnix::try_from(peer?).ok());
        peer.is_some_and(|peer| peer.abstract_name() == Some(name.as_bytes()))
    };
    files.filter(is_ours).collect()
}

/// Cuts the connections to this socket in turn, after pauses of all lengths, until `stop` is set. Returns
/// their number.
fn cut(name: &str, stop: &AtomicBool, cuts: &AtomicU32) {
    let mut random = 0x1234_5678_u64;
    while !stop.load(Ordering::Relaxed) {
        random ^= random << 13;
        random ^= random >> 7;
        random ^= random << 17;
        std::thread::sleep(Duration::from_micros(1 << (random % 16)));
        let sockets = sockets(name);
        if let Some(socket) = sockets.get(random as usize / 16 % sockets.len().max(1)) {
            cuts.fetch_add(u32::from(shutdown(socket, Shutdown::Both).is_ok()), Ordering::Relaxed);
        }
    }
}

/// Connections of two clients, with a long and a short deadline, are cut: the server holds exactly the pushes
/// that they know as applied.
#[test]
fn every_push_counts_once_whatever_is_cut() {
    let cluster = Cluster::start(1);
    let address = &cluster.addresses()[0];
    let clients: Vec<_> = (0..2).map(|_| connect(address, Transport::Shm, PATIENT).unwrap()).collect();
    (0..SIZES.len()).for_each(|k| register(&clients[0], k));
    let (ledger, stop) = (Ledger::default(), AtomicBool::new(false));
    let socket = socket_name(address);
    let begin = Instant::now();
    let (cuts, rounds) = (AtomicU32::new(0), AtomicU32::new(0));
    let seen = || (cuts.load(Ordering::Relaxed), rounds.load(Ordering::Relaxed));
    let enough = || seen().0 >= 50 && seen().1 >= 20;
    // A slow machine needs more time.
    let continues = || begin.elapsed() < Duration::from_secs(8) || (!enough() && begin.elapsed() < PATIENT);
    let doubts: usize = std::thread::scope(|scope| {
        scope.spawn(|| cut(&socket, &stop, &cuts));
        let _end = AtTheEnd(&stop);
        let pushers: Vec<_> = clients
            .iter()
            .map(|client| {
                let (ledger, rounds, continues) = (&ledger, &rounds, &continues);
                scope.spawn(move || {
                    let (mut round, mut doubts) = (0, 0);
                    while continues() {
                        rounds.fetch_add(1, Ordering::Relaxed);
                        round += 1;
                        let patient = round % 2 == 0;
                        let timeout =
                            if patient { PATIENT } else { Duration::from_millis(1 + round * 7 % 40) };
                        let in_doubt = push_and_enter(client, timeout, ledger);
                        assert!(!patient || in_doubt == 0, "in doubt before its deadline");
                        doubts += in_doubt;
                    }
                    doubts
                })
            })
            .collect();
        pushers.into_iter().map(|pusher| pusher.join().unwrap()).sum()
    });
    let ledger = ledger.into_inner().unwrap();
    let names: Vec<_> = (0..SIZES.len()).map(name).collect();
    let mut check = |tensor: usize, first: usize, bytes: &[u8]| {
        let expected = ledger[&(name(tensor), first / SLICE * SLICE)] as f32;
        let good = bytes.as_chunks().0.iter().all(|value| f32::from_le_bytes(*value) == expected);
        assert!(good, "{} [{first}] is not {expected}", name(tensor));
    };
    clients[0].pull(&names, PATIENT, &mut check).unwrap();
    let (cuts, rounds) = seen();
    println!("{rounds} pushes, {doubts} slices in doubt, {cuts} cuts");
    assert!(enough(), "{cuts} cuts in {rounds} pushes");
}

/// A client may ask for shared memory once; a second request is invalid HTTP/2 and ends the connection.
#[test]
fn who_asks_again_is_not_served() {
    let path = std::env::temp_dir().join(format!("fastps-asks-{}", std::process::id()));
    let cluster = Cluster::of(1, |config| {
        config.memory_limit = Some(4 << 20);
        config.listen_unix = vec![path.clone()];
    });
    let ask = b"fastps shared memory 3\n";
    let mut socket = UnixStream::connect(&path).unwrap();
    socket.set_read_timeout(Some(Duration::from_secs(5))).unwrap();
    socket.write_all(ask).unwrap();
    let mut reason = [0; 256];
    socket.read_exact(&mut reason[..1]).unwrap();
    let length = usize::from(reason[0]);
    socket.read_exact(&mut reason[..length]).unwrap();
    let reason = String::from_utf8_lossy(&reason[..length]);
    assert!(reason.contains("memory is full"), "{reason}");
    socket.write_all(ask).unwrap();
    let mut rest = Vec::new();
    // Reads until the server closes the connection, with or without a GOAWAY.
    let _ = socket.read_to_end(&mut rest);
    assert!(!String::from_utf8_lossy(&rest).contains("memory is full"));
    assert_eq!(cluster.counter(0, "connections"), 0);
}

/// A client that does not read what it pulls fills its ring, and the server keeps two slices for it.
/// Meanwhile another client pushes to the same tensor and pulls it. In the end the slow client reads whole
/// versions of slices.
#[test]
fn a_slow_reader_slows_only_itself() {
    const SLICES: usize = 12;
    let cluster = Cluster::start(1);
    let address = &cluster.addresses()[0];
    let slow = connect(address, Transport::Shm, PATIENT).unwrap();
    let quick = connect(address, Transport::Shm, PATIENT).unwrap();
    register_full(&quick, "w".into(), SLICES * SLICE, 0.0);
    let (ones, shape) = (Arc::new(vec![-1.0; SLICES * SLICE]), vec![(SLICES * SLICE) as u64]);
    let (stalled, go_on) = (AtomicBool::new(false), AtomicBool::new(false));
    let is_whole = |bytes: &[u8]| {
        let values = bytes.as_chunks().0;
        values.iter().all(|value| *value == values[0]).then(|| f32::from_le_bytes(values[0]))
    };
    std::thread::scope(|scope| {
        let reader = scope.spawn(|| {
            // The waiting thread reads for its whole client. It stops at the first slice.
            let mut slices = 0;
            let mut take = |_: usize, _: usize, bytes: &[u8]| {
                stalled.store(true, Ordering::Release);
                while !go_on.load(Ordering::Acquire) {
                    std::thread::sleep(Duration::from_millis(1));
                }
                assert!(is_whole(bytes).is_some());
                slices += 1;
            };
            slow.pull(&["w".into()], PATIENT, &mut take).unwrap();
            assert_eq!(slices, SLICES);
        });
        let end = AtTheEnd(&go_on);
        let begin = Instant::now();
        while !stalled.load(Ordering::Acquire) {
            assert!(begin.elapsed() < PATIENT, "no value came");
            std::thread::yield_now();
        }
        let used = cluster.counter(0, "memory_used");
        for k in 1..=40 {
            let gradient = Gradient { name: "w".into(), shape: shape.clone(), values: ones.clone() };
            quick.push(&[gradient], &options(Duration::from_secs(10))).unwrap();
            let mut check = |_: usize, _: usize, bytes: &[u8]| assert_eq!(is_whole(bytes), Some(k as f32));
            quick.pull(&["w".into()], Duration::from_secs(10), &mut check).unwrap();
        }
        let taken = cluster.counter(0, "memory_used").saturating_sub(used);
        assert!(taken <= 32 << 20, "{taken} bytes more for a client that does not read");
        assert!(!reader.is_finished());
        drop(end);
        reader.join().unwrap();
    });
    assert_eq!(cluster.counter(0, "streams_reset"), 0);
    assert!(cluster.counter(0, "values_lent") >= 40 * SLICES as u64, "they are read in the server's memory");
}

/// A connection that is cut during a large pull ends, although values are borrowed. The client reconnects and
/// gets everything.
#[test]
fn a_connection_that_is_cut_in_mid_pull_ends() {
    const SLICES: usize = 20;
    let cluster = Cluster::start(1);
    let address = &cluster.addresses()[0];
    let client = connect(address, Transport::Shm, PATIENT).unwrap();
    register_full(&client, "w".into(), SLICES * SLICE, 3.0);
    let socket = socket_name(address);
    // The connection for calls has no stream of frames and takes less.
    let has_stream = || cluster.counter(0, "memory_connections") > 2 << 20;
    let mut slices = 0;
    let mut take = |_: usize, _: usize, bytes: &[u8]| {
        if slices == 0 {
            assert!(has_stream());
            let cut =
                sockets(&socket).iter().filter(|socket| shutdown(socket, Shutdown::Both).is_ok()).count();
            assert!(cut > 0, "there was no connection");
            let begin = Instant::now();
            while has_stream() {
                assert!(begin.elapsed() < PATIENT, "the connection does not end");
                std::thread::sleep(Duration::from_millis(1));
            }
        }
        assert!(bytes.as_chunks().0.iter().all(|value| f32::from_le_bytes(*value) == 3.0));
        slices += 1;
    };
    client.pull(&["w".into()], PATIENT, &mut take).unwrap();
    assert_eq!(slices, SLICES);
}

/// Without memory for two rings, the connection stays a Unix socket and says why; a client that requires
/// shared memory gets an error.
#[test]
fn without_room_the_unix_socket_does() {
    let cluster = Cluster::of(1, |config| config.memory_limit = Some(8 << 20));
    let address = &cluster.addresses()[0];
    fill(&connect(address, Transport::Tcp, PATIENT).unwrap());
    let client = connect(address, Transport::Auto, PATIENT).unwrap();
    let way = &client.transport()[0].1;
    assert!(way.starts_with("unix: ") && way.contains("memory is full"), "{way}");
    client.close(PATIENT);
    let client = connect(address, Transport::Shm, PATIENT).unwrap();
    let push =
        Gradient { name: "16384 0".into(), shape: vec![1 << 14], values: Arc::new(vec![1.0; 1 << 14]) };
    let error = client.push(&[push], &options(Duration::from_millis(500))).unwrap_err();
    assert!(format!("{error:?}").contains("memory is full"), "{error:?}");
}

/// Where there is memory for small rings only, a message of more than half of one passes through them.
#[test]
fn a_large_message_passes_rings_that_cannot_grow() {
    const LEN: usize = 10_000;
    let cluster = Cluster::of(1, |config| {
        (config.memory_limit, config.room_for_workers) = (Some(4 << 20), 0);
    });
    let client = connect(&cluster.addresses()[0], Transport::Shm, PATIENT).unwrap();
    register_full(&client, "w".into(), LEN, 0.0);
    for round in 1..=5 {
        let values = Arc::new(vec![-1.0; LEN]);
        let push = Gradient { name: "w".into(), shape: vec![LEN as u64], values };
        client.push(&[push], &options(PATIENT)).unwrap();
        let mut check = |_: usize, _: usize, bytes: &[u8]| {
            let values = bytes.as_chunks().0;
            assert!(values.iter().all(|value| f32::from_le_bytes(*value) == round as f32));
        };
        client.pull(&["w".into()], PATIENT, &mut check).unwrap();
    }
    let way = &client.transport()[0].1;
    assert!(way.starts_with("shm"), "{way}");
    let taken = cluster.counter(0, "memory_connections");
    assert!(taken < 2 << 20, "{taken} bytes: rings have grown");
}
