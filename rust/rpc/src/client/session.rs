//! What drives a link: connect, say hello, send what waits, take answers; when the connection breaks, again.

use super::control;
use super::link::{Link, closed};
use super::runtime::random;
use crate::convert;
use fastps_core::error::{Error, Kind, Result};
use fastps_proto::v1 as pb;
use fastps_proto::v1::data_client::DataClient;
use futures_util::Stream;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;
use tonic::Streaming;

/// Longest pause between two attempts to connect.
const LONGEST_PAUSE: Duration = Duration::from_secs(1);
const FIRST_PAUSE: Duration = Duration::from_millis(10);
/// How long one attempt may take.
const ATTEMPT: Duration = Duration::from_secs(5);

/// Runs until the link is closed.
pub(super) async fn drive(link: Arc<Link>) {
    let mut pause = FIRST_PAUSE;
    while !link.is_closed() {
        let error = match attempt(open(&link)).await {
            Ok(stream) => {
                link.opened();
                pause = FIRST_PAUSE;
                tokio::select! {
                    error = receive(&link, stream) => error,
                    error = heartbeat(&link) => error,
                    () = ended(&link) => closed(),
                }
            }
            Err(error) => error,
        };
        tracing::debug!(shard = link.shard(), %error, "session ended");
        let lease_lost = link.is_drained();
        link.end(error);
        if link.is_closed() || lease_lost {
            continue;
        }
        tokio::select! {
            () = tokio::time::sleep(jitter(pause)) => {}
            () = link.changed.notified() => {}
        }
        pause = (2 * pause).min(LONGEST_PAUSE);
    }
}

/// Between half and one and a half of a pause, so that clients do not come back in step.
pub(super) fn jitter(pause: Duration) -> Duration {
    let random = random().unwrap_or(1 << 63) as f64 / u64::MAX as f64;
    pause.mul_f64(0.5 + random)
}

async fn attempt<T>(work: impl Future<Output = Result<T>>) -> Result<T> {
    let late = |_| Error::new(Kind::Connection, format!("no answer within {} s", ATTEMPT.as_secs()));
    tokio::time::timeout(ATTEMPT, work).await.map_err(late)?
}

/// Says hello, under a new incarnation if the old one is forgotten, and opens the stream.
async fn open(link: &Arc<Link>) -> Result<Streaming<pb::Frame>> {
    if link.is_drained() {
        link.renew()?;
        hello(link, false).await?;
    } else if let Err(error) = hello(link, true).await {
        if error.kind != Kind::Lease {
            return Err(error);
        }
        link.renew()?;
        hello(link, false).await?;
    }
    let session = link.begin();
    let outgoing = Outgoing { link: link.clone(), session };
    let stream = DataClient::new(link.channel.clone())
        .max_decoding_message_size(fastps_proto::MAX_MESSAGE_BYTES)
        .max_encoding_message_size(fastps_proto::MAX_MESSAGE_BYTES)
        .exchange(outgoing)
        .await;
    stream.map(tonic::Response::into_inner).map_err(|status| convert::error_from_status(&status))
}

async fn hello(link: &Arc<Link>, renew: bool) -> Result<()> {
    let answer = control::hello(link.channel.clone(), link.client(), &link.shared.name, renew).await?;
    if answer.shard != link.shard() {
        return Err(Error::new(Kind::Connection, format!("{} serves another shard now", link.address))
            .expected(link.shard(), answer.shard));
    }
    link.met(answer.server);
    Ok(())
}

async fn receive(link: &Link, mut stream: Streaming<pb::Frame>) -> Error {
    loop {
        match stream.message().await {
            Ok(Some(frame)) => {
                if let Err(error) = link.answer(frame) {
                    return error;
                }
            }
            Ok(None) => return Error::new(Kind::Connection, "the server ended the stream"),
            Err(status) => return convert::error_from_status(&status),
        }
    }
}

/// Keeps the lease; returns when it is lost or the server does not answer for a whole lease.
async fn heartbeat(link: &Arc<Link>) -> Error {
    let mut missed = 0;
    loop {
        tokio::time::sleep(link.lease / 3).await;
        match tokio::time::timeout(link.lease / 3, hello(link, true)).await {
            Ok(Ok(())) => missed = 0,
            Ok(Err(error)) => return error,
            Err(_) if missed == 1 => return Error::new(Kind::Connection, "the server does not answer"),
            Err(_) => missed += 1,
        }
    }
}

async fn ended(link: &Link) {
    while !link.is_closed() && !link.is_drained() {
        link.changed.notified().await;
    }
}

/// The frames of one session, taken from the queue when the connection has room for them.
struct Outgoing {
    link: Arc<Link>,
    session: u64,
}

impl Stream for Outgoing {
    type Item = pb::Frame;

    fn poll_next(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<pb::Frame>> {
        self.link.poll_frame(self.session, context)
    }
}
