//! TLS from both ends: which clients get in, and which errors the others get. `exactly_once` tests cut
//! connections.

use crate::certificates::Ca;
use crate::cluster::Cluster;
use fastps_client::{Client, ConnectOptions, Transport};
use fastps_core::dtype::View;
use fastps_core::error::{Error, Kind};
use fastps_core::optim::{Optimizer, Sgd};
use fastps_core::tensor::TensorSpec;
use fastps_core::verbs::prelude::*;
use fastps_core::verbs::{Gradient, PushOptions};
use fastps_server::{Role, Server, ServerConfig, TlsFiles};
use std::fs::Permissions;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

const PATIENT: Duration = Duration::from_mins(1);
/// A refusal comes long before the deadline, because it is not retried.
const SOON: Duration = Duration::from_secs(10);
/// Two slices and a part.
const LARGE: usize = 600_001;

fn cluster(tls: TlsFiles) -> Cluster {
    Cluster::of(2, |config| config.tls = tls)
}

fn options(tls: TlsFiles) -> ConnectOptions {
    ConnectOptions { timeout: PATIENT, tls, ..ConnectOptions::default() }
}

fn connect(cluster: &Cluster, options: ConnectOptions) -> Arc<Client> {
    Client::connect(&cluster.addresses(), options).unwrap()
}

/// Takes a step and checks that it arrived.
fn check(client: &Client, name: &str) {
    let optimizer = Optimizer::Sgd(Sgd { lr: 1.0, ..Sgd::default() });
    let shape = vec![LARGE as u64];
    let spec = TensorSpec::new(name, shape.clone(), optimizer);
    client.register(spec, View::Float32(&vec![0.0; LARGE]), PATIENT).unwrap();
    let values: Vec<f32> = (0..LARGE).map(|k| -(k as f32)).collect();
    let gradient = Gradient { name: name.into(), shape, values: Arc::new(values) };
    let push = PushOptions { timeout: PATIENT, ..PushOptions::default() };
    let mut got = vec![0.0_f32; LARGE];
    let mut take = |_: usize, first: usize, bytes: &[u8]| {
        for (value, bytes) in got[first..].iter_mut().zip(bytes.as_chunks().0) {
            *value = f32::from_le_bytes(*bytes);
        }
    };
    client.push_pull(&[gradient], &push, &mut take).unwrap();
    assert!(got.iter().enumerate().all(|(k, value)| *value == k as f32));
}

/// The client's error, which must come soon, and contain the address and these words.
fn refusal(address: &str, options: ConnectOptions, kind: Kind, says: &str) -> Error {
    let begin = Instant::now();
    let error = Client::connect(&[address.to_owned()], options).expect_err(says);
    assert!(begin.elapsed() < SOON, "{error} came after {:?}", begin.elapsed());
    assert_eq!(error.kind, kind, "{error}");
    assert!(error.to_string().contains(address), "{error}");
    assert!(error.to_string().contains(says), "{error} should say {says:?}");
    error
}

#[test]
fn frames_travel_encrypted_or_within_this_machine() {
    let ca = Ca::new();
    let cluster = cluster(ca.server());
    for (transport, way) in
        [(Transport::Tcp, "tcp with TLS: asked for"), (Transport::Auto, "shm: "), (Transport::Unix, "unix: ")]
    {
        let client = connect(&cluster, ConnectOptions { transport, ..options(ca.trust()) });
        check(&client, &format!("{transport:?}"));
        let ways = client.transport();
        assert!(ways.len() == 2 && ways.iter().all(|(_, w)| w.starts_with(way)), "{ways:?}");
    }
    // A party in between sees neither the tensor's name nor its values.
    let (between, seen): (Vec<_>, Vec<_>) = cluster.addresses().iter().cloned().map(tap).unzip();
    let client = Client::connect(&between, options(ca.trust())).unwrap();
    check(&client, "a confidential name");
    let seen: Vec<u8> = seen.iter().flat_map(|seen| seen.lock().unwrap().clone()).collect();
    assert!(seen.len() > 4 * LARGE);
    assert!(!seen.windows(12).any(|bytes| bytes == b"confidential"));
}

/// Forwards connections to a server and keeps what clients send.
fn tap(server: String) -> (String, Arc<std::sync::Mutex<Vec<u8>>>) {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap().to_string();
    let seen = Arc::new(std::sync::Mutex::new(Vec::new()));
    let kept = seen.clone();
    std::thread::spawn(move || {
        for client in listener.incoming() {
            let (mut client, mut server) = (client.unwrap(), TcpStream::connect(&server).unwrap());
            let (mut from_server, mut to_client) = (server.try_clone().unwrap(), client.try_clone().unwrap());
            std::thread::spawn(move || drop(std::io::copy(&mut from_server, &mut to_client)));
            let kept = kept.clone();
            std::thread::spawn(move || {
                let mut buffer = vec![0; 1 << 16];
                while let Ok(n @ 1..) = client.read(&mut buffer) {
                    kept.lock().unwrap().extend(&buffer[..n]);
                    if server.write_all(&buffer[..n]).is_err() {
                        break;
                    }
                }
            });
        }
    });
    (address, seen)
}

/// The output of a server that starts with a key file of this mode.
fn said_of_a_key(ca: &Ca, mode: u32) -> String {
    let files = ca.server();
    let (cert, key) = (files.cert.unwrap(), files.key.unwrap());
    std::fs::set_permissions(&key, Permissions::from_mode(mode)).unwrap();
    let mut command = Command::new(env!("CARGO_BIN_EXE_fastps-server"));
    command
        .args(["--listen", "127.0.0.1:0", "--web", "off", "--memory-limit", "1GiB", "--tls-cert"])
        .arg(cert)
        .arg("--tls-key")
        .arg(key);
    let mut server = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let mut line = String::new();
    BufReader::new(server.stdout.as_mut().unwrap()).read_line(&mut line).unwrap();
    server.kill().unwrap();
    String::from_utf8(server.wait_with_output().unwrap().stderr).unwrap()
}

#[test]
fn a_key_that_others_can_read_warns() {
    let ca = Ca::new();
    for mode in [0o644, 0o640, 0o620] {
        let said = said_of_a_key(&ca, mode);
        assert!(said.contains("WARN") && said.contains("server-key.pem"), "{said}");
    }
    assert_eq!(said_of_a_key(&ca, 0o600), "");
}

#[test]
fn tls_and_plain_text_tell_each_other() {
    let ca = Ca::new();
    let (plain, tls) = (cluster(TlsFiles::default()), cluster(ca.server()));
    refusal(&tls.addresses()[0], options(TlsFiles::default()), Kind::Denied, "this port speaks TLS");
    refusal(&plain.addresses()[0], options(ca.trust()), Kind::Denied, "does not speak TLS");
    // Peers that speak neither are refused too, and no other client is affected.
    for garbage in [&b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"[..], &[0x16, 3, 1, 0, 5, 1, 2, 3, 4, 5], &[0; 100]]
    {
        let mut socket = TcpStream::connect(&tls.addresses()[0]).unwrap();
        socket.set_read_timeout(Some(PATIENT)).unwrap();
        socket.write_all(garbage).unwrap();
        let mut answer = Vec::new();
        socket.read_to_end(&mut answer).unwrap();
    }
    check(&connect(&tls, options(ca.trust())), "w");
    check(&connect(&plain, options(TlsFiles::default())), "w");
}

#[test]
fn want_of_memory_is_reported_over_tls() {
    let ca = Ca::new();
    let cluster = Cluster::of(1, |config| {
        config.tls = ca.server();
        config.memory_limit = Some(1 << 18);
    });
    refusal(&cluster.addresses()[0], options(ca.trust()), Kind::Capacity, "memory");
    assert_eq!(cluster.counter(0, "connections"), 0);
}

#[test]
fn a_server_that_comes_back_without_trust_is_reported() {
    let (ca, other) = (Ca::new(), Ca::new());
    let config =
        |listen: &str, tls| ServerConfig { listen: vec![listen.into()], tls, ..ServerConfig::default() };
    let server = Server::start(&config("127.0.0.1:0", ca.server())).unwrap();
    let address = server.addresses()[0].clone();
    let client = Client::connect(std::slice::from_ref(&address), options(ca.trust())).unwrap();
    check(&client, "w");
    server.stop(Duration::from_secs(5)).unwrap();
    let _server = Server::start(&config(&address, other.server())).unwrap();
    let begin = Instant::now();
    let error = client.stats(PATIENT).unwrap_err();
    assert_eq!(error.kind, Kind::Denied, "{error}");
    assert!(error.to_string().contains("was not signed by a CA of tls_ca"), "{error}");
    assert!(begin.elapsed() < SOON);
}

#[test]
fn files_that_cannot_be_used_are_named() {
    let (ca, other) = (Ca::new(), Ca::new());
    let good = ca.server();
    let (cert, key) = (good.cert.clone().unwrap(), good.key.clone().unwrap());
    let file = |name: &str, text: &str| {
        let path = ca.folder().join(name);
        std::fs::write(&path, text).unwrap();
        Some(path)
    };
    let secret = std::fs::read_to_string(&key).unwrap();
    let body = secret.lines().nth(1).unwrap().to_owned();
    let missing = || Some(PathBuf::from("/nowhere/file.pem"));
    let broken = file("broken.pem", &secret.replace("-----END", "----- END"));
    let odd = file("odd.pem", &format!("-----BEGIN {body}\n{body}\n"));
    let bad = [
        (TlsFiles { cert: missing(), ..good.clone() }, "/nowhere/file.pem"),
        (TlsFiles { key: missing(), ..good.clone() }, "/nowhere/file.pem"),
        (TlsFiles { ca: missing(), ..good.clone() }, "/nowhere/file.pem"),
        (TlsFiles { cert: file("empty.pem", ""), ..good.clone() }, "empty.pem"),
        (TlsFiles { cert: file("text.pem", "not a certificate"), ..good.clone() }, "text.pem"),
        (TlsFiles { cert: Some(key.clone()), ..good.clone() }, "server-key.pem"),
        (TlsFiles { key: Some(cert.clone()), ..good.clone() }, "server.pem"),
        (TlsFiles { key: broken, ..good.clone() }, "broken.pem"),
        (TlsFiles { key: odd, ..good.clone() }, "odd.pem"),
        (TlsFiles { ca: Some(key), ..good.clone() }, "server-key.pem"),
        (TlsFiles { key: other.server().key, ..good.clone() }, "server.pem"),
        (ca.expired(), "expired.pem has expired"),
        (TlsFiles { key: None, ..good.clone() }, "tls_key"),
        (TlsFiles { cert: None, ..good.clone() }, "tls_cert"),
        (ca.trust(), "tls_cert and tls_key"),
    ];
    for (tls, names) in bad {
        let config = ServerConfig { listen: vec!["127.0.0.1:0".into()], tls, ..ServerConfig::default() };
        let error = Server::start(&config).expect_err(names);
        assert_eq!(error.kind, Kind::Config, "{error}");
        let text = error.to_string();
        assert!(text.contains(names), "{text} should name {names:?}");
        assert!(!text.contains(&body) && !format!("{config:?}").contains(&body), "the key is shown");
    }
    for (tls, names) in [
        (good, "tls_ca"),
        (TlsFiles { ca: missing(), ..TlsFiles::default() }, "/nowhere/file.pem"),
        (TlsFiles { cert: None, ..ca.client() }, "tls_cert"),
    ] {
        let error = Client::connect(&["127.0.0.1:1".into()], options(tls)).expect_err(names);
        assert_eq!(error.kind, Kind::Config, "{error}");
        assert!(error.to_string().contains(names), "{error}");
    }
}

#[test]
fn off_loopback_tls_is_enough() {
    let ca = Ca::new();
    let config = ServerConfig {
        listen: vec!["0.0.0.0:0".into()],
        advertise: Some("127.0.0.1".into()),
        ..ServerConfig::default()
    };
    let error = Server::start(&config).unwrap_err();
    assert!(error.to_string().contains("--tls-cert"), "{error}");
    let config = ServerConfig { tls: ca.mutual(), certificate_role: Role::Worker, ..config };
    let server = Server::start(&config).unwrap();
    check(&Client::connect(server.addresses(), options(ca.client())).unwrap(), "w");
}
