//! Connections that never complete their opening: they give way and lock no other client out.

use crate::certificates::Ca;
use crate::cluster::Cluster;
use fastps_client::{Client, ConnectOptions};
use fastps_core::verbs::prelude::*;
use std::io::{Read, Write};
use std::net::TcpStream;
use std::sync::Arc;
use std::time::{Duration, Instant};

const PATIENT: Duration = Duration::from_mins(1);
/// Well before the 10 seconds that a handshake may take.
const SOON: Duration = Duration::from_secs(9);
/// More than one address may have open.
const MANY: usize = 300;

/// Connections that have sent only these bytes of a TLS handshake.
fn unfinished(cluster: &Cluster, sent: &[u8]) -> Vec<TcpStream> {
    let begin = |_| {
        let mut socket = TcpStream::connect(&cluster.addresses()[0]).unwrap();
        // Connections that have already given way cannot be written to.
        let _ = socket.write_all(sent);
        socket.set_read_timeout(Some(PATIENT)).unwrap();
        socket
    };
    (0..MANY).map(begin).collect()
}

fn connect(cluster: &Cluster, ca: &Ca) -> Arc<Client> {
    let options = ConnectOptions { timeout: PATIENT, tls: ca.trust(), ..ConnectOptions::default() };
    Client::connect(&cluster.addresses(), options).unwrap()
}

fn secure() -> (Ca, Cluster) {
    let ca = Ca::new();
    let cluster = Cluster::of(1, |config| config.tls = ca.server());
    (ca, cluster)
}

#[test]
fn silent_connections_lock_nobody_out() {
    let (ca, cluster) = secure();
    let begin = Instant::now();
    let mut silent = unfinished(&cluster, b"");
    let client = connect(&cluster, &ca);
    client.stats(PATIENT).unwrap();
    assert!(begin.elapsed() < SOON, "{:?}", begin.elapsed());
    // The server closes them.
    for socket in &mut silent {
        let read = socket.read(&mut [0]);
        assert!(!matches!(read, Ok(1..)), "{read:?}");
    }
    assert!(begin.elapsed() < SOON, "{:?}", begin.elapsed());
    // Connections in their opening do not delay the server's stop.
    let _silent = unfinished(&cluster, b"");
    let begin = Instant::now();
    drop((client, cluster));
    assert!(begin.elapsed() < SOON, "{:?}", begin.elapsed());
}

#[test]
fn handshakes_that_are_not_finished_lock_nobody_out() {
    let (ca, cluster) = secure();
    let begin = Instant::now();
    let _unfinished = unfinished(&cluster, &[0x16, 3, 1, 2, 0]);
    connect(&cluster, &ca).stats(PATIENT).unwrap();
    assert!(begin.elapsed() < SOON, "{:?}", begin.elapsed());
}

#[test]
fn silent_connections_take_no_memory_without_tls() {
    let cluster = Cluster::of(1, |config| config.memory_limit = Some(12 << 20));
    // As many idle connections would not fit.
    let _silent = unfinished(&cluster, b"");
    let client = Client::connect(&cluster.addresses(), ConnectOptions::default()).unwrap();
    client.stats(PATIENT).unwrap();
}
