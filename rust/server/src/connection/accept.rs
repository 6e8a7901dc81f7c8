//! Accepts connections, shakes hands where the server has TLS, and gives each to the loop that serves it:
//! `native` for native clients, tonic for all others. A native client is known by its first SETTINGS, which
//! every HTTP/2 client sends before anything else.

use crate::auth::access::Access;
use crate::auth::principal::Principal;
use crate::auth::principal_uri;
use crate::cluster::node::{ConnectionCounters, Node, Phase};
use crate::connection::accepted::{CONNECTION_WINDOW, Connection, PREFACE};
use crate::connection::native;
use crate::connection::not_grpc::{is_http1, refuse_http1};
use crate::connection::pending::{Admitted, Pending, PendingSlot};
use crate::connection::reject::{linger, reject};
use crate::connection::spare::Spare;
use crate::listeners::Accepting;
use fastps_core::error::{Error, Kind, Result};
use fastps_transport::Socket;
use fastps_transport::memory_budget::{AT_REST_BYTES, MemoryBudget};
use fastps_transport::tls::certificate::Certificate;
use fastps_transport::tls::{self, ServerTls};
use fastps_transport::unix::Local;
use std::future::poll_fn;
use std::io;
use std::net::IpAddr;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::task::{Context, Poll};
use std::time::Duration;
use tokio::net::TcpStream;
use tokio::sync::mpsc;

/// Most connections of a shard.
const MAX_CONNECTIONS: u64 = 1 << 14;
/// Limit on the handshake and the start of HTTP/2, from the first byte on.
const OPENING_TIMEOUT: Duration = Duration::from_secs(10);
/// Takes the memory of another connection.
fn take_budget(node: &Node, at_rest: u64) -> Result<Arc<MemoryBudget>> {
    let budget = if node.counters.open.load(Ordering::Relaxed) < MAX_CONNECTIONS {
        let window = u64::from(CONNECTION_WINDOW);
        MemoryBudget::take(node.shard.meter(), node.reservations.room, at_rest, window)
    } else {
        Err(Error::new(Kind::Capacity, "the shard has too many connections")
            .expected(format!("at most {MAX_CONNECTIONS}"), "one more")
            .retry_after_ms(1000))
    };
    budget.map_err(|error| node.sign(error))
}

/// Accepts connections until the server stops. Waits after a failed accept (a departed peer), and refuses
/// connections without room or a file descriptor, with a reason. Serves native ones, and passes the others to
/// `foreign`. Returns when the native ones have ended.
pub(crate) async fn accept(
    listener: Accepting,
    locals: Vec<Local>,
    tls: Option<ServerTls>,
    node: Arc<Node>,
    foreign: mpsc::Sender<io::Result<Connection>>,
) {
    let (serving, mut served) = mpsc::channel::<()>(1);
    let mut phase = node.phase.clone();
    let door = Door { pending: Arc::default(), spare: Spare::new(), tls, node, foreign, serving };
    let remote = async {
        loop {
            let accept = async || listener.accept().await.map(|(io, from)| (io.into(), Some(from.ip())));
            door.admit(door.spare.accept(accept).await).await;
        }
    };
    // Accepted separately, so that local clients do not wait for too many others.
    let local = async {
        loop {
            let accept = async || poll_fn(|cx| poll_local(&locals, cx)).await.map(|io| (io, None));
            door.admit(door.spare.accept(accept).await).await;
        }
    };
    tokio::select! {
        _ = phase.wait_for(|phase| *phase >= Phase::Stopping) => {}
        () = remote => {}
        () = local => {}
    }
    drop((listener, locals, door));
    served.recv().await;
}

/// A connection, its sender's address, and why it must be refused.
type Accepted = ((Socket, Option<IpAddr>), Option<Error>);

/// Where connections are admitted.
struct Door {
    pending: Arc<Pending>,
    spare: Spare,
    tls: Option<ServerTls>,
    node: Arc<Node>,
    foreign: mpsc::Sender<io::Result<Connection>>,
    serving: mpsc::Sender<()>,
}

impl Door {
    /// Begins serving a connection from this address, unless there is a reason to refuse it; waits after a
    /// failed accept.
    async fn admit(&self, accepted: io::Result<Accepted>) {
        let ((socket, from), refusal) = match accepted {
            Ok(accepted) => accepted,
            Err(error) => {
                tracing::warn!(shard = self.node.index(), %error, "accepting a connection failed");
                return tokio::time::sleep(Duration::from_millis(50)).await;
            }
        };
        let admitted = self.pending.enter(from).await;
        if let Some(error) = &refusal {
            tracing::warn!(shard = self.node.index(), %error, "accepting a connection failed");
        }
        let opening = Opening { socket, refusal, tls: self.tls.clone(), node: self.node.clone() };
        match admitted {
            Some(admitted) => {
                tokio::spawn(begin(opening, admitted, self.foreign.clone(), self.serving.clone()));
            }
            None => opening.refuse(),
        }
    }
}

/// The next connection to any of the Unix sockets.
fn poll_local(locals: &[Local], cx: &mut Context<'_>) -> Poll<io::Result<Socket>> {
    let accepted = locals.iter().map(|local| local.poll_accept(cx)).find(Poll::is_ready);
    accepted.map_or(Poll::Pending, |accepted| accepted.map_ok(Socket::from))
}

/// A connection of unknown kind.
struct Opening {
    socket: Socket,
    /// Why it must be refused.
    refusal: Option<Error>,
    tls: Option<ServerTls>,
    node: Arc<Node>,
}

impl Opening {
    /// Closes the connection for lack of a slot.
    fn refuse(self) {
        ConnectionCounters::count(&self.node.counters.refused);
    }

    /// The connection, and whether it is native; `None` if it is not served.
    async fn open(self, slot: &PendingSlot) -> Option<(Connection, bool)> {
        let Self { socket, refusal, tls, node } = self;
        let io = match socket {
            Socket::Tcp(tcp) => {
                let first = slot.first_byte(&tcp).await?;
                match &tls {
                    Some(tls) => secure(tcp, first, tls, &node).await?,
                    None => tcp.into(),
                }
            }
            socket => {
                slot.has_spoken();
                socket
            }
        };
        let certificate = match principal(&io, &node.security.access) {
            Ok(certificate) => certificate,
            Err(error) => {
                ConnectionCounters::count(&node.counters.refused);
                tracing::warn!(shard = node.index(), %error, "a client's certificate is refused");
                node.security.access.refused_by_tls(io.peer_address(), &error);
                reject(io, &node.sign(error)).await;
                return None;
            }
        };
        let at_rest =
            AT_REST_BYTES + if matches!(io, Socket::Tls(_)) { tls::TLS_CONNECTION_BYTES } else { 0 };
        let taken = match refusal {
            Some(error) => Err(node.sign(error)),
            None => take_budget(&node, at_rest),
        };
        let budget = match taken {
            Ok(budget) => budget,
            Err(error) => {
                ConnectionCounters::count(&node.counters.refused);
                reject(io, &error).await;
                return None;
            }
        };
        let chain = io.peer_certificates().unwrap_or_default().to_vec();
        let mut connection = Connection::new(io, (budget, certificate), node.clone());
        node.security.tls_watch.watch(chain, &connection.peer().ending);
        // An error means that the peer has gone.
        let native = connection.is_native().await.ok()?;
        if connection.refuse_http1().await {
            return None;
        }
        connection.ask_who_calls();
        Some((connection, native))
    }
}

/// The principal of the client's certificate, if it shows one that tells.
pub(crate) fn principal(io: &Socket, access: &Access) -> Result<Option<Arc<Principal>>> {
    let Some([der, ..]) = io.peer_certificates() else { return Ok(None) };
    let uris = Certificate::parse(der)?.uris;
    let mut ours = uris.iter().filter(|uri| uri.starts_with(principal_uri::SCHEME));
    match (ours.next(), ours.next()) {
        (None, _) => Ok(access.nameless()),
        (Some(uri), None) => principal_uri::parse(uri).map(Arc::new).map(Some),
        (Some(_), Some(_)) => {
            let error = Error::new(Kind::Config, "a client's certificate names two principals");
            Err(error.expected(format!("one URI {}...", principal_uri::SCHEME), "more"))
        }
    }
}

/// Shakes hands; on failure informs the client and returns `None`.
async fn secure(mut tcp: TcpStream, first: u8, tls: &ServerTls, node: &Node) -> Option<Socket> {
    let address = tcp.peer_addr().ok().map(|peer| peer.ip());
    let peer = address.map_or_else(|| "unknown".to_owned(), |peer| peer.to_string());
    let failed = |error: &dyn std::fmt::Display| {
        ConnectionCounters::count(&node.counters.handshakes_failed);
        tracing::warn!(shard = node.index(), %peer, %error, "a TLS handshake failed");
        node.security.access.refused_by_tls(address, error);
    };
    if first != tls::HANDSHAKE_RECORD {
        let error = Error::new(Kind::Denied, "this port speaks TLS").expected("TLS (tls_ca)", "plain text");
        failed(&error);
        if is_http1(&[first]) {
            refuse_http1(&mut tcp, &[first]).await;
        } else {
            reject(tcp.into(), &error).await;
        }
        return None;
    }
    match tls.accept(tcp).await {
        Ok(stream) => Some(stream.into()),
        Err((error, mut tcp)) => {
            failed(&error);
            linger(&mut tcp).await;
            None
        }
    }
}

/// Selects the loop that serves a connection, once it has a slot, which it keeps until then. `serving` lives
/// as long as this loop serves it.
async fn begin(
    opening: Opening,
    admitted: Admitted,
    foreign: mpsc::Sender<io::Result<Connection>>,
    serving: mpsc::Sender<()>,
) {
    let node = opening.node.clone();
    let mut phase = node.phase.clone();
    let slot = tokio::select! {
        _ = phase.wait_for(|phase| *phase >= Phase::Stopping) => return,
        slot = admitted.slot() => slot,
    };
    let Some(slot) = slot else { return opening.refuse() };
    let opening = tokio::time::timeout(OPENING_TIMEOUT, slot.watch(opening.open(&slot)));
    let opened = tokio::select! {
        _ = phase.wait_for(|phase| *phase >= Phase::Stopping) => return,
        opened = opening => opened.ok().flatten(),
        () = slot.gives_way() => {
            ConnectionCounters::count(&node.counters.refused);
            None
        }
    };
    drop(slot);
    match opened {
        Some((connection, true)) => native::serve(connection, PREFACE.len(), node).await,
        // The receiver is gone only while the server stops.
        Some((connection, false)) => drop(foreign.send(Ok(connection)).await),
        // It is refused, or the peer does not begin.
        None => {}
    }
    drop(serving);
}
