//! Floods of HTTP/2 control frames: the server ends each within 1,000 frames, and other clients are not
//! affected.

use crate::certificates::Ca;
use crate::cluster::Cluster;
use crate::ledger::{gradient, pull, register};
use fastps_client::{Client, ConnectOptions, Transport};
use fastps_core::optim::{Optimizer, Sgd};
use fastps_core::verbs::PushOptions;
use fastps_core::verbs::prelude::*;
use fastps_server::TlsFiles;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, ServerName};
use rustls::{ClientConfig, ClientConnection, RootCertStore, StreamOwned};
use std::io::{ErrorKind, Read, Write};
use std::net::TcpStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

const FRAMES: usize = 1000;
const BATCH: usize = 100;
const PATIENT: Duration = Duration::from_mins(1);
/// The deadline of other clients' calls during a flood, on a busy machine.
const DEADLINE: Duration = Duration::from_secs(20);
const GOAWAY: u8 = 7;
const ACK: u8 = 1;
const ENHANCE_YOUR_CALM: u32 = 0xb;
/// The setting by which a server recognizes a native client (see `protos/README.md`).
const NATIVE: u32 = 0x6670_7331;

fn frame(kind: u8, stream: u32, payload: &[u8]) -> Vec<u8> {
    let mut bytes = (payload.len() as u32).to_be_bytes()[1..].to_vec();
    bytes.extend([kind, 0]);
    bytes.extend(stream.to_be_bytes());
    bytes.extend(payload);
    bytes
}

/// The frames of a flood, and how many are sent at a time.
fn floods() -> Vec<(&'static str, Vec<u8>, usize)> {
    vec![
        ("PING", frame(6, 0, &[7; 8]), FRAMES),
        ("PING", frame(6, 0, &[7; 8]), BATCH),
        ("SETTINGS", frame(4, 0, &[]), FRAMES),
        ("SETTINGS", frame(4, 0, &[]), BATCH),
        ("WINDOW_UPDATE", frame(8, 0, &[0, 0, 0, 1]), FRAMES),
        ("PRIORITY", frame(2, 1, &[0, 0, 0, 3, 16]), FRAMES),
        ("unknown", frame(0xfa, 0, &[1, 2, 3]), FRAMES),
    ]
}

/// The next frame's type, flags and payload; `None` if the connection has ended.
fn next(io: &mut impl Read) -> Option<(u8, u8, Vec<u8>)> {
    let mut header = [0; 9];
    match io.read_exact(&mut header) {
        Ok(()) => {}
        Err(error) if error.kind() == ErrorKind::UnexpectedEof => return None,
        Err(error) => panic!("the connection is cut: {error}"),
    }
    let [a, b, c, kind, flags, ..] = header;
    let mut payload = vec![0; u32::from_be_bytes([0, a, b, c]) as usize];
    io.read_exact(&mut payload).unwrap();
    Some((kind, flags, payload))
}

/// The code of the GOAWAY with which the server ended a flooding connection. Frames are sent in batches of
/// `batch`, each after the previous one was acknowledged.
fn ended(mut io: impl Read + Write, native: bool, flood: &[u8], batch: usize) -> Option<u32> {
    let mut sent = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n".to_vec();
    let mark = [&6_u16.to_be_bytes()[..], &NATIVE.to_be_bytes()].concat();
    sent.extend(frame(4, 0, if native { &mark } else { &[] }));
    io.write_all(&sent).unwrap();
    let (mut batches, mut acknowledged) = (0, 0);
    loop {
        if batches * batch < FRAMES && acknowledged >= batches * batch {
            batches += 1;
            io.write_all(&flood.repeat(batch)).unwrap();
            io.flush().unwrap();
        }
        match next(&mut io)? {
            (GOAWAY, _, payload) => return payload[4..8].try_into().ok().map(u32::from_be_bytes),
            (kind, ACK, _) if kind == flood[3] => acknowledged += 1,
            _ => {}
        }
    }
}

fn secure(tcp: TcpStream, files: &TlsFiles) -> StreamOwned<ClientConnection, TcpStream> {
    let mut roots = RootCertStore::empty();
    roots.add(CertificateDer::from_pem_file(files.ca.as_ref().unwrap()).unwrap()).unwrap();
    let config = ClientConfig::builder().with_root_certificates(roots).with_no_client_auth();
    let name = ServerName::try_from("127.0.0.1").unwrap();
    StreamOwned::new(ClientConnection::new(Arc::new(config), name).unwrap(), tcp)
}

/// Takes small steps until `stop` is set, each within its deadline.
fn work(client: &Client, stop: &AtomicBool) {
    register(client, "w", 1000, Optimizer::Sgd(Sgd { lr: 1.0, ..Sgd::default() }));
    let options = PushOptions { timeout: DEADLINE, ..PushOptions::default() };
    let mut steps = 0;
    while !stop.load(Ordering::Relaxed) {
        client.push(&[gradient("w", vec![-1.0; 1000])], &options).unwrap();
        client.stats(DEADLINE).unwrap();
        steps += 1;
    }
    assert_eq!(pull(client, vec!["w".into()])[0], vec![steps as f32; 1000]);
}

fn check(cluster: &Cluster, tls: TlsFiles) {
    let options = ConnectOptions {
        timeout: PATIENT,
        tls: tls.clone(),
        transport: Transport::Tcp,
        ..Default::default()
    };
    let client = Client::connect(&cluster.addresses(), options).unwrap();
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let honest = scope.spawn(|| work(&client, &stop));
        let flood = |(native, (name, bytes, batch)): (bool, (&'static str, Vec<u8>, usize))| {
            let (address, tls) = (&cluster.addresses()[0], &tls);
            let tcp = TcpStream::connect(address).unwrap();
            tcp.set_read_timeout(Some(PATIENT)).unwrap();
            scope.spawn(move || {
                let code = match tls.ca {
                    None => ended(tcp, native, &bytes, batch),
                    Some(_) => ended(secure(tcp, tls), native, &bytes, batch),
                };
                assert_eq!(code, Some(ENHANCE_YOUR_CALM), "{name}, {batch} at a time, native: {native}");
            })
        };
        let all = [false, true].into_iter().flat_map(|native| floods().into_iter().map(move |f| (native, f)));
        let floods: Vec<_> = all.map(flood).collect();
        let floods: Vec<_> = floods.into_iter().map(std::thread::ScopedJoinHandle::join).collect();
        stop.store(true, Ordering::Relaxed);
        honest.join().unwrap();
        for flood in floods {
            flood.unwrap();
        }
    });
    assert_eq!(cluster.counter(0, "floods_cut"), 14);
}

#[test]
fn floods_are_cut() {
    check(&Cluster::start(1), TlsFiles::default());
}

#[test]
fn floods_are_cut_over_tls() {
    let ca = Ca::new();
    check(&Cluster::of(1, |config| config.tls = ca.server()), ca.trust());
}
