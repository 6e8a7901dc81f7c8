//! The connections of the web listener: short, and bounded in number, size and time.

use super::answers::answer;
use super::caller::WebCaller;
use super::site::Site;
use crate::connection::not_grpc::answer_http1;
use crate::connection::pending::{Admitted, Pending, PendingSlot};
use crate::connection::reject::linger;
use crate::connection::spare::Spare;
use crate::listeners::Listeners;
use fastps_transport::Socket;
use fastps_transport::tls::HANDSHAKE_RECORD;
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use std::convert::Infallible;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::net::TcpStream;

/// Limit on the TLS handshake.
const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(5);
/// Limit on the time to receive a request's head; it also ends idle connections.
const HEAD_TIMEOUT: Duration = Duration::from_secs(5);
/// Limit on the life of a connection.
const CONNECTION_TIMEOUT: Duration = Duration::from_mins(5);
/// Most bytes and fields of a request's head.
const MAX_HEAD_BYTES: usize = 16 << 10;
const MAX_HEADERS: usize = 64;
/// Pause after a connection that could not be accepted.
const ACCEPT_PAUSE: Duration = Duration::from_millis(50);
const SPEAKS_TLS: &str = "this port speaks TLS: use https\n";

/// Accepts connections until dropped. Each has a slot, as at a shard while it opens: at the limit, in total
/// or of its address, the one that has been idle longest gives way to a new one.
pub(super) async fn serve(listeners: Listeners, site: Arc<Site>) {
    let accepting = match listeners.into_accepting() {
        Ok(accepting) => accepting,
        Err(error) => {
            tracing::error!(%error, "the web listener failed");
            return;
        }
    };
    let (pending, spare) = (Arc::<Pending>::default(), Spare::new());
    loop {
        // One request at a time is answered although no descriptor is left: its answer may say so.
        match spare.accept(|| accepting.accept()).await {
            Ok(((tcp, from), _)) => {
                if let Some(admitted) = pending.enter(Some(from.ip())).await {
                    tokio::spawn(connection(tcp, admitted, site.clone()));
                }
            }
            // Too many open files, or a departed peer.
            Err(_) => tokio::time::sleep(ACCEPT_PAUSE).await,
        }
    }
}

async fn connection(tcp: TcpStream, admitted: Admitted, site: Arc<Site>) {
    let Some(slot) = admitted.slot().await else { return };
    let serving = async {
        if let Some((io, caller)) = open(tcp, &slot, &site).await {
            answer_requests(io, &caller, &site).await;
        }
    };
    tokio::select! {
        () = slot.watch(serving) => {}
        () = slot.gives_way() => {}
    }
}

async fn answer_requests(io: Socket, caller: &WebCaller, site: &Site) {
    let service = service_fn(|request| {
        let response = answer(&request, site, caller);
        async move { Ok::<_, Infallible>(response) }
    });
    let serving = http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(HEAD_TIMEOUT)
        .max_buf_size(MAX_HEAD_BYTES)
        .max_headers(MAX_HEADERS)
        .serve_connection(TokioIo::new(io), service);
    // A peer that breaks the rules, leaves or lingers is of no interest.
    let _ = tokio::time::timeout(CONNECTION_TIMEOUT, serving).await;
}

/// Waits for the first byte and shakes hands; `None` if the peer does not begin, or TLS refuses it.
async fn open(mut tcp: TcpStream, slot: &PendingSlot, site: &Site) -> Option<(Socket, WebCaller)> {
    let first = slot.first_byte(&tcp).await?;
    let address = tcp.peer_addr().ok().map(|peer| peer.ip());
    let Some(tls) = &site.tls else { return Some((tcp.into(), WebCaller::plain(address))) };
    if first != HANDSHAKE_RECORD {
        answer_http1(&mut tcp, &[first], "400 Bad Request", SPEAKS_TLS).await;
        return None;
    }
    let failed = |error: &dyn std::fmt::Display| {
        if site.log.take(Instant::now()).is_ok() {
            let peer = address.map_or_else(|| "unknown".to_owned(), |peer| peer.to_string());
            tracing::warn!(%peer, %error, "a TLS handshake with the web listener failed");
            site.subject.access.refused_by_tls(address, error);
        }
    };
    match tokio::time::timeout(HANDSHAKE_TIMEOUT, tls.accept_web(tcp)).await.ok()? {
        Ok(stream) => {
            let io = Socket::from(stream);
            let caller = WebCaller::secure(&io, tls.asks, &site.subject.access)
                .inspect_err(|error| failed(error))
                .ok()?;
            Some((io, caller))
        }
        Err((error, mut tcp)) => {
            failed(&error);
            linger(&mut tcp).await;
            None
        }
    }
}
