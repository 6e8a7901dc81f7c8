//! Relays that send every request frame to the shard twice, and every control call once. The first query for
//! the outcome of a push is refused, and must be repeated.

use fastps_core::error::{Error, Kind};
use fastps_proto::MAX_MESSAGE_BYTES;
use fastps_proto::v1 as pb;
use fastps_proto::v1::control_client::ControlClient;
use fastps_proto::v1::control_server::{Control, ControlServer};
use fastps_proto::v1::data_client::DataClient;
use fastps_proto::v1::data_server::{Data, DataServer};
use fastps_transport::convert;
use std::collections::HashSet;
use tokio::net::TcpListener;
use tokio::runtime::Runtime;
use tokio::sync::mpsc::{Sender, channel};
use tokio_stream::wrappers::{ReceiverStream, TcpListenerStream};
use tonic::transport::{Channel, Endpoint, Server};
use tonic::{Extensions, Request, Response, Status, Streaming};

/// Frames that a relay holds in each direction of a stream.
const ROOM: usize = 4;

/// One relay per server; they stop when this is dropped.
#[derive(Debug)]
pub(crate) struct Relays {
    addresses: Vec<String>,
    runtime: Option<Runtime>,
}

impl Relays {
    pub(crate) fn start(servers: &[String]) -> Self {
        let runtime =
            tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
        let addresses = servers.iter().map(|server| {
            let _inside = runtime.enter();
            let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
            listener.set_nonblocking(true).unwrap();
            let address = listener.local_addr().unwrap().to_string();
            let listener = TcpListenerStream::new(TcpListener::from_std(listener).unwrap());
            let endpoint = Endpoint::from_shared(format!("http://{server}")).unwrap();
            let relay = Relay(endpoint.initial_stream_window_size(2 << 20).connect_lazy());
            let data = DataServer::new(relay.clone()).max_decoding_message_size(MAX_MESSAGE_BYTES);
            let service = Server::builder().initial_stream_window_size(2 << 20);
            let service = { service }.add_service(ControlServer::new(relay)).add_service(data);
            runtime.spawn(service.serve_with_incoming(listener));
            address
        });
        Self { addresses: addresses.collect(), runtime: Some(runtime) }
    }

    pub(crate) fn addresses(&self) -> Vec<String> {
        self.addresses.clone()
    }
}

impl Drop for Relays {
    fn drop(&mut self) {
        if let Some(runtime) = self.runtime.take() {
            runtime.shutdown_background();
        }
    }
}

/// The relay to one shard.
#[derive(Clone, Debug)]
struct Relay(Channel);

#[tonic::async_trait]
impl Data for Relay {
    type ExchangeStream = ReceiverStream<Result<pb::Frame, Status>>;

    async fn exchange(
        &self,
        request: Request<Streaming<pb::Frame>>,
    ) -> Result<Response<Self::ExchangeStream>, Status> {
        let (up, requests) = channel(ROOM);
        let (down, answers) = channel(ROOM);
        let (metadata, _, frames) = request.into_parts();
        tokio::spawn(twice(frames, up, down.clone()));
        let mut shard = DataClient::new(self.0.clone()).max_decoding_message_size(MAX_MESSAGE_BYTES);
        let forwarded = Request::from_parts(metadata, Extensions::new(), ReceiverStream::new(requests));
        let from_shard = shard.exchange(forwarded).await?.into_inner();
        tokio::spawn(once(from_shard, down));
        Ok(Response::new(ReceiverStream::new(answers)))
    }
}

async fn twice(
    mut requests: Streaming<pb::Frame>,
    up: Sender<pb::Frame>,
    down: Sender<Result<pb::Frame, Status>>,
) {
    let mut asked = HashSet::new();
    while let Ok(Some(frame)) = requests.message().await {
        let header = frame.header.as_ref().filter(|header| header.kind() == pb::Kind::Resolve);
        if let Some(header) = header
            && asked.insert((header.slice, header.client, header.sequence))
        {
            // Answers like a shard that has no memory to record the fence.
            let full = Error::new(Kind::Capacity, "the shard's memory is full").retry_after_ms(20);
            if down.send(Ok(convert::refused(header.tag, &full))).await.is_err() {
                return;
            }
            continue;
        }
        for frame in [frame.clone(), frame] {
            if up.send(frame).await.is_err() {
                return;
            }
        }
    }
}

/// Forwards the first of the two answers to each request.
async fn once(mut answers: Streaming<pb::Frame>, down: Sender<Result<pb::Frame, Status>>) {
    let mut answered = HashSet::new();
    while let Some(answer) = answers.message().await.transpose() {
        let tag = answer.as_ref().ok().and_then(|frame| frame.header.as_ref()).map(|header| header.tag);
        let second = tag.is_some_and(|tag| !answered.insert(tag) && answered.remove(&tag));
        if !second && down.send(answer).await.is_err() {
            return;
        }
    }
}

/// Calls that are forwarded unchanged.
macro_rules! forward {
    ($($call:ident($request:ident) -> $response:ident;)*) => {
        #[tonic::async_trait]
        impl Control for Relay {
            $(async fn $call(&self, call: Request<pb::$request>) -> Result<Response<pb::$response>, Status> {
                ControlClient::new(self.0.clone()).$call(call).await
            })*
        }
    };
}

forward! {
    hello(HelloRequest) -> HelloResponse;
    get_map(GetMapRequest) -> GetMapResponse;
    register(RegisterRequest) -> RegisterResponse;
    reserve(ReserveRequest) -> ReserveResponse;
    seal(SealRequest) -> SealResponse;
    commit(CommitRequest) -> CommitResponse;
    settle(SettleRequest) -> SettleResponse;
    portion(PortionRequest) -> PortionResponse;
    open_space(OpenSpaceRequest) -> OpenSpaceResponse;
    close_space(CloseSpaceRequest) -> CloseSpaceResponse;
    list_spaces(ListSpacesRequest) -> ListSpacesResponse;
    coordinate(CoordinateRequest) -> CoordinateResponse;
    batch(BatchRequest) -> BatchResponse;
    batch_portion(BatchPortionRequest) -> BatchPortionResponse;
    unregister(UnregisterRequest) -> UnregisterResponse;
    drop(DropRequest) -> DropResponse;
    stats(StatsRequest) -> StatsResponse;
    join(JoinRequest) -> JoinResponse;
    leave(LeaveRequest) -> LeaveResponse;
    advance(AdvanceRequest) -> AdvanceResponse;
    checkpoint(CheckpointRequest) -> CheckpointResponse;
    hold(HoldRequest) -> HoldResponse;
    mark(MarkRequest) -> MarkResponse;
}
