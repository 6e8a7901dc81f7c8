//! The thread of a shard: its runtime, its services, and what it does from time to time.

use super::internal;
use crate::auth::access::Access;
use crate::auth::peer::Peer;
use crate::cluster::loss;
use crate::cluster::node::{Node, Phase};
use crate::cluster::reaper::reap;
use crate::config::{Bound, Danger};
use crate::connection::admission::Admission;
use crate::connection::not_grpc::OnlyGrpc;
use crate::connection::trim;
use crate::connection::{accept, accepted};
use crate::control::ControlService;
use crate::control::deadline::Timeout;
use crate::data::DataService;
use crate::persistence::checkpoint::Checkpoints;
use fastps_core::error::Result;
use fastps_proto::v1 as pb;
use fastps_proto::v1::control_server::ControlServer;
use fastps_proto::v1::data_server::DataServer;
use fastps_proto::{FILE_DESCRIPTOR_SET, MAX_MESSAGE_BYTES};
use fastps_transport::convert;
use fastps_transport::tls::ServerTls;
use fastps_transport::unix::Local;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};
use tokio::runtime::Runtime;
use tokio_stream::wrappers::ReceiverStream;
use tonic::service::Interceptor;
use tonic::service::interceptor::InterceptedService;
use tower::util::{MapRequestLayer, MapResponseLayer};

/// Starts the thread of a shard.
pub(super) fn spawn(
    bound: Bound,
    node: Arc<Node>,
    tls: Option<ServerTls>,
    socket: Option<&'static str>,
    danger: Option<Danger>,
) -> Result<JoinHandle<()>> {
    let resting = node.clone();
    // A poll cycle with a large slice takes a good part of a millisecond: look for other connections after
    // each.
    let runtime = tokio::runtime::Builder::new_current_thread()
        .event_interval(1)
        .enable_all()
        .on_thread_park(move || resting.files.rest())
        .build()
        .map_err(|error| internal("cannot make a runtime", error))?;
    std::thread::Builder::new()
        .name(format!("fastps-shard-{}", bound.index))
        .spawn(move || run(runtime, bound, &node, tls, (socket, danger)))
        .map_err(|error| internal("cannot start a thread", error))
}

fn run(
    runtime: Runtime,
    bound: Bound,
    node: &Arc<Node>,
    tls: Option<ServerTls>,
    socket: (Option<&str>, Option<Danger>),
) {
    let index = bound.index;
    let mut phase = node.phase.clone();
    let result = runtime.block_on(async {
        tokio::select! {
            result = serve(bound, node, tls, socket) => result,
            _ = phase.wait_for(|phase| *phase == Phase::Cutting) => {
                tracing::warn!(shard = index, "clients did not disconnect in time: their connections are cut");
                Ok(())
            }
        }
    });
    if let Err(error) = result {
        tracing::error!(shard = index, %error, "the shard failed");
    }
    // Drops remaining tasks without waiting for them.
    runtime.shutdown_background();
}

async fn serve(
    bound: Bound,
    node: &Arc<Node>,
    tls: Option<ServerTls>,
    (socket, danger): (Option<&str>, Option<Danger>),
) -> Result<()> {
    let listener = bound.listeners.into_accepting();
    let listener = listener.map_err(|error| internal("cannot use the listener", error))?;
    let open = listener.is_open();
    let (health, health_service) = tonic_health::server::health_reporter();
    health.set_serving::<ControlServer<ControlService>>().await;
    health.set_serving::<DataServer<DataService>>().await;
    let reflection = || {
        tonic_reflection::server::Builder::configure()
            .register_encoded_file_descriptor_set(FILE_DESCRIPTOR_SET)
            .register_encoded_file_descriptor_set(tonic_health::pb::FILE_DESCRIPTOR_SET)
            // Types of a status's details.
            .register_encoded_file_descriptor_set(tonic_types::pb::FILE_DESCRIPTOR_SET)
    };
    let failed = |error| internal("cannot serve reflection", error);
    // Many tools know only the older name.
    let (reflection, reflection_v1alpha) =
        (reflection().build_v1().map_err(failed)?, reflection().build_v1alpha().map_err(failed)?);
    let readers = Readers(node.security.access.clone());
    let reflection = InterceptedService::new(reflection, readers.clone());
    let reflection_v1alpha = InterceptedService::new(reflection_v1alpha, readers);
    let checkpoints = Checkpoints::of(node.shard.clone(), node.files.clone(), node.gate.clone());
    let control = ControlServer::new(ControlService { node: node.clone(), checkpoints })
        .max_decoding_message_size(MAX_MESSAGE_BYTES);
    let data =
        DataServer::new(DataService { node: node.clone() }).max_decoding_message_size(MAX_MESSAGE_BYTES);

    let sweeper = tokio::spawn(sweep(node.clone(), danger.filter(|_| open).map(risk)));
    let graces = tokio::spawn(end_graces(node.clone()));
    let reaper = tokio::spawn(reap(node.clone()));
    let watcher = tokio::spawn(loss::watch(node.clone()));
    let mut draining = node.phase.clone();
    let drain = tokio::spawn(async move {
        let _ = draining.wait_for(|phase| *phase >= Phase::Draining).await;
        health.set_service_status("", tonic_health::ServingStatus::NotServing).await;
        health.set_not_serving::<ControlServer<ControlService>>().await;
        health.set_not_serving::<DataServer<DataService>>().await;
    });
    let mut stopping = node.phase.clone();
    let (foreign, connections) = tokio::sync::mpsc::channel(1);
    let local = socket.and_then(|prefix| {
        let failed =
            |error: &std::io::Error| tracing::info!(shard = node.index(), %error, "there is no Unix socket");
        Local::open(prefix, node.server).inspect_err(failed).ok()
    });
    let named = bound.socket.map(Local::at).transpose();
    let named = named.map_err(|error| internal("cannot use the Unix socket", error))?;
    let locals = local.into_iter().chain(named).collect();
    let native = accept::accept(listener, locals, tls, node.clone(), foreign);
    let (index, admitting) = (node.index(), node.clone());
    let others = tonic::transport::Server::builder()
        .layer(tower::layer::layer_fn(OnlyGrpc))
        .layer(tower::layer::layer_fn(move |inner| Timeout::new(inner, index)))
        .layer(tower::layer::layer_fn(move |inner| Admission { inner, node: admitting.clone() }))
        .layer(MapRequestLayer::new(Peer::keep_busy))
        .layer(MapResponseLayer::new(move |response| convert::unreadable_response(response, index)))
        .max_frame_size(1 << 20)
        .initial_stream_window_size(accepted::STREAM_WINDOW)
        .initial_connection_window_size(accepted::CONNECTION_WINDOW)
        .max_concurrent_streams(16)
        .http2_max_header_list_size(16 << 10)
        .http2_keepalive_interval(Some(Duration::from_secs(20)))
        .http2_keepalive_timeout(Some(Duration::from_secs(20)))
        .add_service(health_service)
        .add_service(reflection)
        .add_service(reflection_v1alpha)
        .add_service(control)
        .add_service(data)
        .serve_with_incoming_shutdown(ReceiverStream::new(connections), async move {
            let _ = stopping.wait_for(|phase| *phase >= Phase::Stopping).await;
        });
    let ((), result) = tokio::join!(native, others);
    sweeper.abort();
    graces.abort();
    reaper.abort();
    watcher.abort();
    drain.abort();
    result.map_err(|error| internal("serving failed", error))
}

/// Lets callers pass that may read.
#[derive(Clone)]
struct Readers(Arc<Access>);

impl Interceptor for Readers {
    fn call(&mut self, request: tonic::Request<()>) -> Result<tonic::Request<()>, tonic::Status> {
        let peer = Peer::of(&request)?;
        let known = self.0.admit(peer.origin(), request.metadata().as_ref(), pb::Role::Reader);
        known.inspect(|_| peer.authenticated()).map(|_| request).map_err(|error| convert::status(&error))
    }
}

/// The risk in words.
fn risk(danger: Danger) -> &'static str {
    match danger {
        Danger::Plain => {
            "--insecure: connections are neither encrypted nor authenticated; every client may read and change everything"
        }
        Danger::Anybody => {
            "--insecure: connections are encrypted but not authenticated; every client may read and change everything"
        }
    }
}

/// Makes the versions whose grace is over.
async fn end_graces(node: Arc<Node>) {
    let mut ticks = tokio::time::interval(Duration::from_millis(100));
    ticks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    let start = Instant::now();
    loop {
        ticks.tick().await;
        node.shard.end_graces(start.elapsed().as_millis() as u64);
    }
}

/// Ends expired leases, returns free memory, and reminds of an exposed server.
async fn sweep(node: Arc<Node>, danger: Option<&'static str>) {
    let shortest = node.sessions.lease().min(node.reservations.lease());
    let period = (shortest / 4).clamp(Duration::from_millis(5), Duration::from_secs(1));
    let mut ticks = tokio::time::interval(period);
    ticks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    let mut warned: Option<Instant> = None;
    loop {
        ticks.tick().await;
        node.sweep(period);
        trim::give_back();
        if let Some(danger) = danger
            && warned.is_none_or(|at| at.elapsed() >= Duration::from_mins(1))
        {
            warned = Some(Instant::now());
            tracing::warn!(shard = node.index(), "{danger}");
        }
    }
}
