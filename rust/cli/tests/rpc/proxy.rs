//! Proxies for TCP and Unix sockets that break connections: at any byte of either direction, after a stall,
//! or after swallowing answers.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt, split};
use tokio::net::{TcpListener, TcpStream, UnixListener, UnixStream};
use tokio::runtime::Runtime;
use tokio::sync::Notify;

/// One proxy per server.
#[derive(Debug)]
pub(crate) struct Proxies {
    addresses: Vec<String>,
    shared: Arc<Shared>,
    runtime: Option<Runtime>,
}

#[derive(Debug)]
struct Shared {
    faulty: AtomicBool,
    /// No connection gets through.
    down: AtomicBool,
    /// Answers are dropped.
    deaf: AtomicBool,
    /// Ends the current connections.
    begin: Notify,
    random: AtomicU64,
    cuts: AtomicU64,
}

impl Shared {
    /// splitmix64
    fn random(&self) -> u64 {
        let mut z = self.random.fetch_add(0x9E37_79B9_7F4A_7C15, Ordering::Relaxed);
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    }

    /// A random byte offset in a connection; early ones (handshake, hello, headers) are as likely as late
    /// ones.
    fn byte(&self, bits: u64) -> u64 {
        let scale = 1 << (5 + self.random() % (bits - 4));
        self.random() % scale
    }
}

/// The fault of one direction: how many bytes pass, and what happens then.
#[derive(Clone, Copy)]
struct Fault {
    after: u64,
    then: Then,
}

#[derive(Clone, Copy, PartialEq)]
enum Then {
    Cut,
    StallAndCut,
    SwallowAndCut,
}

impl Proxies {
    pub(crate) fn start(servers: &[String], seed: u64) -> Self {
        let runtime =
            tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
        let shared = Arc::new(Shared {
            faulty: AtomicBool::new(false),
            down: AtomicBool::new(false),
            deaf: AtomicBool::new(false),
            begin: Notify::new(),
            random: AtomicU64::new(seed),
            cuts: AtomicU64::new(0),
        });
        let addresses = servers.iter().map(|server| {
            let listener = runtime.block_on(TcpListener::bind("127.0.0.1:0")).unwrap();
            let address = listener.local_addr().unwrap().to_string();
            runtime.spawn(serve(listener, server.clone(), shared.clone()));
            address
        });
        Self { addresses: addresses.collect(), shared, runtime: Some(runtime) }
    }

    /// Proxies the Unix sockets of these servers. Their names start with `prefix`, so clients find the
    /// proxies instead.
    pub(crate) fn before_sockets(&self, prefix: &str, servers: usize) {
        let runtime = self.runtime.as_ref().unwrap();
        let prefix = &format!("@{prefix}-");
        let mut found = Vec::new();
        // Each shard opens its socket some time after the server has started.
        while found.len() < servers {
            let all = std::fs::read_to_string("/proc/net/unix").unwrap();
            let names = all.lines().filter_map(|line| line.rsplit(' ').next()?.strip_prefix(prefix));
            found = names.map(str::to_owned).collect();
            std::thread::sleep(Duration::from_millis(1));
        }
        for server in found {
            let _inside = runtime.enter();
            let listener = UnixListener::bind(format!("\0fastps-{server}")).unwrap();
            let behind = format!("\0{}{server}", &prefix[1..]);
            runtime.spawn(serve_unix(listener, behind, self.shared.clone()));
        }
    }

    pub(crate) fn addresses(&self) -> Vec<String> {
        self.addresses.clone()
    }

    /// Turns faults on or off; turning them on cuts the current connections.
    pub(crate) fn set_faulty(&self, faulty: bool) {
        self.shared.faulty.store(faulty, Ordering::SeqCst);
        self.shared.begin.notify_waiters();
    }

    /// Drops all answers from now on, also on current connections.
    pub(crate) fn set_deaf(&self, deaf: bool) {
        self.shared.deaf.store(deaf, Ordering::SeqCst);
    }

    /// Cuts all connections and lets none through, or lets them through again.
    pub(crate) fn set_down(&self, down: bool) {
        self.shared.down.store(down, Ordering::SeqCst);
        self.shared.begin.notify_waiters();
    }

    /// Connections broken so far.
    pub(crate) fn cuts(&self) -> u64 {
        self.shared.cuts.load(Ordering::SeqCst)
    }
}

impl Drop for Proxies {
    fn drop(&mut self) {
        if let Some(runtime) = self.runtime.take() {
            runtime.shutdown_background();
        }
    }
}

async fn serve(listener: TcpListener, server: String, shared: Arc<Shared>) {
    while let Ok((client, _)) = listener.accept().await {
        if shared.down.load(Ordering::SeqCst) {
            continue;
        }
        let (server, shared) = (server.clone(), shared.clone());
        tokio::spawn(async move {
            if let Ok(server) = TcpStream::connect(server).await {
                for stream in [&client, &server] {
                    let _ = stream.set_nodelay(true);
                }
                relay(client, server, &shared).await;
            }
        });
    }
}

async fn serve_unix(listener: UnixListener, server: String, shared: Arc<Shared>) {
    while let Ok((client, _)) = listener.accept().await {
        if shared.down.load(Ordering::SeqCst) {
            continue;
        }
        let (server, shared) = (server.clone(), shared.clone());
        tokio::spawn(async move {
            if let Ok(server) = UnixStream::connect(server).await {
                relay(client, server, &shared).await;
            }
        });
    }
}

async fn relay<S: AsyncRead + AsyncWrite>(client: S, server: S, shared: &Shared) {
    let faulty = shared.faulty.load(Ordering::SeqCst);
    let begin = shared.begin.notified();
    let kind = match shared.random() % 4 {
        0 => Then::StallAndCut,
        1 => Then::SwallowAndCut,
        _ => Then::Cut,
    };
    // Requests and answers are of different size; one direction breaks per connection.
    let upwards = shared.random().is_multiple_of(2);
    let fault = |up: bool| {
        let after = shared.byte(if up { 22 } else { 13 });
        Some(Fault { after, then: kind }).filter(|_| faulty && up == upwards)
    };
    let (client_read, client_write) = split(client);
    let (server_read, server_write) = split(server);
    tokio::select! {
        broken = pump(client_read, server_write, fault(true), None) => count(shared, broken),
        broken = pump(server_read, client_write, fault(false), Some(&shared.deaf)) => count(shared, broken),
        () = begin => {}
    }
}

fn count(shared: &Shared, broken: bool) {
    shared.cuts.fetch_add(u64::from(broken), Ordering::SeqCst);
}

/// Copies one direction until it ends or its fault happens. Returns whether the fault happened.
async fn pump(
    mut from: impl AsyncRead + Unpin,
    mut to: impl AsyncWrite + Unpin,
    fault: Option<Fault>,
    deaf: Option<&AtomicBool>,
) -> bool {
    let mut buffer = vec![0; 64 << 10];
    let mut left = fault.map_or(u64::MAX, |fault| fault.after);
    loop {
        let room = left.min(buffer.len() as u64) as usize;
        if room == 0 {
            match fault.map(|fault| fault.then) {
                Some(Then::StallAndCut) => tokio::time::sleep(Duration::from_millis(60)).await,
                Some(Then::SwallowAndCut) => {
                    let swallow = async { while matches!(from.read(&mut buffer).await, Ok(n) if n > 0) {} };
                    let _ = tokio::time::timeout(Duration::from_millis(40), swallow).await;
                }
                Some(Then::Cut) | None => {}
            }
            return true;
        }
        match from.read(&mut buffer[..room]).await {
            Ok(n) if n > 0 && deaf.is_some_and(|deaf| deaf.load(Ordering::SeqCst)) => {}
            Ok(n) if n > 0 && to.write_all(&buffer[..n]).await.is_ok() => left -= n as u64,
            _ => return false,
        }
    }
}
