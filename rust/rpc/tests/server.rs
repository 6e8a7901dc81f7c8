//! The server through the generated client alone: what any gRPC client in any language can do.
#![allow(clippy::unwrap_used, clippy::panic, reason = "helpers of tests, too, fail by panicking")]

use bytes::Bytes;
use fastps_core::codec::CodecId;
use fastps_core::dtype::DType;
use fastps_core::error::{Error, Kind};
use fastps_core::frame::{Action, Base, Identity, Push};
use fastps_core::policy::{Admission, Held, Policy};
use fastps_core::slice::Slice;
use fastps_core::tensor::SliceId;
use fastps_proto::v1 as pb;
use fastps_proto::v1::control_client::ControlClient;
use fastps_proto::v1::data_client::DataClient;
use fastps_rpc::convert::{self, Answer, Read, Route};
use fastps_rpc::{Server, ServerConfig};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tonic::transport::Channel;
use tonic::{Request, Status, Streaming};

const CLIENT: u64 = 0xC11E;
const SLICE: u64 = 63 * 4096;

fn config() -> ServerConfig {
    ServerConfig {
        listen: vec!["127.0.0.1:0".into()],
        memory_limit: Some(64 << 20),
        ..ServerConfig::default()
    }
}

fn spec(name: &str, elements: u64) -> pb::TensorSpec {
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
    }
}

fn bytes(values: &[f32]) -> Bytes {
    values.iter().flat_map(|x| x.to_le_bytes()).collect()
}

fn timed<T>(message: T) -> Request<T> {
    let mut request = Request::new(message);
    request.set_timeout(Duration::from_secs(20));
    request
}

fn error(status: Status) -> Error {
    convert::error_from_status(&status)
}

/// One shard's client.
struct Shard {
    channel: Channel,
    control: ControlClient<Channel>,
    client: u64,
}

/// A stream of frames.
struct Exchange {
    frames: mpsc::Sender<pb::Frame>,
    answers: Streaming<pb::Frame>,
}

impl Exchange {
    async fn send(&self, frame: pb::Frame) {
        self.frames.send(frame).await.unwrap();
    }

    async fn answer(&mut self) -> (u64, Answer) {
        convert::answer_from_frame(self.answers.message().await.unwrap().unwrap()).unwrap()
    }

    async fn ask(&mut self, frame: pb::Frame) -> Answer {
        let tag = frame.header.as_ref().map_or(0, |h| h.tag);
        self.send(frame).await;
        let (answered, answer) = self.answer().await;
        assert_eq!(answered, tag);
        answer
    }

    async fn refusal(&mut self, frame: pb::Frame) -> Error {
        match self.ask(frame).await {
            Answer::Refused(error) => {
                assert!(error.shard.is_some(), "{error}");
                error
            }
            other => panic!("{other:?}"),
        }
    }

    async fn pull(&mut self, route: Route, slice: u64) -> (u64, Bytes) {
        match self.ask(convert::read_frame(5, route, SliceId(slice), Read::Values)).await {
            Answer::Values { version, payload, applied: None, .. } => (version, payload),
            other => panic!("{other:?}"),
        }
    }
}

impl Shard {
    async fn connect(address: &str, client: u64) -> Self {
        let channel = Channel::from_shared(format!("http://{address}")).unwrap().connect().await.unwrap();
        let mut control = ControlClient::new(channel.clone());
        let hello = pb::HelloRequest { client, name: "test".into(), ..Default::default() };
        control.hello(timed(hello)).await.unwrap();
        Self { channel, control, client }
    }

    async fn exchange(&self) -> Exchange {
        let (frames, receiver) = mpsc::channel(64);
        let mut data = DataClient::new(self.channel.clone()).max_decoding_message_size(8 << 20);
        let answers = data.exchange(ReceiverStream::new(receiver)).await.unwrap().into_inner();
        Exchange { frames, answers }
    }

    async fn register(&mut self, spec: &pb::TensorSpec) -> Result<pb::RegisterResponse, Error> {
        let ask = pb::RegisterRequest { spec: Some(spec.clone()), client: self.client };
        self.control.register(timed(ask)).await.map(tonic::Response::into_inner).map_err(error)
    }

    async fn reserve(&mut self, spec: &pb::TensorSpec, place: &pb::RegisterResponse) -> Result<u32, Error> {
        let placement = place.placement.clone().unwrap();
        let ask = pb::ReserveRequest {
            reservation: place.reservation,
            spec: Some(spec.clone()),
            indices: (0..placement.slices.len() as u64).collect(),
            slices: placement.slices,
            group: placement.group,
            client: self.client,
        };
        self.control.reserve(timed(ask)).await.map(|r| r.into_inner().lease_ms).map_err(error)
    }

    async fn seal(&mut self, reservation: u64) -> Result<(), Error> {
        self.control.seal(timed(pb::SealRequest { reservation })).await.map(drop).map_err(error)
    }

    async fn commit(&mut self, reservation: u64) -> Result<(), Error> {
        let ask = pb::CommitRequest { reservation, client: self.client };
        self.control.commit(timed(ask)).await.map(drop).map_err(error)
    }

    /// The whole registration of a tensor of one slice, and the route of its frames.
    async fn create(&mut self, exchange: &mut Exchange, name: &str, values: &[f32]) -> (Route, u64) {
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

    async fn counter(&mut self, name: &str) -> u64 {
        self.control.stats(timed(pb::StatsRequest {})).await.unwrap().into_inner().counters[name]
    }
}

fn push(route: Route, slice: u64, sequence: u64, values: &[f32]) -> pb::Frame {
    frame(route, slice, Action::Gradient, sequence, values)
}

/// Sequence 0 here is 1 on the wire: the initial values'.
fn frame(route: Route, slice: u64, action: Action, sequence: u64, values: &[f32]) -> pb::Frame {
    let body = bytes(values);
    let push = Push {
        slice: SliceId(slice),
        action,
        identity: Identity { client: route.client, sequence: sequence + 1 },
        base: None,
        lr: None,
        scale: None,
        count: values.len() as u64,
        codec: CodecId::Float32,
        body: &body,
        trusted: false,
        once: false,
    };
    convert::push_frame(1000 + sequence, route, &push, DType::Float32, false, body.clone())
}

fn initial(route: Route, slice: u64, reservation: u64, values: &[f32]) -> pb::Frame {
    let mut frame = frame(route, slice, Action::Assign, 0, values);
    header(&mut frame).reservation = reservation;
    frame
}

fn header(frame: &mut pb::Frame) -> &mut pb::Header {
    frame.header.as_mut().unwrap()
}

async fn start() -> (Server, Shard, Exchange) {
    start_with(&config()).await
}

async fn start_with(config: &ServerConfig) -> (Server, Shard, Exchange) {
    let server = Server::start(config).unwrap();
    let shard = Shard::connect(&server.addresses()[0], CLIENT).await;
    let exchange = shard.exchange().await;
    (server, shard, exchange)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn register_push_pull() {
    let (server, mut shard, mut stream) = start().await;
    let (route, slice) = shard.create(&mut stream, "w", &[1.0, 2.0, 3.0]).await;
    let receipt = stream.ask(push(route, slice, 1, &[0.5, 0.5, 1.0])).await;
    let Answer::Receipt(applied) = receipt else { panic!("{receipt:?}") };
    assert_eq!((applied.version, applied.own, applied.duplicate), (2, 2, false));
    assert_eq!(stream.pull(route, slice).await, (2, bytes(&[0.5, 1.5, 2.0])));
    for (asker, own) in [(shard.client, 2), (77, 0)] {
        Shard::connect(&server.addresses()[0], asker).await;
        let version = convert::read_frame(9, Route { client: asker, ..route }, SliceId(slice), Read::Version);
        assert_eq!(stream.ask(version).await, Answer::Version { version: 2, own });
    }

    let mut wants = push(route, slice, 2, &[1.0; 3]);
    header(&mut wants).want_values = true;
    header(&mut wants).base_version = Some(2);
    header(&mut wants).base_own = Some(2);
    let values = stream.ask(wants).await;
    let Answer::Values { version: 3, step: 2, applied: Some(applied), payload, .. } = values else {
        panic!("{values:?}")
    };
    assert_eq!((applied.staleness, payload), (Some(0), bytes(&[-0.5, 0.5, 1.0])));

    let map = shard.control.get_map(timed(pb::GetMapRequest::default())).await.unwrap().into_inner();
    assert_eq!((map.epoch, map.entries.len(), map.next.as_str()), (1, 1, ""));
    assert_eq!(map.entries[0].placement.as_ref().unwrap().slices, [slice]);
    assert!(shard.register(&spec("w", 3)).await.unwrap().exists);
    let other = shard.register(&spec("w", 4)).await.unwrap_err();
    assert_eq!(
        (other.kind, other.tensor.as_deref(), other.expected.as_deref()),
        (Kind::Config, Some("w"), Some("[3]"))
    );

    let ask = pb::UnregisterRequest { name: "w".into() };
    let placement =
        shard.control.unregister(timed(ask.clone())).await.unwrap().into_inner().placement.unwrap();
    shard.control.drop(timed(pb::DropRequest { slices: placement.slices })).await.unwrap();
    assert_eq!(stream.refusal(push(route, slice, 3, &[1.0; 3])).await.kind, Kind::UnknownTensor);
    assert_eq!(error(shard.control.unregister(timed(ask)).await.unwrap_err()).kind, Kind::UnknownTensor);
    assert_eq!(shard.counter("memory_used").await, 0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn a_repeat_is_not_applied_again_and_resolve_fences() {
    let (_server, mut shard, mut stream) = start().await;
    let (route, slice) = shard.create(&mut stream, "w", &[0.0; 3]).await;
    for duplicate in [false, true, true] {
        let Answer::Receipt(applied) = stream.ask(push(route, slice, 1, &[1.0; 3])).await else { panic!() };
        assert_eq!((applied.version, applied.duplicate), (2, duplicate));
    }
    let resolve = |sequence: u64| convert::resolve_frame(9, route, SliceId(slice), sequence + 1);
    assert!(matches!(stream.ask(resolve(1)).await, Answer::Receipt(a) if a.version == 2 && a.duplicate));
    assert_eq!(stream.ask(resolve(2)).await, Answer::Fenced);
    let fenced = stream.refusal(push(route, slice, 2, &[1.0; 3])).await;
    assert_eq!((fenced.kind, fenced.tensor.as_deref()), (Kind::Fenced, Some("w")));
    assert_eq!(stream.ask(resolve(2)).await, Answer::Fenced);
    for sequence in 3..fastps_core::identity::WINDOW as u64 + 10 {
        let answer = stream.ask(push(route, slice, sequence, &[0.0; 3])).await;
        assert!(matches!(answer, Answer::Receipt(_)), "{answer:?}");
    }
    assert_eq!(stream.refusal(resolve(1)).await.kind, Kind::UnknownOutcome);
    assert_eq!(stream.pull(route, slice).await.1, bytes(&[-1.0; 3]));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn every_bad_frame_is_refused_and_changes_nothing() {
    type Spoil = fn(&mut pb::Frame);
    let (_server, mut shard, mut stream) = start().await;
    let (route, slice) = shard.create(&mut stream, "w", &[1.0, 2.0, 3.0]).await;
    let spoils: [(Kind, &str, Spoil); 21] = [
        (Kind::StaleEpoch, "epoch 1", |f| header(f).epoch = 2),
        (Kind::UnknownTensor, "no slice", |f| header(f).slice = 999),
        (Kind::Frame, "group", |f| header(f).group = 7),
        (Kind::Lease, "session", |f| header(f).client = 4711),
        (Kind::Frame, "client", |f| header(f).client = 0),
        (Kind::Frame, "sequence", |f| header(f).sequence = 0),
        (Kind::Frame, "checksum", |f| header(f).crc32c = Some(1)),
        (Kind::Shape, "elements", |f| header(f).count = 1 << 60),
        (Kind::Shape, "elements", |f| header(f).count = 4),
        (Kind::Frame, "length", |f| f.payload = f.payload.slice(..11)),
        (Kind::Frame, "length", |f| {
            f.payload = Bytes::from(vec![0; 1 << 20]);
        }),
        (Kind::Frame, "codec", |f| header(f).codec = 9),
        (Kind::Frame, "codec", |f| header(f).codec = 0),
        (Kind::Frame, "length", |f| {
            header(f).codec = pb::Codec::Onebit.into();
        }),
        (Kind::DType, "dtype", |f| {
            header(f).dtype = pb::DType::DtypeFloat64.into();
        }),
        (Kind::DType, "dtype", |f| header(f).dtype = 0),
        (Kind::Frame, "weight", |f| header(f).weight = Some(1.0)),
        (Kind::Frame, "reservation", |f| header(f).reservation = 1),
        (Kind::Frame, "kind", |f| header(f).kind = 99),
        (Kind::NonFinite, "element 1", |f| {
            f.payload = bytes(&[0.0, f32::NAN, 0.0]);
        }),
        (Kind::Config, "lr", |f| header(f).lr = Some(f64::INFINITY)),
    ];
    for (n, (kind, word, spoil)) in spoils.into_iter().enumerate() {
        let mut bad = push(route, slice, 1, &[1.0; 3]);
        spoil(&mut bad);
        let error = stream.refusal(bad).await;
        assert_eq!(error.kind, kind, "{n}: {error}");
        assert!(error.to_string().contains(word), "{n}: {error}");
    }
    stream.send(pb::Frame::default()).await;
    assert!(matches!(stream.answer().await, (0, Answer::Refused(error)) if error.kind == Kind::Frame));
    let late = stream.refusal(initial(route, slice, 1, &[9.0; 3])).await;
    assert_eq!(late.kind, Kind::Lease);
    assert_eq!(stream.pull(route, slice).await, (1, bytes(&[1.0, 2.0, 3.0])));
    assert!(matches!(stream.ask(push(route, slice, 1, &[1.0; 3])).await, Answer::Receipt(a) if !a.duplicate));
    assert_eq!(shard.counter("frames_refused").await, 23);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn an_oversize_message_ends_its_stream_alone() {
    let (_server, mut shard, mut stream) = start().await;
    let (route, slice) = shard.create(&mut stream, "w", &[1.0; 3]).await;
    let mut other = shard.exchange().await;
    let mut big = push(route, slice, 1, &[1.0; 3]);
    big.payload = Bytes::from(vec![0; 5 << 20]);
    stream.send(big).await;
    let ended = stream.answers.message().await.unwrap_err();
    assert_eq!(error(ended).kind, Kind::Frame);
    assert_eq!(other.pull(route, slice).await, (1, bytes(&[1.0; 3])));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn state_travels_both_ways() {
    let (_server, mut shard, mut stream) = start().await;
    let mut adam = spec("a", 3);
    adam.optimizer = Some(pb::Optimizer { name: "adam".into(), ..Default::default() });
    let place = shard.register(&adam).await.unwrap();
    let slice = place.placement.as_ref().unwrap().slices[0];
    let route = Route { group: 1, epoch: 1, client: CLIENT };
    shard.reserve(&adam, &place).await.unwrap();
    stream.ask(initial(route, slice, place.reservation, &[1.0; 3])).await;
    shard.seal(place.reservation).await.unwrap();
    shard.commit(place.reservation).await.unwrap();
    let mut assign = frame(route, slice, Action::AssignState { step: 7 }, 1, &[0.25; 6]);
    header(&mut assign).count = 3;
    assert!(matches!(stream.ask(assign).await, Answer::Receipt(_)));
    let answer = stream.ask(convert::read_frame(5, route, SliceId(slice), Read::State)).await;
    assert!(matches!(answer, Answer::Values { step: 7, payload, .. } if payload == bytes(&[0.25; 6])));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn a_silent_client_loses_its_session() {
    let lease = Duration::from_millis(150);
    let (_server, mut shard, mut stream) = start_with(&ServerConfig { lease, ..config() }).await;
    let (route, slice) = shard.create(&mut stream, "w", &[1.0; 3]).await;
    stream.ask(push(route, slice, 1, &[1.0; 3])).await;
    for _ in 0..6 {
        tokio::time::sleep(lease / 3).await;
        stream.pull(route, slice).await;
    }
    tokio::time::sleep(3 * lease).await;
    assert_eq!(stream.refusal(push(route, slice, 1, &[1.0; 3])).await.kind, Kind::Lease);
    for renew in [true, false] {
        let hello = pb::HelloRequest { client: CLIENT, renew, ..Default::default() };
        assert_eq!(error(shard.control.hello(timed(hello)).await.unwrap_err()).kind, Kind::Lease);
    }
    assert_eq!((shard.counter("sessions_expired").await, shard.counter("identity_entries").await), (1, 0));
    let hello = pb::HelloRequest { client: 77, ..Default::default() };
    shard.control.hello(timed(hello)).await.unwrap();
    let route = Route { client: 77, ..route };
    assert_eq!(stream.pull(route, slice).await, (2, bytes(&[0.0; 3])));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn a_registration_is_waited_for_and_taken_over() {
    let reservation_lease = Duration::from_millis(200);
    let (server, mut first, mut stream) = start_with(&ServerConfig { reservation_lease, ..config() }).await;
    let mut second = Shard::connect(&server.addresses()[0], 2).await;
    let w = spec("w", 3);
    let place = first.register(&w).await.unwrap();
    let slice = place.placement.as_ref().unwrap().slices[0];
    let route = Route { group: 1, epoch: 1, client: CLIENT };
    first.reserve(&w, &place).await.unwrap();
    first.reserve(&w, &place).await.unwrap();
    assert_eq!(first.seal(place.reservation).await.unwrap_err().kind, Kind::Config);
    assert_eq!(first.commit(place.reservation).await.unwrap_err().kind, Kind::Config);
    let early = stream.refusal(push(route, slice, 1, &[1.0; 3])).await;
    assert_eq!((early.kind, early.tensor.as_deref()), (Kind::UnknownTensor, Some("w")));
    assert!(second.register(&w).await.unwrap().under_way);
    assert_eq!(second.register(&spec("w", 4)).await.unwrap_err().kind, Kind::Config);

    tokio::time::sleep(2 * reservation_lease).await;
    assert_eq!((first.counter("memory_used").await, first.counter("reservations_expired").await), (0, 1));
    let again = second.register(&w).await.unwrap();
    assert!(!again.under_way && again.reservation != place.reservation);
    assert_eq!(
        stream.refusal(initial(route, slice, place.reservation, &[7.0; 3])).await.kind,
        Kind::UnknownTensor
    );
    assert_eq!(first.seal(place.reservation).await.unwrap_err().kind, Kind::Lease);
    assert_eq!(first.commit(place.reservation).await.unwrap_err().kind, Kind::Lease);

    let slice = again.placement.as_ref().unwrap().slices[0];
    let mut other = second.exchange().await;
    let route = Route { client: 2, ..route };
    second.reserve(&w, &again).await.unwrap();
    assert!(matches!(
        other.ask(initial(route, slice, again.reservation, &[5.0; 3])).await,
        Answer::Receipt(_)
    ));
    second.seal(again.reservation).await.unwrap();
    assert_eq!(second.reserve(&w, &again).await.unwrap(), 0);
    let late = other.refusal(initial(route, slice, again.reservation, &[6.0; 3])).await;
    assert_eq!(late.kind, Kind::Config);
    second.commit(again.reservation).await.unwrap();
    second.commit(again.reservation).await.unwrap();
    assert!(first.register(&w).await.unwrap().exists);
    assert_eq!(other.pull(route, slice).await.1, bytes(&[5.0; 3]));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn what_does_not_fit_is_refused() {
    let (_server, mut shard, mut stream) =
        start_with(&ServerConfig { memory_limit: Some(1 << 20), ..config() }).await;
    let big = spec("big", SLICE);
    let place = shard.register(&big).await.unwrap();
    let refused = shard.reserve(&big, &place).await.unwrap_err();
    assert_eq!((refused.kind, refused.tensor.as_deref()), (Kind::Capacity, Some("big")));
    let slices = place.placement.unwrap().slices;
    shard.control.drop(timed(pb::DropRequest { slices })).await.unwrap();
    assert_eq!(shard.counter("registrations").await, 0);
    assert_eq!(shard.counter("memory_used").await, 0);
    assert_eq!(shard.register(&spec("huge", 1 << 56)).await.unwrap_err().kind, Kind::Capacity);
    assert_eq!(shard.register(&spec("absurd", 1 << 60)).await.unwrap_err().kind, Kind::Shape);
    shard.create(&mut stream, "small", &[1.0; 3]).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn shards_share_a_tensor() {
    let (server, mut first, _stream) = start_with(&ServerConfig { shards: 2, ..config() }).await;
    let mut second = Shard::connect(&server.addresses()[1], CLIENT).await;
    let place = first.register(&spec("w", 2 * SLICE)).await.unwrap().placement.unwrap();
    assert_eq!(place.shards, [0, 1]);
    let elsewhere = second.register(&spec("w", 2 * SLICE)).await.unwrap_err();
    assert_eq!((elsewhere.kind, elsewhere.shard), (Kind::Config, Some(1)));
    let hello = pb::HelloRequest { client: CLIENT, renew: true, protocol_minor: 9, ..Default::default() };
    let hello = second.control.hello(timed(hello)).await.unwrap().into_inner();
    assert_eq!((hello.shard, hello.cluster.as_slice()), (1, server.addresses()));
    assert_eq!((hello.protocol_minor, hello.role()), (0, pb::Role::Admin));
}

/// Reserves the slices of a tensor that lies on two shards, fills and seals them.
async fn seal_both(shards: &mut [Shard; 2], spec: &pb::TensorSpec) -> pb::RegisterResponse {
    let place = shards[0].register(spec).await.unwrap();
    let placement = place.placement.clone().unwrap();
    assert_eq!(placement.shards, [0, 1]);
    for (k, shard) in shards.iter_mut().enumerate() {
        let ask = pb::ReserveRequest {
            reservation: place.reservation,
            spec: Some(spec.clone()),
            indices: vec![k as u64],
            slices: vec![placement.slices[k]],
            group: placement.group,
            client: CLIENT,
        };
        shard.control.reserve(timed(ask)).await.unwrap();
        let route = Route { group: placement.group, epoch: 1, client: CLIENT };
        let values = vec![1.0; SLICE as usize];
        let frame = initial(route, placement.slices[k], place.reservation, &values);
        let receipt = shard.exchange().await.ask(frame).await;
        assert!(matches!(receipt, Answer::Receipt(_)), "{receipt:?}");
        shard.seal(place.reservation).await.unwrap();
    }
    place
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn what_is_sealed_and_never_committed_is_freed_and_what_is_committed_stays() {
    let reservation_lease = Duration::from_millis(200);
    let (server, first, _stream) =
        start_with(&ServerConfig { shards: 2, reservation_lease, ..config() }).await;
    let second = Shard::connect(&server.addresses()[1], CLIENT).await;
    let mut shards = [first, second];
    let w = spec("w", 2 * SLICE);
    let place = seal_both(&mut shards, &w).await;
    // An owner that is slow, but alive, keeps its place.
    for _ in 0..20 {
        tokio::time::sleep(reservation_lease / 4).await;
        assert_eq!(shards[0].register(&w).await.unwrap().reservation, place.reservation);
    }
    for shard in &mut shards {
        assert!(shard.counter("memory_used").await > 4 * SLICE);
    }
    // One that has died loses it, on every shard.
    let late = Instant::now() + Duration::from_secs(20);
    for shard in &mut shards {
        while shard.counter("memory_used").await > 0 {
            assert!(Instant::now() < late, "the memory stays taken");
            tokio::time::sleep(reservation_lease / 4).await;
        }
        assert_eq!(shard.counter("reservations_expired").await, 1);
    }
    assert_eq!(shards[0].counter("registrations").await, 0);
    assert_eq!(shards[0].commit(place.reservation).await.unwrap_err().kind, Kind::Lease);

    let again = seal_both(&mut shards, &w).await;
    shards[0].commit(again.reservation).await.unwrap();
    tokio::time::sleep(5 * reservation_lease).await;
    let placement = again.placement.unwrap();
    let route = Route { group: placement.group, epoch: 1, client: CLIENT };
    for (shard, slice) in shards.iter().zip(placement.slices) {
        assert_eq!(shard.exchange().await.pull(route, slice).await.1, bytes(&vec![1.0; SLICE as usize]));
    }
}

/// Holds every gradient until told.
#[derive(Debug, Default)]
struct Holding(Mutex<Vec<Held>>);

impl Policy for Holding {
    fn admit(&self, _slice: &Slice, push: &Push<'_>) -> Admission {
        if push.action == Action::Gradient { Admission::Hold } else { Admission::Apply }
    }
    fn hold(&self, held: Held) {
        self.0.lock().unwrap().push(held);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn held_pushes_are_answered_later_in_any_order() {
    let holding = Arc::new(Holding::default());
    let config = ServerConfig { policy: Some(holding.clone()), ..config() };
    let (_server, mut shard, mut stream) = start_with(&config).await;
    let (route, slice) = shard.create(&mut stream, "w", &[0.0; 3]).await;
    for sequence in 1..=8 {
        let mut frame = push(route, slice, sequence, &[1.0; 3]);
        header(&mut frame).want_values = sequence > 4;
        stream.send(frame).await;
    }
    assert_eq!(stream.pull(route, slice).await, (1, bytes(&[0.0; 3])));
    let mut held = std::mem::take(&mut *holding.0.lock().unwrap());
    assert_eq!(held.len(), 8);
    held.reverse();
    std::thread::spawn(|| held.into_iter().for_each(Held::release)).join().unwrap();
    let mut tags = Vec::new();
    for _ in 0..8 {
        let (tag, answer) = stream.answer().await;
        assert_eq!(matches!(answer, Answer::Values { .. }), tag > 1004, "{answer:?}");
        tags.push(tag);
    }
    tags.sort_unstable();
    assert_eq!(tags, (1001..=1008).collect::<Vec<_>>());
    assert_eq!(stream.pull(route, slice).await, (9, bytes(&[-8.0; 3])));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn a_reader_that_stalls_delays_nobody_and_pins_two_slices() {
    let (server, mut shard, mut stream) = start().await;
    let values = vec![1.0; SLICE as usize];
    let (route, slice) = shard.create(&mut stream, "w", &values).await;
    let slow = Shard::connect(&server.addresses()[0], 2).await;
    let mut stalled = slow.exchange().await;
    for _ in 0..40 {
        stalled
            .send(convert::read_frame(5, Route { client: 2, ..route }, SliceId(slice), Read::Values))
            .await;
    }
    tokio::time::sleep(Duration::from_millis(200)).await;
    let started = Instant::now();
    for sequence in 1..=20 {
        let answer = stream.ask(push(route, slice, sequence, &values)).await;
        assert!(matches!(answer, Answer::Receipt(_)), "{answer:?}");
    }
    assert!(started.elapsed() < Duration::from_secs(5));
    assert!(shard.counter("pulls").await < 40);
    for _ in 0..40 {
        let (_, Answer::Values { version, payload, .. }) = stalled.answer().await else { panic!() };
        let expected = 2.0 - version as f32;
        assert!(payload == bytes(&vec![expected; SLICE as usize]), "version {version} is not whole");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn stopping_takes_no_longer_than_told_whatever_clients_do() {
    let (server, mut shard, mut stream) = start().await;
    let (route, slice) = shard.create(&mut stream, "w", &[1.0; 3]).await;
    // One that speaks no HTTP/2 at all, and one that is idle.
    let _mute = std::net::TcpStream::connect(&server.addresses()[0]).unwrap();
    let address = server.addresses()[0].clone();
    let stopping = std::thread::spawn(move || {
        let started = Instant::now();
        server.stop(Duration::from_secs(5)).unwrap();
        server.stop(Duration::from_secs(5)).unwrap();
        started.elapsed()
    });
    let draining = loop {
        match stream.ask(push(route, slice, 1, &[0.0; 3])).await {
            Answer::Refused(error) => break error,
            _ => tokio::time::sleep(Duration::from_millis(10)).await,
        }
    };
    assert_eq!(draining.kind, Kind::Unavailable);
    assert!(draining.retry_after_ms.is_some());
    // The stream ends by itself.
    assert!(matches!(stream.answers.message().await, Ok(None)));
    let took = stopping.join().unwrap();
    assert!(took < Duration::from_secs(5), "{took:?}");
    drop(std::net::TcpListener::bind(address).unwrap());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn health_and_reflection_answer() {
    use tonic_health::pb::{HealthCheckRequest, health_client::HealthClient};
    use tonic_reflection::pb::v1::server_reflection_client::ServerReflectionClient;
    use tonic_reflection::pb::v1::server_reflection_request::MessageRequest;
    use tonic_reflection::pb::v1::{ServerReflectionRequest, server_reflection_response::MessageResponse};
    let (_server, shard, _stream) = start().await;
    for service in ["", "fastps.v1.Control", "fastps.v1.Data"] {
        let ask = HealthCheckRequest { service: service.into() };
        let answer = HealthClient::new(shard.channel.clone()).check(ask).await.unwrap().into_inner();
        assert_eq!(answer.status, 1, "{service}");
    }
    let ask = ServerReflectionRequest {
        host: String::new(),
        message_request: Some(MessageRequest::ListServices(String::new())),
    };
    let mut client = ServerReflectionClient::new(shard.channel.clone());
    let mut answers = client.server_reflection_info(tokio_stream::once(ask)).await.unwrap().into_inner();
    let answer = answers.message().await.unwrap().unwrap().message_response.unwrap();
    let MessageResponse::ListServicesResponse(list) = answer else { panic!("{answer:?}") };
    let names: Vec<_> = list.service.iter().map(|s| s.name.as_str()).collect();
    assert!(names.contains(&"fastps.v1.Data") && names.contains(&"fastps.v1.Control"), "{names:?}");
}

#[test]
fn staleness_needs_a_base() {
    // The header keeps an unknown base apart from base 0.
    let route = Route { group: 1, epoch: 1, client: 1 };
    let body = bytes(&[1.0]);
    let push = Push {
        slice: SliceId(1),
        action: Action::Gradient,
        identity: Identity { client: 1, sequence: 1 },
        base: Some(Base { version: 0, own: None }),
        lr: None,
        scale: None,
        count: 1,
        codec: CodecId::Float32,
        body: &body,
        trusted: false,
        once: false,
    };
    let frame = convert::push_frame(1, route, &push, DType::Float32, false, body.clone());
    assert_eq!(frame.header.unwrap().base_version, Some(0));
}
