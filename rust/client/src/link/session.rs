//! Drives a link: connects, says hello, sends the queue and takes answers, and starts over when the
//! connection breaks.

use crate::link::find::find;
use crate::link::memberships;
use crate::link::state::Link;
use crate::link::stream::{Stream, broken};
use crate::link::unary::{self, CONNECT_TIMEOUT, Who};
use crate::state::fence::another_number_of_shards;
use crate::state::runtime::lock;
use crate::state::time::jitter;
use bytes::Bytes;
use fastps_core::error::{Error, Kind, Result};
use fastps_proto::v1 as pb;
use fastps_transport::convert::{self, Retry};
use fastps_transport::wire::{Borrower, Messages, Outbox, keep_alive};
use std::future::poll_fn;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

/// Longest pause between two attempts to connect.
const MAX_RETRY_PAUSE: Duration = Duration::from_secs(1);
const FIRST_RETRY_PAUSE: Duration = Duration::from_millis(10);
/// Interval between pings to a silent server.
const KEEP_ALIVE_INTERVAL: Duration = Duration::from_secs(5);
/// Shortest time between two reports of a worker.
const REPORT_INTERVAL: Duration = Duration::from_secs(1);

/// Runs until the link is closed. `first`: that of shard 0.
pub(crate) async fn drive(link: Arc<Link>, first: Arc<Link>) {
    let (mut pause, mut moved) = (FIRST_RETRY_PAUSE, false);
    while !link.is_closed() {
        let attempted = attempt(open(&link)).await;
        link.note_attempt(attempted.as_ref().err());
        let error = match attempted {
            Ok((session, stream)) => {
                link.opened();
                (pause, moved) = (FIRST_RETRY_PAUSE, false);
                let Stream { mut connection, outbox, messages, borrower } = stream;
                let files = borrower.clone();
                let pings = connection.ping_pong();
                tokio::select! {
                    biased;
                    error = ended(&link) => error,
                    // Received and sent bytes are handled in the same poll.
                    error = send(&link, session, outbox) => error,
                    result = connection => broken(result),
                    error = receive(&link, messages, borrower) => error,
                    error = heartbeat(&link, files.as_deref()) => error,
                    () = keep_alive(pings, KEEP_ALIVE_INTERVAL) => Error::new(Kind::Connection, "the server is silent"),
                }
            }
            Err(error) => error,
        };
        tracing::debug!(shard = link.shard(), %error, "session ended");
        let lease_lost = link.is_drained();
        link.end(error);
        if link.shared.fence.check().is_err() {
            // Another link has ended the client; this one's server may be gone for ever.
            link.close();
        }
        if link.is_closed() || lease_lost {
            continue;
        }
        let moved_before = std::mem::replace(&mut moved, find(&link, &first).await);
        if moved && !moved_before {
            continue;
        }
        tokio::select! {
            () = tokio::time::sleep(jitter(pause)) => {}
            () = link.changed.notified() => {}
        }
        // A restarted server waits one lease for its clients.
        pause = (2 * pause).min(MAX_RETRY_PAUSE).min(link.lease / 4);
    }
}

async fn attempt<T>(work: impl Future<Output = Result<T>>) -> Result<T> {
    let late = |_| Error::new(Kind::Connection, format!("no answer within {} s", CONNECT_TIMEOUT.as_secs()));
    tokio::time::timeout(CONNECT_TIMEOUT, work).await.map_err(late)?
}

/// Says hello, under a new incarnation if the old one is forgotten, and opens the stream. The token is read
/// again.
async fn open(link: &Arc<Link>) -> Result<(u64, Stream)> {
    if let Err(error) = link.shared.bearer.refresh() {
        tracing::warn!(%error, "the last token stays in use");
    }
    if link.is_drained() {
        link.renew()?;
        hello(link, false, 0).await?;
    } else if let Err(error) = hello(link, true, 0).await {
        if !is_forgotten(&error) {
            return Err(error);
        }
        link.renew()?;
        hello(link, false, 0).await?;
    }
    memberships::rejoin(link).await;
    let stream = Stream::open(&link.route(), link.server(), &link.shared).await?;
    Ok((link.begin(), stream))
}

/// Returns whether a server has no session of this client: none at all, or another client's that took the
/// incarnation after the server restarted without its state.
fn is_forgotten(error: &Error) -> bool {
    convert::retry(error.kind) == Retry::Session || error.kind == Kind::Denied && error.shard.is_some()
}

/// Says hello. The answer may leave out the list of shards if it is that of this digest.
async fn hello(link: &Arc<Link>, renew: bool, listed: u64) -> Result<()> {
    let shared = &link.shared;
    // Callers wait for less.
    let within = link.lease.max(CONNECT_TIMEOUT);
    let report = if link.shard() == 0 { shared.report.take() } else { None };
    let who = Who { within, report, listed, ..link.who() };
    let answer = match unary::hello(link.channel()?, who, renew).await {
        Err(error) if error.kind == Kind::Fenced && link.shared.resolution.is_none() => {
            return Err(link.fenced(error));
        }
        answer => answer?,
    };
    link.recognize(&answer)?;
    link.check_term(&link.address(), &answer)?;
    if answer.shard != link.shard() {
        return Err(Error::new(Kind::Connection, format!("{} serves another shard now", link.address()))
            .expected(link.shard(), answer.shard));
    }
    let unchanged = listed != 0 && answer.cluster_digest == listed && answer.cluster.is_empty();
    if !unchanged && answer.cluster.len() != link.shards {
        return Err(link.fenced(another_number_of_shards(
            &link.address(),
            link.shards,
            answer.cluster.len(),
        )));
    }
    link.met(&answer);
    Ok(())
}

impl Link {
    /// The client, as it says hello to the link's shard.
    pub(crate) fn who(&self) -> Who<'_> {
        let shared = &self.shared;
        Who {
            client: self.client(),
            secret: &shared.secret,
            bearer: &shared.bearer,
            name: &shared.name,
            ack: shared.ack,
            within: CONNECT_TIMEOUT,
            to: Some(self.addressee()),
            report: None,
            listed: 0,
        }
    }
}

/// A request that ends the session at the server, if all sent frames are answered. Otherwise the server may
/// still apply frames on their way, until the lease ends.
pub(crate) fn goodbye(link: &Arc<Link>) -> Option<impl Future<Output = ()> + Send + 'static + use<>> {
    if !link.is_connected() || link.has_frames() {
        return None;
    }
    let (link, channel) = (link.clone(), link.channel().ok()?);
    Some(async move {
        unary::goodbye(channel, link.who()).await;
    })
}

/// Takes answers until the stream ends.
async fn receive(link: &Arc<Link>, mut messages: Messages, borrower: Option<Arc<Borrower>>) -> Error {
    loop {
        match poll_fn(|cx| messages.poll_next(cx)).await {
            Ok(Some(frame)) => {
                let borrowed = borrow(frame, borrower.as_ref());
                let borrowed = borrowed.inspect_err(|error| link.route().stay_a_socket(error));
                if let Err(error) = borrowed.and_then(|(frame, lent)| link.answer(frame, lent)) {
                    return error;
                }
            }
            Ok(None) => {
                return match messages.trailers().await {
                    Ok(()) => Error::new(Kind::Connection, "the server ended the stream"),
                    Err(status) => convert::error_from_status(&status),
                };
            }
            Err(status) => return convert::error_from_status(&status),
        }
    }
}

/// Maps the values of a frame that are in the server's memory as its payload. Also returns whether it did.
fn borrow(mut frame: pb::Frame, borrower: Option<&Arc<Borrower>>) -> Result<(pb::Frame, bool)> {
    let Some(lent) = frame.header.as_mut().and_then(|header| header.lent.take()) else {
        return Ok((frame, false));
    };
    let unasked = || Error::new(Kind::Frame, "the server offered shared memory that this client cannot map");
    let whole = frame.header.as_ref().is_some_and(|h| h.kind() == pb::Kind::Values && h.table.is_none());
    let page = borrower.filter(|_| whole).ok_or_else(unasked)?.take(&lent);
    let page = page.map_err(|error| Error::new(Kind::Frame, format!("no values of the server: {error}")))?;
    frame.payload = Bytes::from_owner(page);
    Ok((frame, true))
}

/// Sends queued frames as the connection has room for them.
async fn send(link: &Link, session: u64, mut outbox: Outbox) -> Error {
    loop {
        let sent = match outbox.next(|cx| link.poll_frame(session, cx)).await {
            Ok(Some(frame)) => outbox.send(frame, None),
            // The link is closed, and the session about to end.
            Ok(None) => return std::future::pending().await,
            Err(error) => Err(error),
        };
        if let Err(error) = sent {
            return broken(Err(error));
        }
    }
}

/// Keeps the lease, and unmaps memory that the server has given back; returns when the lease is lost or the
/// server does not answer for a whole lease.
async fn heartbeat(link: &Arc<Link>, borrower: Option<&Borrower>) -> Error {
    let (mut missed, interval) = (0, link.lease / 3);
    let mut due = Instant::now() + interval;
    let mut sent = lock(&link.queue).sent;
    loop {
        let pause = due.saturating_duration_since(Instant::now());
        tokio::time::sleep(if link.shard() == 0 { pause.min(REPORT_INTERVAL) } else { pause }).await;
        if let Some(borrower) = borrower {
            borrower.forget_gone();
        }
        let reports = link.shard() == 0 && link.shared.report.is_unsent();
        if Instant::now() < due && !reports {
            continue;
        }
        // What is sent renews the lease, too: looked at twice as often, so that a silent third is seen in time.
        let others = std::mem::replace(&mut sent, lock(&link.queue).sent) != sent;
        if others && !reports {
            due = Instant::now() + interval / 2;
            continue;
        }
        due = Instant::now() + interval;
        let listed = link.listed.load(Ordering::Relaxed);
        match tokio::time::timeout(interval, hello(link, true, listed)).await {
            Ok(Ok(())) => missed = 0,
            // The principal sends more than its rate: the session is as alive as before.
            Ok(Err(error)) if error.kind == Kind::Capacity => {
                let pause = Duration::from_millis(error.retry_after_ms.unwrap_or_default());
                due = Instant::now() + pause.max(REPORT_INTERVAL).min(interval);
            }
            Ok(Err(error)) => return error,
            Err(_) if missed == 1 => return Error::new(Kind::Connection, "the server does not answer"),
            Err(_) => missed += 1,
        }
    }
}

/// Returns when the session must end.
async fn ended(link: &Link) -> Error {
    loop {
        if link.is_closed() || link.is_drained() {
            return link.closed();
        }
        if link.is_recalled() {
            return Error::new(Kind::Connection, "the server did not read the data of a call that has ended");
        }
        link.changed.notified().await;
    }
}
