//! A plain client made of generated stubs, for one shard, and two of them for the tensors of every fault
//! test: one sends Float32, the other 1-bit.

use crate::ledger::{Ledger, PATIENT, Part, TENSORS};
use bytes::Bytes;
use fastps_client::{Client, ConnectOptions};
use fastps_core::codec::{Codec, CodecId, Position};
use fastps_core::dtype::DType;
use fastps_core::error::Error;
use fastps_core::frame::{Action, Identity, Push};
use fastps_core::isa::Isa;
use fastps_core::tensor::SliceId;
use fastps_proto::v1 as pb;
use fastps_proto::v1::control_client::ControlClient;
use fastps_proto::v1::data_client::DataClient;
use fastps_server::{Server, ServerConfig};
use fastps_transport::convert::{self, Answer, Read, Route};
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tonic::metadata::BinaryMetadataValue;
use tonic::transport::Channel;
use tonic::{Code, Request, Status, Streaming};

pub(crate) const CLIENT: u64 = 0xC11E;
/// The secret of every plain client, so that one may continue where another left off.
pub(crate) const SECRET: [u8; 16] = *b"a plain client's";
pub(crate) const SLICE: u64 = 63 * 4096;

pub(crate) fn config() -> ServerConfig {
    ServerConfig {
        listen: vec!["127.0.0.1:0".into()],
        memory_limit: Some(64 << 20),
        room_for_workers: 0,
        // These clients renew their sessions only by calls, and a busy machine may delay those.
        lease: Duration::from_mins(10),
        ..ServerConfig::default()
    }
}

pub(crate) fn spec(name: &str, elements: u64) -> pb::TensorSpec {
    pb::TensorSpec {
        name: name.into(),
        shape: vec![elements],
        dtype: pb::DType::DtypeFloat32.into(),
        apply: pb::Apply::Exact.into(),
        group: "default".into(),
        optimizer: Some(pb::Optimizer {
            name: "sgd".into(),
            settings: [("lr".to_owned(), 1.0)].into(),
            ..Default::default()
        }),
        ..Default::default()
    }
}

pub(crate) fn bytes(values: &[f32]) -> Bytes {
    values.iter().flat_map(|x| x.to_le_bytes()).collect()
}

/// A plain client's request, with its secret and a deadline.
pub(crate) fn timed<T>(message: T) -> Request<T> {
    let mut request = signed(message);
    request.set_timeout(Duration::from_secs(20));
    request
}

/// As [`timed`], without a deadline.
pub(crate) fn signed<T>(message: T) -> Request<T> {
    let mut request = Request::new(message);
    request.metadata_mut().insert_bin("fastps-secret-bin", BinaryMetadataValue::from_bytes(&SECRET));
    request
}

/// A plain client's `Hello`.
pub(crate) fn hello(client: u64) -> pb::HelloRequest {
    pb::HelloRequest { client, secret: Bytes::from_static(&SECRET), ..Default::default() }
}

pub(crate) fn error(status: Status) -> Error {
    convert::error_from_status(&status)
}

/// The result of work that must end in time.
pub(crate) async fn within<T>(work: impl Future<Output = T>) -> T {
    tokio::time::timeout(PATIENT, work).await.expect("it takes for ever")
}

/// One shard's client.
pub(crate) struct Shard {
    pub(crate) channel: Channel,
    pub(crate) control: ControlClient<Channel>,
    pub(crate) client: u64,
}

/// A stream of frames.
pub(crate) struct Exchange {
    frames: mpsc::Sender<pb::Frame>,
    pub(crate) answers: Streaming<pb::Frame>,
}

impl Exchange {
    pub(crate) async fn send(&self, frame: pb::Frame) {
        within(self.frames.send(frame)).await.unwrap();
    }

    /// The next message of the stream.
    pub(crate) async fn message(&mut self) -> Result<Option<pb::Frame>, Status> {
        within(self.answers.message()).await
    }

    pub(crate) async fn answer(&mut self) -> (u64, Answer) {
        convert::answer_from_frame(self.message().await.unwrap().unwrap()).unwrap()
    }

    pub(crate) async fn ask(&mut self, frame: pb::Frame) -> Answer {
        let tag = frame.header.as_ref().map_or(0, |h| h.tag);
        self.send(frame).await;
        let (answered, answer) = self.answer().await;
        assert_eq!(answered, tag);
        answer
    }

    /// As [`Exchange::ask`], for a stopping server: `None` if it has ended the stream.
    pub(crate) async fn ask_while_it_lasts(&mut self, frame: pb::Frame) -> Option<Answer> {
        within(self.frames.send(frame)).await.ok()?;
        let answer = self.message().await.unwrap()?;
        Some(convert::answer_from_frame(answer).unwrap().1)
    }

    pub(crate) async fn refusal(&mut self, frame: pb::Frame) -> Error {
        match self.ask(frame).await {
            Answer::Refused(error) => {
                assert!(error.shard.is_some(), "{error}");
                error
            }
            other => panic!("{other:?}"),
        }
    }

    pub(crate) async fn pull(&mut self, route: Route, slice: u64) -> (u64, Bytes) {
        match self.ask(convert::read_frame(5, route, SliceId(slice), Read::Values)).await {
            Answer::Values { version, payload, applied: None, .. } => (version, payload),
            other => panic!("{other:?}"),
        }
    }
}

impl Shard {
    pub(crate) async fn connect(address: &str, client: u64) -> Self {
        let channel = Channel::from_shared(format!("http://{address}")).unwrap();
        Self::over(within(channel.connect()).await.unwrap(), client).await
    }

    /// For a client that already has a session.
    pub(crate) async fn over_without_hello(address: &str) -> Self {
        let channel = Channel::from_shared(format!("http://{address}")).unwrap();
        let channel = within(channel.connect()).await.unwrap();
        Self { control: ControlClient::new(channel.clone()), channel, client: CLIENT }
    }

    /// Says hello over a channel; again while the shard waits for shard 0.
    pub(crate) async fn over(channel: Channel, client: u64) -> Self {
        let mut control = ControlClient::new(channel.clone());
        let hello = pb::HelloRequest { name: "test".into(), ..hello(client) };
        let begin = Instant::now();
        while let Err(status) = control.hello(timed(hello.clone())).await {
            assert!(status.code() == Code::Unavailable && begin.elapsed() < PATIENT, "{status}");
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        Self { channel, control, client }
    }

    pub(crate) async fn exchange(&self) -> Exchange {
        let (frames, receiver) = mpsc::channel(64);
        let mut data = DataClient::new(self.channel.clone()).max_decoding_message_size(8 << 20);
        let answers =
            within(data.exchange(signed(ReceiverStream::new(receiver)))).await.unwrap().into_inner();
        Exchange { frames, answers }
    }

    pub(crate) async fn register(&mut self, spec: &pb::TensorSpec) -> Result<pb::RegisterResponse, Error> {
        let ask = pb::RegisterRequest { spec: Some(spec.clone()), client: self.client, ..Default::default() };
        self.control.register(timed(ask)).await.map(tonic::Response::into_inner).map_err(error)
    }

    /// Reserves the slices on shard 0.
    pub(crate) async fn reserve(
        &mut self,
        spec: &pb::TensorSpec,
        place: &pb::RegisterResponse,
    ) -> Result<u32, Error> {
        let share = on_shard(place, 0).unwrap();
        self.reserve_part(spec, &share).await
    }

    pub(crate) async fn reserve_part(&mut self, spec: &pb::TensorSpec, share: &Share) -> Result<u32, Error> {
        let ask = pb::ReserveRequest {
            reservation: share.reservation,
            spec: Some(spec.clone()),
            slices: share.slices.clone(),
            indices: share.indices.clone(),
            group: share.group,
            client: self.client,
            ..Default::default()
        };
        self.control.reserve(timed(ask)).await.map(|r| r.into_inner().lease_ms).map_err(error)
    }

    pub(crate) async fn seal(&mut self, reservation: u64) -> Result<(), Error> {
        self.control
            .seal(timed(pb::SealRequest { reservation, ..Default::default() }))
            .await
            .map(drop)
            .map_err(error)
    }

    pub(crate) async fn commit(&mut self, reservation: u64) -> Result<(), Error> {
        let ask = pb::CommitRequest { reservation, client: self.client, ..Default::default() };
        self.control.commit(timed(ask)).await.map(drop).map_err(error)
    }

    /// Registers a tensor of one slice. Returns the route of its frames.
    pub(crate) async fn create(
        &mut self,
        exchange: &mut Exchange,
        name: &str,
        values: &[f32],
    ) -> (Route, u64) {
        let spec = spec(name, values.len() as u64);
        let place = self.register(&spec).await.unwrap();
        let slice = place.placement.as_ref().unwrap().slices[0];
        let route = Route { group: place.placement.as_ref().unwrap().group, epoch: 1, client: self.client };
        assert!(self.reserve(&spec, &place).await.unwrap() > 0);
        let receipt = exchange.ask(initial(route, slice, place.reservation, values)).await;
        assert!(matches!(receipt, Answer::Receipt(_)), "{receipt:?}");
        self.seal(place.reservation).await.unwrap();
        self.commit(place.reservation).await.unwrap();
        (route, slice)
    }

    pub(crate) async fn counter(&mut self, name: &str) -> u64 {
        self.control.stats(timed(pb::StatsRequest::default())).await.unwrap().into_inner().counters[name]
    }
}

pub(crate) fn push(route: Route, slice: u64, sequence: u64, values: &[f32]) -> pb::Frame {
    frame(route, slice, Action::Gradient, sequence, values)
}

/// Sequence 0 here is 1 on the wire: the initial values'.
pub(crate) fn frame(route: Route, slice: u64, action: Action, sequence: u64, values: &[f32]) -> pb::Frame {
    encoded(route, slice, action, sequence, CodecId::Float32, values.len(), bytes(values))
}

fn encoded(
    route: Route,
    slice: u64,
    action: Action,
    sequence: u64,
    codec: CodecId,
    elements: usize,
    body: Bytes,
) -> pb::Frame {
    let push = Push {
        action,
        ..Push::gradient(
            SliceId(slice),
            Identity { client: route.client, sequence: sequence + 1 },
            elements as u64,
            codec,
            &body,
        )
    };
    convert::push_frame(1000 + sequence, route, &push, DType::Float32, false, body.clone())
}

pub(crate) fn initial(route: Route, slice: u64, reservation: u64, values: &[f32]) -> pb::Frame {
    let mut frame = frame(route, slice, Action::Assign, 0, values);
    header(&mut frame).reservation = reservation;
    frame
}

pub(crate) fn header(frame: &mut pb::Frame) -> &mut pb::Header {
    frame.header.as_mut().unwrap()
}

pub(crate) async fn start() -> (Server, Shard, Exchange) {
    start_with(&config()).await
}

pub(crate) async fn start_with(config: &ServerConfig) -> (Server, Shard, Exchange) {
    let server = Server::start(config).unwrap();
    let shard = Shard::connect(&server.addresses()[0], CLIENT).await;
    let exchange = shard.exchange().await;
    (server, shard, exchange)
}

/// Place of a slice.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Piece {
    pub(crate) part: Part,
    pub(crate) shard: usize,
    pub(crate) slice: u64,
    pub(crate) group: u32,
    pub(crate) elements: usize,
}

impl Piece {
    pub(crate) fn name(&self) -> &'static str {
        &TENSORS[self.part.0].name
    }

    /// Belongs to the tensor of several slices to which both clients push.
    pub(crate) fn is_of_big(&self) -> bool {
        self.name() == "big"
    }
}

/// One plain client: a connection and a stream to each shard.
pub(crate) struct Peer {
    pub(crate) number: usize,
    pub(crate) shards: Vec<Shard>,
    pub(crate) streams: Vec<Exchange>,
}

impl Peer {
    pub(crate) async fn connect(server: &Server, client: u64, number: usize) -> Self {
        let (mut shards, mut streams) = (Vec::new(), Vec::new());
        for address in server.addresses() {
            let shard = Shard::connect(address, client).await;
            streams.push(shard.exchange().await);
            shards.push(shard);
        }
        Self { number, shards, streams }
    }

    pub(crate) fn route(&self, piece: Piece) -> Route {
        Route { group: piece.group, epoch: 1, client: self.shards[0].client }
    }

    /// A push of one value to every element of the slice, in this client's codec.
    pub(crate) fn push(&self, piece: Piece, sequence: u64, value: f32) -> pb::Frame {
        let codec = [Codec::Float32, Codec::OneBit][self.number];
        let mut body = Vec::new();
        let values = vec![value; piece.elements];
        codec.encode(Isa::get().unwrap(), &values, None, Position::default(), &mut body);
        let route = self.route(piece);
        encoded(route, piece.slice, Action::Gradient, sequence, codec.id(), piece.elements, body.into())
    }

    pub(crate) async fn ask(&mut self, piece: Piece, frame: pb::Frame) -> Answer {
        self.streams[piece.shard].ask(frame).await
    }

    pub(crate) async fn refusal(&mut self, piece: Piece, frame: pb::Frame) -> Error {
        let error = self.streams[piece.shard].refusal(frame).await;
        assert_eq!(error.shard, Some(piece.shard as u32));
        error
    }

    pub(crate) async fn pull(&mut self, piece: Piece) -> (u64, Bytes) {
        let route = self.route(piece);
        self.streams[piece.shard].pull(route, piece.slice).await
    }

    /// Reserves, fills and seals the slices of a registration, shard by shard, with this value everywhere.
    pub(crate) async fn fill(&mut self, spec: &pb::TensorSpec, place: &pb::RegisterResponse, value: f32) {
        for shard in 0..self.shards.len() {
            if let Some(own) = on_shard(place, shard) {
                assert!(self.shards[shard].reserve_part(spec, &own).await.unwrap() > 0);
                self.fill_shard(spec, &own, shard, value).await;
                self.shards[shard].seal(place.reservation).await.unwrap();
            }
        }
    }

    async fn fill_shard(&mut self, spec: &pb::TensorSpec, own: &Share, shard: usize, value: f32) {
        for (slice, index) in own.slices.iter().zip(&own.indices) {
            let elements = (spec.shape[0] - index * SLICE).min(SLICE);
            let route = Route { group: own.group, epoch: 1, client: self.shards[0].client };
            let frame = initial(route, *slice, own.reservation, &vec![value; elements as usize]);
            let answer = self.streams[shard].ask(frame).await;
            assert!(matches!(answer, Answer::Receipt(_)), "{answer:?}");
        }
    }

    /// The four steps of a registration.
    pub(crate) async fn register(&mut self, spec: &pb::TensorSpec) -> pb::RegisterResponse {
        let place = self.shards[0].register(spec).await.unwrap();
        self.fill(spec, &place, 0.0).await;
        self.shards[0].commit(place.reservation).await.unwrap();
        place
    }
}

/// A shard's share of a registration.
pub(crate) struct Share {
    pub(crate) reservation: u64,
    pub(crate) slices: Vec<u64>,
    pub(crate) indices: Vec<u64>,
    pub(crate) group: u32,
}

pub(crate) fn on_shard(place: &pb::RegisterResponse, shard: usize) -> Option<Share> {
    let placement = place.placement.as_ref().unwrap();
    let indices: Vec<_> =
        (0..placement.slices.len()).filter(|k| placement.shards[*k] as usize == shard).collect();
    let slices = indices.iter().map(|k| placement.slices[*k]).collect();
    let indices: Vec<_> = indices.into_iter().map(|k| k as u64).collect();
    let (reservation, group) = (place.reservation, placement.group);
    (!indices.is_empty()).then_some(Share { reservation, slices, indices, group })
}

/// A tensor of the ledger as a wire message.
pub(crate) fn spec_of(tensor: usize) -> pb::TensorSpec {
    let tensor = &TENSORS[tensor];
    let mut spec = spec(&tensor.name, tensor.elements as u64);
    if tensor.owner.is_some() {
        spec.optimizer = Some(pb::Optimizer { name: "adam".into(), ..Default::default() });
    }
    spec
}

/// Three shards, two plain clients, the ledger, and a native client that reads the shards directly.
pub(crate) struct World {
    pub(crate) peers: Vec<Peer>,
    pub(crate) pieces: Vec<Piece>,
    pub(crate) ledger: Ledger,
    pub(crate) truth: Arc<Client>,
    pub(crate) server: Server,
}

impl World {
    pub(crate) async fn start(config: ServerConfig) -> Self {
        Self::start_without(config, None).await
    }

    /// Starts all, and has the first client register all tensors but this one.
    pub(crate) async fn start_without(config: ServerConfig, missing: Option<&str>) -> Self {
        let server = Server::start(&ServerConfig { shards: 3, memory_limit: None, ..config }).unwrap();
        let mut first = Peer::connect(&server, CLIENT, 0).await;
        let mut pieces = Vec::new();
        for (k, tensor) in TENSORS.iter().enumerate().filter(|(_, t)| Some(&*t.name) != missing) {
            let place = first.register(&spec_of(k)).await;
            assert_eq!(place.placement.as_ref().unwrap().slices.len(), tensor.slices().count());
            pieces.extend(pieces_of(k, &place));
        }
        let truth = Client::connect(server.addresses(), ConnectOptions::default()).unwrap();
        let peers = vec![first, Peer::connect(&server, CLIENT + 1, 1).await];
        Self { peers, pieces, ledger: Ledger::new(), truth, server }
    }

    /// The slices that this client pushes to.
    pub(crate) fn pieces_of(&self, peer: usize) -> Vec<Piece> {
        let own = |piece: &&Piece| TENSORS[piece.part.0].is_pushed_by(peer);
        self.pieces.iter().filter(own).copied().collect()
    }

    /// Pushes to all slices of this client. Each must be applied, and is recorded.
    pub(crate) async fn push(&mut self, peer: usize, sequence: u64) {
        for piece in self.pieces_of(peer) {
            self.push_to(peer, piece, sequence).await;
        }
    }

    /// Pushes to one slice. Returns the version.
    pub(crate) async fn push_to(&mut self, peer: usize, piece: Piece, sequence: u64) -> u64 {
        let value = TENSORS[piece.part.0].gradient(sequence as usize);
        let frame = self.peers[peer].push(piece, sequence, value);
        let Answer::Receipt(applied) = self.peers[peer].ask(piece, frame).await else { panic!("{piece:?}") };
        assert!(!applied.duplicate, "{piece:?}");
        self.ledger.enter(piece.part, value);
        applied.version
    }

    pub(crate) fn check(&self) {
        self.ledger.check(&*self.truth);
    }
}

pub(crate) fn pieces_of(tensor: usize, place: &pb::RegisterResponse) -> Vec<Piece> {
    let placement = place.placement.as_ref().unwrap();
    let piece = |(slice, elements): (usize, std::ops::Range<usize>)| Piece {
        part: (tensor, slice),
        shard: placement.shards[slice] as usize,
        slice: placement.slices[slice],
        group: placement.group,
        elements: elements.len(),
    };
    TENSORS[tensor].slices().enumerate().map(piece).collect()
}
