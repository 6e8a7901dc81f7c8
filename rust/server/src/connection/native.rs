//! Serves the connections of native clients: the data service only, driven through `h2`.

use crate::answers::{Answers, MAX_OWED_ANSWERS, Owed, Pin, QueuedAnswer, StreamState};
use crate::auth::peer::Peer;
use crate::cluster::node::{ConnectionCounters, Node, Phase};
use crate::connection::accepted::{CONNECTION_WINDOW, Connection};
use crate::data::{Exchange, FrameSource};
use fastps_core::failpoint::reach;
use fastps_core::slice::Snapshot;
use fastps_proto::v1 as pb;
use fastps_transport::convert;
use fastps_transport::wire::{
    Arrivals, EXCHANGE_PATH, Framed, Lender, MAX_FRAME, MAX_RESET_STREAMS, MAX_UNWRITTEN_BYTES, Messages,
    Outbox, Piece, PollCycle, SERVER_HEADER, Spin, keep_alive,
};
use futures_util::StreamExt;
use futures_util::future::join;
use futures_util::stream::FuturesUnordered;
use h2::RecvStream;
use h2::server::SendResponse;
use http::{HeaderMap, HeaderValue, Request, Response};
use std::future::poll_fn;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;
use tokio::sync::mpsc::channel;
use tonic::metadata::MetadataMap;
use tonic::{Code, Status};

/// Interval between pings to a silent peer, and limit on its reply.
const KEEP_ALIVE_INTERVAL: Duration = Duration::from_secs(20);
/// Most streams of a connection; a client uses one.
const MAX_STREAMS: u32 = 16;

/// Serves a connection until it ends.
pub(crate) async fn serve(connection: Connection, preface: usize, node: Arc<Node>) {
    let (peer, cycle, lender) = (connection.peer().clone(), PollCycle::default(), connection.lender());
    let handshake = h2::server::Builder::new()
        .max_frame_size(MAX_FRAME)
        // A single stream gets the whole window: four slices, with credit returned for two at a time.
        .initial_window_size(CONNECTION_WINDOW)
        .initial_connection_window_size(CONNECTION_WINDOW)
        .max_concurrent_streams(MAX_STREAMS)
        .max_header_list_size(16 << 10)
        .max_send_buffer_size(MAX_UNWRITTEN_BYTES)
        .max_concurrent_reset_streams(MAX_RESET_STREAMS)
        .handshake::<_, Piece>(Framed::new(connection, preface, cycle.clone()));
    let Ok(mut h2) = handshake.await else {
        return;
    };
    let mut streams = FuturesUnordered::new();
    let alive = keep_alive(h2.ping_pong(), KEEP_ALIVE_INTERVAL);
    let (mut phase, mut stopping) = (node.phase.clone(), false);
    tokio::pin!(alive);
    loop {
        tokio::select! {
            biased;
            event = poll_fn(|cx| poll(&mut h2, &mut streams, &cycle, cx)) => match event {
                Event::Request(request) => {
                    streams.push(exchange(*request, node.clone(), peer.clone(), cycle.clone(), lender.clone()));
                }
                Event::Ended(Ended::Quietly) => {}
                // Unwritten bytes of the stream end only with its connection.
                Event::Ended(Ended::Reset) => break,
                Event::Closed(error) => {
                    if let Some(error) = error {
                        tracing::debug!(shard = node.index(), %error, "a connection broke");
                    }
                    break;
                }
            },
            _ = phase.wait_for(|phase| *phase >= Phase::Stopping), if !stopping => {
                stopping = true;
                h2.graceful_shutdown();
            }
            () = &mut alive => break,
        }
    }
    // Received frames are still applied, although their answers are lost.
    drop(h2);
    while streams.next().await.is_some() {}
}

/// Event that ends a connection's wait.
enum Event {
    Request(Box<(Request<RecvStream>, SendResponse<Piece>)>),
    Ended(Ended),
    Closed(Option<h2::Error>),
}

/// How a stream ended.
enum Ended {
    Quietly,
    Reset,
}

/// One poll cycle: handles received frames and writes their answers, before other connections have a turn.
fn poll(
    h2: &mut h2::server::Connection<Framed<Connection>, Piece>,
    streams: &mut FuturesUnordered<impl Future<Output = Ended>>,
    cycle: &PollCycle,
    cx: &mut Context<'_>,
) -> Poll<Event> {
    let event = |accepted| match accepted {
        Some(Ok(request)) => Event::Request(Box::new(request)),
        Some(Err(error)) => Event::Closed(Some(error)),
        None => Event::Closed(None),
    };
    if let Poll::Ready(accepted) = h2.poll_accept(cx) {
        return Poll::Ready(event(accepted));
    }
    if let Poll::Ready(Some(ended)) = streams.poll_next_unpin(cx) {
        return Poll::Ready(Event::Ended(ended));
    }
    cycle.write(|| h2.poll_accept(cx)).unwrap_or(Poll::Pending).map(event)
}

/// One stream: frames in, answers out.
async fn exchange(
    (request, mut respond): (Request<RecvStream>, SendResponse<Piece>),
    node: Arc<Node>,
    peer: Peer,
    cycle: PollCycle,
    lender: Option<Arc<Lender>>,
) -> Ended {
    let path = request.uri().path();
    let (meter, medium) = (node.shard.meter(), peer.medium);
    let opened = if path == EXCHANGE_PATH {
        let shared = StreamState::new(meter, &peer.budget, true);
        let both = shared.and_then(|shared| Ok((shared, Arrivals::new(&peer.budget)?)));
        let metadata = MetadataMap::from_headers(request.headers().clone());
        let opened = both.and_then(|(shared, arrivals)| {
            let stream = Exchange::open(&node, peer, shared.clone(), &metadata)?;
            Ok((stream, shared, arrivals))
        });
        opened.map_err(|error| convert::status(&node.sign(error)))
    } else {
        Err(Status::unimplemented(format!("a native connection serves only {EXCHANGE_PATH}, not {path}")))
    };
    let (stream_of, shared, arrivals) = match opened {
        Ok(opened) => opened,
        Err(status) => {
            // The peer may be gone already.
            let _ = respond.send_response(status.into_http(), true);
            return Ended::Quietly;
        }
    };
    let mut response = Response::new(());
    let headers = response.headers_mut();
    headers.insert(http::header::CONTENT_TYPE, HeaderValue::from_static("application/grpc"));
    headers.insert(SERVER_HEADER, HeaderValue::from(node.server));
    let Ok(stream) = respond.send_response(response, false) else {
        return Ended::Quietly;
    };
    let (answers, queue) = channel(MAX_OWED_ANSWERS);
    let messages = Messages::new(request.into_body(), Some(arrivals));
    // A log is written while the shard sleeps, also between the parts of something large.
    let pace = if node.files.journal().is_some() { PollCycle::default() } else { cycle.clone() };
    let frames = FrameSource::Native(messages, Spin::new(node.spin), pace);
    let lender = lender.filter(|_| stream_of.reads_everything());
    let reading = stream_of.serve(frames, answers);
    let answers = Answers { queue, shared: shared.clone(), measures: node.measures.clone(), medium };
    let writing = write(answers, Outbox::new(stream, cycle), &node, lender);
    tokio::select! {
        biased;
        () = shared.was_reset() => Ended::Reset,
        _ = join(reading, writing) => Ended::Quietly,
    }
}

/// Sends answers as they arrive, then the stream's end. Fails when the peer has gone.
async fn write(
    mut answers: Answers,
    mut outbox: Outbox,
    node: &Node,
    lender: Option<Arc<Lender>>,
) -> Result<(), h2::Error> {
    loop {
        let next = outbox.next(|cx| answers.poll_answer(cx)).await?;
        let Some(QueuedAnswer { what, busy, .. }) = next else {
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
                answers.count_sent(&snapshot);
                let payload = convert::keeping(snapshot, (pin, charge));
                outbox.send(pb::Frame { header: Some(*header), payload }, Some(busy))?;
            }
            Ok(Owed::Values { tag, applied, pin }) => {
                // The pin was revoked: the stream is being reset.
                let Some(snapshot) = pin.lend() else {
                    return Ok(());
                };
                let frame = match lend(lender.as_deref(), node, snapshot, pin) {
                    Ok((snapshot, lent)) => {
                        ConnectionCounters::count(&node.counters.values_lent);
                        convert::lent(tag, applied.as_ref(), &snapshot, lent)
                    }
                    Err((snapshot, pin)) => {
                        answers.count_sent(&snapshot);
                        convert::snapshot(tag, applied.as_ref(), snapshot, pin)
                    }
                };
                outbox.send(frame, Some(busy))?;
            }
            Err(status) => return outbox.finish(trailers(&status)),
        }
    }
}

/// Lends values to a client that can map their memory, if there is memory for the copy that a push then
/// makes: a stopped client may keep them after a reset.
fn lend(
    lender: Option<&Lender>,
    node: &Node,
    snapshot: Snapshot,
    pin: Pin,
) -> Result<(Snapshot, pb::Lent), (Snapshot, Pin)> {
    let memory = || node.reservations.charge_rings(node.shard.meter(), u64::from(MAX_FRAME)).ok();
    match lender {
        Some(lender) => lender.lend(snapshot.clone(), pin, memory).map(|lent| (snapshot, lent)),
        None => Err((snapshot, pin)),
    }
}

fn trailers(status: &Status) -> HeaderMap {
    let mut trailers = HeaderMap::new();
    if status.add_header(&mut trailers).is_err() {
        trailers.insert(Status::GRPC_STATUS, HeaderValue::from(Code::Internal as i32));
    }
    trailers
}
