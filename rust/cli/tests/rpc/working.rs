//! The memory of clients that work: each takes what it uses, and tensors leave room for some of them.

use fastps_client::{Client, ConnectOptions, Transport};
use fastps_core::dtype::View;
use fastps_core::error::{Kind, Result};
use fastps_core::optim::{Optimizer, Sgd};
use fastps_core::tensor::TensorSpec;
use fastps_core::verbs::prelude::*;
use fastps_core::verbs::{Gradient, PushOptions};
use fastps_server::{Server, ServerConfig};
use std::sync::Arc;
use std::time::Duration;

const PATIENT: Duration = Duration::from_mins(2);
/// Elements of a whole slice.
const SLICE: usize = 63 * 4096;
/// Most memory of a client that pushes a small tensor, with its connection for calls.
const SMALL_CLIENT_BYTES: u64 = 320 << 10;

fn start(memory_limit: u64) -> Server {
    let listen = vec!["127.0.0.1:0".into()];
    let config = ServerConfig { listen, memory_limit: Some(memory_limit), ..ServerConfig::default() };
    Server::start(&config).unwrap()
}

fn counter(server: &Server, name: &str) -> u64 {
    server.counters()[0].iter().find(|(n, _)| *n == name).unwrap().1
}

fn connect(server: &Server) -> Arc<Client> {
    let options = ConnectOptions { timeout: PATIENT, transport: Transport::Tcp, ..Default::default() };
    Client::connect(server.addresses(), options).unwrap()
}

fn register(client: &Client, name: &str, elements: usize) -> Result<()> {
    let optimizer = Optimizer::Sgd(Sgd { lr: 1.0, ..Sgd::default() });
    let spec = TensorSpec::new(name, [elements as u64], optimizer);
    client.register(spec, View::Float32(&vec![0.0; elements]), PATIENT)
}

fn push(client: &Client, name: &str, elements: usize) {
    let gradient =
        Gradient { name: name.into(), shape: vec![elements as u64], values: Arc::new(vec![1.0; elements]) };
    client.push(&[gradient], &PushOptions { timeout: PATIENT, ..PushOptions::default() }).unwrap();
}

/// Ten times as many as would fit if each took its whole windows.
#[test]
fn many_clients_work_in_little_memory() {
    const CLIENTS: u64 = 100;
    let server = start(64 << 20);
    let first = connect(&server);
    register(&first, "w", 10_000).unwrap();
    let clients: Vec<_> = (0..CLIENTS).map(|_| connect(&server)).collect();
    for _ in 0..3 {
        for client in &clients {
            push(client, "w", 10_000);
        }
    }
    let taken = counter(&server, "memory_connections");
    assert!(taken <= CLIENTS * SMALL_CLIENT_BYTES, "{taken} bytes for {CLIENTS} clients");
    assert_eq!(counter(&server, "connections_refused"), 0);
}

#[test]
fn tensors_leave_room_for_workers() {
    let server = start(96 << 20);
    let first = connect(&server);
    let refused = (0..100).find_map(|k| register(&first, &format!("w{k}"), SLICE).err());
    let refused = refused.expect("tensors take all memory");
    assert_eq!((refused.kind, refused.shard), (Kind::Capacity, Some(0)), "{refused}");
    assert!(refused.tensor.is_some() && refused.to_string().contains("room for 16 workers"), "{refused}");
    let workers: Vec<_> = (0..16).map(|_| connect(&server)).collect();
    for _ in 0..2 {
        for worker in &workers {
            push(worker, "w0", SLICE);
        }
    }
    assert_eq!(counter(&server, "connections_refused"), 0);
}

/// Memory is as full as tensors make it, and each worker has had a frame as large as there are, so that only
/// what was kept for them is left for what the slices remember of their pushes.
#[test]
fn workers_that_fit_push_to_every_slice_of_a_full_shard() {
    const SMALL: usize = 10;
    let server = start(96 << 20);
    let first = connect(&server);
    let full = |prefix: &str, elements| {
        (0..20_000).find(|k| register(&first, &format!("{prefix}{k}"), elements).is_err()).unwrap()
    };
    let (large, small) = (full("w", SLICE), full("s", SMALL));
    first.close(PATIENT);
    assert!(large > 10 && small > 10, "{large} and {small}");
    let workers: Vec<_> = (0..16).map(|_| connect(&server)).collect();
    for _ in 0..2 {
        for worker in &workers {
            push(worker, "w0", SLICE);
        }
        for worker in &workers {
            (0..large).for_each(|k| push(worker, &format!("w{k}"), SLICE));
            (0..small).for_each(|k| push(worker, &format!("s{k}"), SMALL));
        }
    }
    assert_eq!(counter(&server, "connections_refused"), 0);
    let slices = (large + small) as u64;
    let taken = counter(&server, "memory_identities") / (16 * slices);
    assert!(taken <= 350, "{taken} bytes per client and slice");
}
