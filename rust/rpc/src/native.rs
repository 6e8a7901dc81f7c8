//! Connections of native clients: the data service alone, driven through `h2`. Everybody else is served by tonic.

use crate::answers::{Answer, Answers, MAX_OWED, Owed, Shared};
use crate::convert;
use crate::data::{Exchange, Frames};
use crate::incoming::{CONNECTION_WINDOW, Connection, Peer};
use crate::node::{Node, Phase};
use crate::wire::{
    Arrivals, Framed, MAX_FRAME, Messages, Outbox, PATH, Piece, RESET, SERVER, Spin, UNWRITTEN, keep_alive,
};
use fastps_core::failpoint::reach;
use fastps_proto::v1 as pb;
use futures_util::future::join;
use h2::RecvStream;
use h2::server::SendResponse;
use http::{HeaderMap, HeaderValue, Request, Response};
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::Notify;
use tokio::sync::mpsc::channel;
use tonic::{Code, Status};

/// How often a silent peer is asked whether it is there, and how long it may take to say so.
const KEEP_ALIVE: Duration = Duration::from_secs(20);
/// Streams that a connection may have; a client uses one.
const STREAMS: u32 = 16;

/// Serves a connection until it ends.
pub(crate) async fn serve(connection: Connection, preface: usize, node: Arc<Node>) {
    let peer = connection.peer().clone();
    let handshake = h2::server::Builder::new()
        .max_frame_size(MAX_FRAME)
        // One stream has it all: four slices, and credit comes back for two at a time.
        .initial_window_size(CONNECTION_WINDOW)
        .initial_connection_window_size(CONNECTION_WINDOW)
        .max_concurrent_streams(STREAMS)
        .max_header_list_size(16 << 10)
        .max_send_buffer_size(UNWRITTEN)
        .max_concurrent_reset_streams(RESET)
        .handshake::<_, Piece>(Framed::new(connection, preface));
    let Ok(mut h2) = handshake.await else {
        return;
    };
    let reset = Arc::new(Notify::new());
    let alive = keep_alive(h2.ping_pong(), KEEP_ALIVE);
    let (mut phase, mut stopping) = (node.phase.clone(), false);
    tokio::pin!(alive);
    loop {
        tokio::select! {
            biased;
            // What the stream has not written can only go with its connection.
            () = reset.notified() => return,
            next = h2.accept() => match next {
                Some(Ok((request, respond))) => {
                    let (node, peer, reset) = (node.clone(), peer.clone(), reset.clone());
                    tokio::spawn(exchange(request, respond, node, peer, reset));
                }
                Some(Err(error)) => {
                    tracing::debug!(shard = node.index(), %error, "a connection broke");
                    return;
                }
                None => return,
            },
            _ = phase.wait_for(|phase| *phase >= Phase::Stopping), if !stopping => {
                stopping = true;
                h2.graceful_shutdown();
            }
            () = &mut alive => return,
        }
    }
}

/// One stream: frames in, answers out.
async fn exchange(
    request: Request<RecvStream>,
    mut respond: SendResponse<Piece>,
    node: Arc<Node>,
    peer: Peer,
    reset: Arc<Notify>,
) {
    let path = request.uri().path();
    let meter = node.shard.meter();
    let shared = if path == PATH {
        let shared = Shared::new(meter, &peer.room, true);
        let both = shared.and_then(|shared| Ok((shared, Arrivals::new(&peer.room)?)));
        both.map_err(|error| convert::status(&error.shard(node.index())))
    } else {
        Err(Status::unimplemented(format!("a native connection serves {PATH} alone, not {path}")))
    };
    let (shared, arrivals) = match shared {
        Ok(both) => both,
        Err(status) => {
            // A peer that is gone need not know.
            let _ = respond.send_response(status.into_http(), true);
            return;
        }
    };
    let mut response = Response::new(());
    let headers = response.headers_mut();
    headers.insert(http::header::CONTENT_TYPE, HeaderValue::from_static("application/grpc"));
    headers.insert(SERVER, HeaderValue::from(node.server));
    let Ok(stream) = respond.send_response(response, false) else {
        return;
    };
    let (answers, queue) = channel(MAX_OWED);
    let frames = Frames::Native(Messages::new(request.into_body(), Some(arrivals)), Spin::new(node.spin));
    let stream_of = Exchange { node, peer, shared: shared.clone() };
    let reading = stream_of.serve(frames, answers);
    let writing = write(Answers { queue, shared: shared.clone() }, Outbox::new(stream));
    tokio::select! {
        biased;
        () = shared.was_reset() => reset.notify_one(),
        _ = join(reading, writing) => {}
    }
}

/// Sends answers as they come, then how the stream ended. Fails when the peer has gone.
async fn write(mut answers: Answers, mut outbox: Outbox) -> Result<(), h2::Error> {
    loop {
        let next = outbox.next(|cx| answers.queue.poll_recv(cx)).await?;
        let Some(Answer { what, busy }) = next else {
            return outbox.finish(trailers(&Status::new(Code::Ok, "")));
        };
        match what {
            Ok(Owed::Frame(frame)) => {
                outbox.send(*frame, Some(busy))?;
                reach("after_ack");
            }
            Ok(Owed::Rows { header, pin, charge }) => {
                let Some(snapshot) = pin.lend() else {
                    return Ok(());
                };
                let payload = convert::keeping(snapshot, (pin, charge));
                outbox.send(pb::Frame { header: Some(*header), payload }, Some(busy))?;
            }
            Ok(Owed::Values { tag, applied, pin }) => {
                // Taken back: the stream is being reset.
                let Some(snapshot) = pin.lend() else {
                    return Ok(());
                };
                outbox.send(convert::snapshot(tag, applied.as_ref(), snapshot, pin), Some(busy))?;
            }
            Err(status) => return outbox.finish(trailers(&status)),
        }
    }
}

fn trailers(status: &Status) -> HeaderMap {
    let mut trailers = HeaderMap::new();
    if status.add_header(&mut trailers).is_err() {
        trailers.insert(Status::GRPC_STATUS, HeaderValue::from(Code::Internal as i32));
    }
    trailers
}
