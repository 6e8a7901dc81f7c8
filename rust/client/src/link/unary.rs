//! Control calls: each ends with its caller's deadline and is repeated while the connection fails; all of
//! them are idempotent.

use crate::link::state::Link;
use crate::options::Ack;
use crate::state::time::jitter;
use crate::state::waiting::{self, Wait};
use fastps_core::error::{Error, Kind, Result};
use fastps_core::verbs::WorkerReport;
use fastps_proto::v1 as pb;
use fastps_proto::v1::control_client::ControlClient;
use fastps_transport::addressee::Addressee;
use fastps_transport::bearer::Bearer;
use fastps_transport::convert;
use fastps_transport::secret::Secret;
use std::time::{Duration, Instant};
use tonic::service::Interceptor;
use tonic::service::interceptor::InterceptedService;
use tonic::transport::Channel;
use tonic::{Request, Response, Status};

/// Calls with the client's secret and token, and their addressee.
pub(crate) type Control = ControlClient<InterceptedService<Channel, CallHeaders>>;

/// Limit on one attempt to connect.
pub(crate) const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);
const FIRST_RETRY_PAUSE: Duration = Duration::from_millis(20);
const MAX_RETRY_PAUSE: Duration = Duration::from_millis(500);

/// Headers of each call.
#[derive(Clone, Debug)]
pub(crate) struct CallHeaders {
    secret: Secret,
    bearer: Bearer,
    to: Addressee,
}

impl Interceptor for CallHeaders {
    fn call(&mut self, request: Request<()>) -> Result<Request<()>, Status> {
        let mut request = self.secret.call(request)?;
        self.bearer.sign(request.metadata_mut().as_mut());
        self.to.write(request.metadata_mut());
        Ok(request)
    }
}

/// Identity, settings and addressee of a hello.
pub(crate) struct Who<'a> {
    pub(crate) client: u64,
    pub(crate) secret: &'a Secret,
    pub(crate) bearer: &'a Bearer,
    pub(crate) name: &'a str,
    pub(crate) ack: Ack,
    /// Limit on the server's answer.
    pub(crate) within: Duration,
    /// The addressee; `None`: any server at the address.
    pub(crate) to: Option<Addressee>,
    /// The worker's report.
    pub(crate) report: Option<WorkerReport>,
    /// Digest of the list of shards that the answer may leave out; 0: none.
    pub(crate) listed: u64,
}

impl Who<'_> {
    fn request(&self, renew: bool, close: bool) -> Request<pb::HelloRequest> {
        let hello = pb::HelloRequest {
            protocol_minor: fastps_proto::PROTOCOL_MINOR,
            client: self.client,
            name: self.name.to_owned(),
            renew,
            ack: self.ack.to_wire().into(),
            secret: self.secret.bytes().into(),
            close,
            report: self.report.as_ref().map(convert::worker_report_to_wire),
            cluster_digest: self.listed,
        };
        let mut hello = request(hello, self.within);
        self.bearer.sign(hello.metadata_mut().as_mut());
        if let Some(to) = self.to {
            to.write(hello.metadata_mut());
        }
        hello
    }
}

/// Notifies a server that the client is done. An unreachable one finds out when the lease ends.
pub(crate) async fn goodbye(channel: Channel, who: Who<'_>) {
    if let Err(error) = ControlClient::new(channel).hello(who.request(true, true)).await {
        tracing::debug!(%error, "a server was not notified that the client is closed");
    }
}

/// One hello, without retries.
pub(crate) async fn hello(channel: Channel, who: Who<'_>, renew: bool) -> Result<pb::HelloResponse> {
    let ack = who.ack;
    let answer = ControlClient::new(channel).hello(who.request(renew, false)).await;
    let answer = answer.map_err(|status| convert::error_from_status(&status))?.into_inner();
    // An older server ignores the question.
    let lacks = |why: &str, expected: &str, got: &str| {
        Err(Error::new(Kind::Precondition, why).shard(answer.shard).expected(expected, got))
    };
    match ack {
        Ack::Logged if !keeps_data(&answer) => {
            lacks("the server keeps no log", "a server with --data-dir, or ack=\"applied\"", "ack=\"logged\"")
        }
        Ack::Copied if !convert::can(&answer, convert::COPIED) => lacks(
            "the server does not copy its log",
            "a server with --copy-log, or ack=\"logged\"",
            "ack=\"copied\"",
        ),
        Ack::Applied | Ack::Logged | Ack::Copied => Ok(answer),
    }
}

/// Returns whether a server has a data directory.
pub(crate) fn keeps_data(hello: &pb::HelloResponse) -> bool {
    convert::can(hello, convert::CAN_LOG)
}

/// Makes a call, again while the connection fails, until the deadline. Errors name the shard; if the last
/// attempt timed out, they report the one before.
pub(crate) async fn call<T, F>(
    link: &Link,
    deadline: Instant,
    send: impl Fn(Control, Duration) -> F,
) -> Result<T>
where
    F: Future<Output = Result<Response<T>, Status>>,
{
    let mut pause = FIRST_RETRY_PAUSE;
    let mut before: Option<Error> = None;
    let mut wait = Wait::begin();
    loop {
        let left = deadline.saturating_duration_since(Instant::now());
        let shown = link.shared.bearer.present();
        let headers = CallHeaders {
            secret: link.shared.secret.clone(),
            bearer: link.shared.bearer.clone(),
            to: link.addressee(),
        };
        let client = ControlClient::with_interceptor(link.channel()?, headers)
            .max_decoding_message_size(fastps_proto::MAX_MESSAGE_BYTES)
            .max_encoding_message_size(fastps_proto::MAX_MESSAGE_BYTES);
        let attempt = tokio::time::timeout(left, send(client, left));
        let what = || match &before {
            Some(error) => waiting::server(&link.address(), Some(&error.message)),
            None => link.waits_for(),
        };
        let error = match wait.on(attempt, what).await {
            Ok(Ok(answer)) => return Ok(answer.into_inner()),
            Ok(Err(status)) if !convert::timed_out(&status) => convert::error_from_status(&status),
            // The channel's timeout may come first.
            Ok(Err(_)) | Err(_) => {
                return Err(late(link, before));
            }
        };
        // The server has counted the same time, and knows no reason.
        if error.kind == Kind::Deadline && before.is_some() && Instant::now() + FIRST_RETRY_PAUSE >= deadline
        {
            return Err(late(link, before));
        }
        if error.kind == Kind::Unauthenticated && link.shared.bearer.has_newer_than(shown.as_ref()) {
            continue;
        }
        // Waits for a server that is not ready, such as a recovering one, for at least the retry time that it
        // reports.
        let retry_after = Duration::from_millis(error.retry_after_ms.unwrap_or(0));
        let again = (convert::passes(&error) || link.may_move(&error))
            && Instant::now() + pause.max(retry_after) < deadline;
        if !again {
            return Err(named(link, error));
        }
        before = Some(named(link, error));
        tokio::time::sleep(jitter(pause).max(retry_after)).await;
        pause = (2 * pause).min(MAX_RETRY_PAUSE);
    }
}

fn late(link: &Link, before: Option<Error>) -> Error {
    let mut message = format!("the deadline passed before {} answered", link.address());
    if let Some(before) = before {
        message = format!("{message}; the attempt before: {}", before.message);
    }
    Error::new(Kind::Deadline, message).shard(link.shard())
}

fn named(link: &Link, mut error: Error) -> Error {
    if error.kind == Kind::Connection {
        error.message = format!("no connection to {}: {}", link.address(), link.in_trouble(&error.message));
    }
    error.shard(link.shard())
}

/// A request that carries its caller's timeout to the server.
pub(crate) fn request<T>(message: T, left: Duration) -> Request<T> {
    let mut request = Request::new(message);
    request.set_timeout(left);
    request
}
