//! Control calls: each within its caller's deadline, repeated while the connection fails (all of them may be).

use super::connect::Ack;
use super::link::Link;
use super::session::jitter;
use super::waiting::{self, Wait};
use crate::control::CAN_LOG;
use crate::convert;
use crate::local;
use crate::secret::Secret;
use crate::tls::{self, ClientTls};
use fastps_core::error::{Error, Kind, Result};
use fastps_proto::v1 as pb;
use fastps_proto::v1::control_client::ControlClient;
use hyper_util::rt::TokioIo;
use std::time::{Duration, Instant};
use tonic::service::interceptor::InterceptedService;
use tonic::transport::{Channel, Endpoint};
use tonic::{Request, Response, Status};

/// Calls that carry the client's secret.
pub(super) type Control = ControlClient<InterceptedService<Channel, Secret>>;

const FIRST_PAUSE: Duration = Duration::from_millis(20);
const LONGEST_PAUSE: Duration = Duration::from_millis(500);

/// A channel that connects at its first call, and again whenever its connection has broken.
pub(crate) fn channel(address: &str, tls: Option<&ClientTls>) -> Result<Channel> {
    let fail = |e| {
        Error::new(Kind::Config, format!("invalid address {address:?}: {e}"))
            .expected("host:port or unix:///path", address)
    };
    let endpoint = Endpoint::from_shared(format!("{}://{}", tls::scheme(tls), local::authority(address)))
        .map_err(fail)?
        .max_frame_size(1 << 20)
        .initial_connection_window_size(16 << 20)
        .initial_stream_window_size(4 << 20)
        .tcp_nodelay(true)
        .tcp_keepalive(Some(Duration::from_secs(30)))
        .http2_keep_alive_interval(Duration::from_secs(5))
        .keep_alive_timeout(Duration::from_secs(5))
        .keep_alive_while_idle(true)
        .connect_timeout(Duration::from_secs(5));
    if tls.is_none() && local::path(address).is_none() {
        return Ok(endpoint.connect_lazy());
    }
    let (tls, address) = (tls.cloned(), address.to_owned());
    Ok(endpoint.connect_with_connector_lazy(tower::service_fn(move |_| {
        let (tls, address) = (tls.clone(), address.clone());
        async move { local::reach(&address, tls.as_ref()).await.map(TokioIo::new) }
    })))
}

/// Who says hello.
pub(super) struct Who<'a> {
    pub(super) client: u64,
    pub(super) secret: &'a Secret,
    pub(super) name: &'a str,
    pub(super) ack: Ack,
    /// How long the server may take.
    pub(super) within: Duration,
}

/// One hello, tried once.
pub(super) async fn hello(channel: Channel, who: Who<'_>, renew: bool) -> Result<pb::HelloResponse> {
    let Who { client, secret, name, ack, within } = who;
    let hello = pb::HelloRequest {
        protocol_minor: fastps_proto::PROTOCOL_MINOR,
        client,
        name: name.to_owned(),
        renew,
        ack: if ack == Ack::Logged { pb::Ack::Logged } else { pb::Ack::Applied }.into(),
        secret: secret.bytes().into(),
    };
    let answer = ControlClient::new(channel).hello(request(hello, within)).await;
    let answer = answer.map_err(|status| convert::error_from_status(&status))?.into_inner();
    // An older server does not know the question.
    if ack == Ack::Logged && !keeps_data(&answer) {
        return Err(Error::new(Kind::Precondition, "the server keeps no log")
            .shard(answer.shard)
            .expected("a server with --data-dir, or ack=\"applied\"", "ack=\"logged\""));
    }
    Ok(answer)
}

/// Whether a server has a data directory.
pub(super) fn keeps_data(hello: &pb::HelloResponse) -> bool {
    hello.capabilities.iter().any(|can| can == CAN_LOG)
}

/// Makes a call, again while the connection fails, until the deadline. Errors name the shard, and where the last attempt was
/// not answered in time, what became of the one before.
pub(super) async fn call<T, F>(
    link: &Link,
    deadline: Instant,
    send: impl Fn(Control, Duration) -> F,
) -> Result<T>
where
    F: Future<Output = Result<Response<T>, Status>>,
{
    let mut pause = FIRST_PAUSE;
    let mut before: Option<Error> = None;
    let mut wait = Wait::begin();
    loop {
        let left = deadline.saturating_duration_since(Instant::now());
        let client = ControlClient::with_interceptor(link.channel()?, link.shared.secret.clone())
            .max_decoding_message_size(fastps_proto::MAX_MESSAGE_BYTES)
            .max_encoding_message_size(fastps_proto::MAX_MESSAGE_BYTES);
        let attempt = tokio::time::timeout(left, send(client, left));
        let what = || match &before {
            Some(error) => waiting::server(&link.address, Some(&error.message)),
            None => link.waits_for(),
        };
        let error = match wait.on(attempt, what).await {
            Ok(Ok(answer)) => return Ok(answer.into_inner()),
            Ok(Err(status)) if !convert::timed_out(&status) => convert::error_from_status(&status),
            // The channel counts the time, too.
            Ok(Err(_)) | Err(_) => {
                return Err(late(link, before));
            }
        };
        // What is not ready, as a server that recovers, is waited for, and not asked before the time that it tells.
        let told = Duration::from_millis(error.retry_after_ms.unwrap_or(0));
        let again = convert::passes(&error) && Instant::now() + pause.max(told) < deadline;
        if !again {
            return Err(named(link, error));
        }
        before = Some(named(link, error));
        tokio::time::sleep(jitter(pause).max(told)).await;
        pause = (2 * pause).min(LONGEST_PAUSE);
    }
}

fn late(link: &Link, before: Option<Error>) -> Error {
    let mut message = format!("the deadline passed before {} answered", link.address);
    if let Some(before) = before {
        message = format!("{message}; the attempt before: {}", before.message);
    }
    Error::new(Kind::Deadline, message).shard(link.shard())
}

fn named(link: &Link, mut error: Error) -> Error {
    if error.kind == Kind::Connection {
        error.message = format!("no connection to {}: {}", link.address, error.message);
    }
    error.shard(link.shard())
}

/// A request that tells the server when its caller stops waiting.
pub(super) fn request<T>(message: T, left: Duration) -> Request<T> {
    let mut request = Request::new(message);
    request.set_timeout(left);
    request
}
