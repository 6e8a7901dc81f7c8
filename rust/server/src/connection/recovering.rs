//! Answers for shards that are recovering. Health checks report that nothing is served, requests for a page
//! get 404, and every other call is refused with a retry time; serving then begins on the same listeners.

use crate::config::Bound;
use crate::connection::not_grpc::{OnlyGrpc, is_http1, refuse_http1};
use crate::connection::pending::{Admitted, Pending, PendingSlot};
use crate::control::ControlService;
use crate::data::DataService;
use crate::listeners::Listeners;
use crate::persistence::Files;
use fastps_core::error::{Error, Kind, Result};
use fastps_proto::v1::control_server::ControlServer;
use fastps_proto::v1::data_server::DataServer;
use fastps_transport::Socket;
use fastps_transport::convert;
use fastps_transport::tls::ServerTls;
use std::convert::Infallible;
use std::future::{Ready, ready};
use std::io;
use std::marker::PhantomData;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::thread::JoinHandle;
use std::time::Duration;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;
use tokio::sync::{OwnedSemaphorePermit, Semaphore, mpsc, oneshot};
use tokio_stream::wrappers::ReceiverStream;
use tonic::body::Body;
use tonic::codegen::{Service, http};
use tonic::server::NamedService;
use tonic::transport::server::Connected;

/// Retry delay of refused calls.
const RETRY_AFTER_MS: u64 = 500;
/// Most connections of a shard; others are closed, and retry.
const MAX_CONNECTIONS: usize = 512;
/// Limit on a TLS handshake and the first byte within.
const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(10);

/// A shard that is not served yet.
struct RecoveringShard {
    index: u32,
    listeners: Listeners,
    files: Files,
}

/// Answers for shards that are not served yet, until dropped.
pub(crate) struct RecoveryListener {
    close: Option<oneshot::Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl RecoveryListener {
    /// Opens the listeners; `None` if there is nothing to recover.
    pub(crate) fn open(bound: &[Bound], files: &[Files], tls: Option<&ServerTls>) -> Result<Option<Self>> {
        if files.iter().all(|files| files.journal().is_none()) {
            return Ok(None);
        }
        let failed =
            |error: io::Error| Error::new(Kind::Internal, format!("cannot answer while recovering: {error}"));
        let recovering = |(shard, files): (&Bound, &Files)| {
            let listeners = shard.listeners.try_clone().map_err(failed)?;
            Ok(RecoveringShard { index: shard.index, listeners, files: files.clone() })
        };
        let shards = bound.iter().zip(files).map(recovering).collect::<Result<Vec<_>>>()?;
        let tls = tls.cloned();
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().map_err(failed)?;
        let (close, closed) = oneshot::channel();
        let work = move || {
            runtime.block_on(async {
                for shard in shards {
                    tokio::spawn(answer(shard, tls.clone()));
                }
                let _ = closed.await;
            });
            // Ends the connections, too.
            runtime.shutdown_background();
        };
        let thread = std::thread::Builder::new().name("fastps-recovering".to_owned());
        Ok(Some(Self { close: Some(close), thread: Some(thread.spawn(work).map_err(failed)?) }))
    }
}

impl Drop for RecoveryListener {
    fn drop(&mut self) {
        drop(self.close.take());
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

async fn answer(shard: RecoveringShard, tls: Option<ServerTls>) {
    let RecoveringShard { index, listeners, files } = shard;
    let (connections, incoming) = mpsc::channel(1);
    let (reporter, health) = tonic_health::server::health_reporter();
    reporter.set_service_status("", tonic_health::ServingStatus::NotServing).await;
    reporter.set_not_serving::<ControlServer<ControlService>>().await;
    reporter.set_not_serving::<DataServer<DataService>>().await;
    let refusing = tonic::transport::Server::builder()
        .layer(tower::layer::layer_fn(OnlyGrpc))
        .add_service(health)
        .add_service(Refusing::<ControlServer<ControlService>>::new(index, files.clone()))
        .add_service(Refusing::<DataServer<DataService>>::new(index, files))
        .serve_with_incoming(ReceiverStream::new(incoming));
    let accepting = async {
        let listener = listeners.into_accepting()?;
        let (pending, slots) = (Arc::new(Pending::default()), Arc::new(Semaphore::new(MAX_CONNECTIONS)));
        loop {
            match listener.accept().await {
                Ok((tcp, from)) => {
                    if let Some(admitted) = pending.enter(Some(from.ip())).await {
                        tokio::spawn(admit(tcp, admitted, slots.clone(), tls.clone(), connections.clone()));
                    }
                }
                // Too many open files, or a departed peer: wait.
                Err(_) => tokio::time::sleep(Duration::from_millis(50)).await,
            }
        }
    };
    let result: io::Result<()> = tokio::select! {
        result = accepting => result,
        result = refusing => result.map_err(io::Error::other),
    };
    if let Err(error) = result {
        tracing::warn!(shard = index, %error, "cannot answer while the shard is recovering");
    }
}

/// Serves a connection until it is refused, unless it is evicted before.
async fn admit(
    tcp: TcpStream,
    admitted: Admitted,
    slots: Arc<Semaphore>,
    tls: Option<ServerTls>,
    connections: mpsc::Sender<io::Result<RefusedConnection>>,
) {
    let Some(slot) = admitted.slot().await else { return };
    let opening = tokio::time::timeout(HANDSHAKE_TIMEOUT, slot.watch(open(tcp, &slot, tls)));
    let opened = tokio::select! {
        opened = opening => opened.ok().flatten(),
        () = slot.gives_way() => None,
    };
    if let (Some((io, first)), Ok(slots)) = (opened, slots.try_acquire_owned()) {
        let _ = connections.send(Ok(RefusedConnection { io, first, _slot: slots })).await;
    }
}

/// The connection, and the byte of it that was read; `None` if it asks for a page, or does not begin.
async fn open(
    mut tcp: TcpStream,
    slot: &PendingSlot,
    tls: Option<ServerTls>,
) -> Option<(Socket, Option<u8>)> {
    let first = slot.first_byte(&tcp).await?;
    if is_http1(&[first]) {
        refuse_http1(&mut tcp, &[first]).await;
        return None;
    }
    let Some(tls) = tls else { return Some((tcp.into(), None)) };
    let mut io = Socket::from(tls.accept(tcp).await.ok()?);
    let first = io.read_u8().await.ok()?;
    if is_http1(&[first]) {
        refuse_http1(&mut io, &[first]).await;
        return None;
    }
    Some((io, Some(first)))
}

/// Refuses all calls of a service.
struct Refusing<S> {
    shard: u32,
    files: Files,
    service: PhantomData<fn() -> S>,
}

impl<S> Refusing<S> {
    fn new(shard: u32, files: Files) -> Self {
        Self { shard, files, service: PhantomData }
    }
}

impl<S> Clone for Refusing<S> {
    fn clone(&self) -> Self {
        Self::new(self.shard, self.files.clone())
    }
}

impl<S: NamedService> NamedService for Refusing<S> {
    const NAME: &'static str = S::NAME;
}

impl<S> Service<http::Request<Body>> for Refusing<S> {
    type Response = http::Response<Body>;
    type Error = Infallible;
    type Future = Ready<Result<Self::Response, Infallible>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, _: http::Request<Body>) -> Self::Future {
        // Another server may own the shard: clients take who names it for the shard.
        let error = if let Some(owner) = self.files.owner().filter(|owner| !owner.holds()) {
            owner.refusal()
        } else {
            let message = format!("the server is recovering: {}", self.files.progress());
            Error::new(Kind::Unavailable, message).shard(self.shard).retry_after_ms(RETRY_AFTER_MS)
        };
        ready(Ok(convert::status(&error).into_http()))
    }
}

/// A connection.
struct RefusedConnection {
    io: Socket,
    /// Its first byte, to be read again.
    first: Option<u8>,
    _slot: OwnedSemaphorePermit,
}

impl Connected for RefusedConnection {
    type ConnectInfo = ();

    fn connect_info(&self) {}
}

impl AsyncRead for RefusedConnection {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        if buf.remaining() > 0
            && let Some(first) = self.first.take()
        {
            buf.put_slice(&[first]);
            return Poll::Ready(Ok(()));
        }
        Pin::new(&mut self.io).poll_read(cx, buf)
    }
}

impl AsyncWrite for RefusedConnection {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.io).poll_write(cx, buf)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.io).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.io).poll_shutdown(cx)
    }
}
