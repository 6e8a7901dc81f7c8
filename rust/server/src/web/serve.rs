//! The connections of the web listener: few, short, and bounded in size and time.

use super::Subject;
use super::answers::answer;
use super::hosts::Hosts;
use crate::listeners::Listeners;
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use std::convert::Infallible;
use std::sync::Arc;
use std::time::Duration;
use tokio::net::TcpStream;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

/// Most open connections; others are closed at once.
const MAX_CONNECTIONS: usize = 64;
/// Limit on the time to receive a request's head; it also ends idle connections.
const HEAD_TIMEOUT: Duration = Duration::from_secs(5);
/// Limit on the life of a connection.
const CONNECTION_TIMEOUT: Duration = Duration::from_mins(5);
/// Most bytes and fields of a request's head.
const MAX_HEAD_BYTES: usize = 16 << 10;
const MAX_HEADERS: usize = 64;
/// Pause after a connection that could not be accepted.
const ACCEPT_PAUSE: Duration = Duration::from_millis(50);

/// Accepts connections until dropped.
pub(super) async fn serve(listeners: Listeners, hosts: Arc<Hosts>, subject: Arc<Subject>) {
    let accepting = match listeners.into_accepting() {
        Ok(accepting) => accepting,
        Err(error) => {
            tracing::error!(%error, "the web listener failed");
            return;
        }
    };
    let places = Arc::new(Semaphore::new(MAX_CONNECTIONS));
    loop {
        match accepting.accept().await {
            Ok((tcp, _)) => {
                if let Ok(place) = places.clone().try_acquire_owned() {
                    tokio::spawn(connection(tcp, hosts.clone(), subject.clone(), place));
                }
            }
            // Too many open files, or a departed peer.
            Err(_) => tokio::time::sleep(ACCEPT_PAUSE).await,
        }
    }
}

async fn connection(tcp: TcpStream, hosts: Arc<Hosts>, subject: Arc<Subject>, _place: OwnedSemaphorePermit) {
    let service = service_fn(move |request| {
        let response = answer(&request, &hosts, &subject);
        async move { Ok::<_, Infallible>(response) }
    });
    let serving = http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(HEAD_TIMEOUT)
        .max_buf_size(MAX_HEAD_BYTES)
        .max_headers(MAX_HEADERS)
        .serve_connection(TokioIo::new(tcp), service);
    // A peer that breaks the rules, leaves or lingers is of no interest.
    let _ = tokio::time::timeout(CONNECTION_TIMEOUT, serving).await;
}
