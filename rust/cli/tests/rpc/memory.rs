//! A server's memory with real connections: counted by purpose, bounded, returned, and not held by stalled
//! readers.

use crate::stubs::{hello, signed};
use bytes::Bytes;
use fastps_client::{Client, ConnectOptions};
use fastps_core::codec::CodecId;
use fastps_core::dtype::DType;
use fastps_core::error::{Error, Kind};
use fastps_core::frame::{Action, Identity, Push};
use fastps_core::policy::{Admission, Held, Policy};
use fastps_core::slice::Slice;
use fastps_core::tensor::SliceId;
use fastps_proto::v1 as pb;
use fastps_proto::v1::control_client::ControlClient;
use fastps_proto::v1::data_client::DataClient;
use fastps_server::{Server, ServerConfig};
use fastps_transport::convert::{self, Answer, Read, Route};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tonic::transport::{Channel, Endpoint};
use tonic::{Code, Request, Status, Streaming};

/// Elements and bytes of a whole slice.
const SLICE: usize = 63 * 4096;
const BYTES: u64 = 4 * SLICE as u64;
const LIMIT: u64 = 96 << 20;
/// Memory of a hundred answers that wait for their turn.
const OWED_BYTES: u64 = 32 << 10;
const PATIENT: Duration = Duration::from_mins(1);

fn start(change: impl FnOnce(&mut ServerConfig)) -> Server {
    let mut config = ServerConfig {
        listen: vec!["127.0.0.1:0".into()],
        memory_limit: Some(LIMIT),
        room_for_workers: 0,
        // Peers do not renew their sessions.
        lease: 10 * PATIENT,
        ..ServerConfig::default()
    };
    change(&mut config);
    Server::start(&config).unwrap()
}

fn counter(server: &Server, name: &str) -> u64 {
    server.counters()[0].iter().find(|(n, _)| *n == name).unwrap().1
}

/// The counters of all purposes add up to the memory in use, which is within the limit.
fn check_sum(server: &Server) {
    let all = &server.counters()[0];
    let counter = |name: &str| all.iter().find(|(n, _)| *n == name).unwrap().1;
    let purposes = ["slices", "copies", "answers", "held", "identities", "connections", "map"];
    let sum: u64 = purposes.iter().map(|purpose| counter(&format!("memory_{purpose}"))).sum();
    assert_eq!(sum, counter("memory_used"));
    assert!(sum <= counter("memory_limit"));
}

async fn until(what: &str, mut holds: impl FnMut() -> bool) {
    let begin = Instant::now();
    while !holds() {
        assert!(begin.elapsed() < PATIENT, "not within {PATIENT:?}: {what}");
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
}

fn timed<T>(message: T) -> Request<T> {
    let mut request = signed(message);
    request.set_timeout(PATIENT);
    request
}

/// A client with its own connection and small windows, so the server soon waits for it.
struct Peer {
    control: ControlClient<Channel>,
    data: DataClient<Channel>,
    client: u64,
}

/// A stream of frames.
struct Exchange {
    frames: mpsc::Sender<pb::Frame>,
    answers: Streaming<pb::Frame>,
}

impl Peer {
    async fn connect(server: &Server, client: u64) -> Self {
        Self::try_connect(server, client).await.unwrap()
    }

    async fn try_connect(server: &Server, client: u64) -> Result<Self, Status> {
        let endpoint = Endpoint::from_shared(format!("http://{}", server.addresses()[0])).unwrap();
        let endpoint = endpoint.initial_stream_window_size(65_535).initial_connection_window_size(65_535);
        let channel = endpoint.connect_lazy();
        let mut control = ControlClient::new(channel.clone());
        control.hello(timed(hello(client))).await?;
        let data = DataClient::new(channel).max_decoding_message_size(8 << 20);
        Ok(Self { control, data, client })
    }

    async fn exchange(&self) -> Result<Exchange, Status> {
        let (frames, receiver) = mpsc::channel(256);
        let answers = self.data.clone().exchange(signed(ReceiverStream::new(receiver))).await?.into_inner();
        Ok(Exchange { frames, answers })
    }

    fn route(&self) -> Route {
        Route { group: 1, epoch: 1, client: self.client }
    }

    /// Registers a tensor of one slice of zeros. Returns the slice.
    async fn create(
        &mut self,
        stream: &mut Exchange,
        name: &str,
        elements: usize,
        apply: pb::Apply,
    ) -> Result<u64, Error> {
        let error = |status: Status| convert::error_from_status(&status);
        let spec = pb::TensorSpec {
            name: name.into(),
            shape: vec![elements as u64],
            dtype: pb::DType::DtypeFloat32.into(),
            apply: apply.into(),
            group: "default".into(),
            optimizer: Some(pb::Optimizer {
                name: "sgd".into(),
                settings: [("lr".to_owned(), 1.0)].into(),
                ..Default::default()
            }),
            ..Default::default()
        };
        let ask = pb::RegisterRequest { spec: Some(spec.clone()), client: self.client, ..Default::default() };
        let place = self.control.register(timed(ask)).await.map_err(error)?.into_inner();
        let (reservation, slices) = (place.reservation, place.placement.unwrap().slices);
        let ask = pb::ReserveRequest {
            reservation,
            spec: Some(spec),
            slices: slices.clone(),
            indices: (0..slices.len() as u64).collect(),
            group: 1,
            client: self.client,
            ..Default::default()
        };
        self.control.reserve(timed(ask)).await.map_err(error)?;
        assert_eq!(slices.len(), 1);
        let mut frame = change(self.route(), slices[0], Action::Assign, 1, &vec![0.0; elements]);
        frame.header.as_mut().unwrap().reservation = reservation;
        let receipt = stream.ask(frame).await;
        assert!(matches!(receipt, Answer::Receipt(_)), "{receipt:?}");
        self.control.seal(timed(pb::SealRequest { reservation, ..Default::default() })).await.unwrap();
        self.control
            .commit(timed(pb::CommitRequest { reservation, client: self.client, ..Default::default() }))
            .await
            .unwrap();
        Ok(slices[0])
    }
}

fn change(route: Route, slice: u64, action: Action, sequence: u64, values: &[f32]) -> pb::Frame {
    let body: Bytes = values.iter().flat_map(|x| x.to_le_bytes()).collect();
    let push = Push {
        action,
        ..Push::gradient(
            SliceId(slice),
            Identity { client: route.client, sequence },
            values.len() as u64,
            CodecId::Float32,
            &body,
        )
    };
    convert::push_frame(sequence, route, &push, DType::Float32, false, body.clone())
}

/// A gradient that adds 1 everywhere.
fn push(route: Route, slice: u64, sequence: u64, elements: usize) -> pb::Frame {
    change(route, slice, Action::Gradient, sequence, &vec![-1.0; elements])
}

fn pull(route: Route, slice: u64) -> pb::Frame {
    convert::read_frame(5, route, SliceId(slice), Read::Values)
}

impl Exchange {
    async fn send(&self, frame: pb::Frame) {
        self.frames.send(frame).await.unwrap();
    }

    async fn answer(&mut self) -> Result<Option<Answer>, Status> {
        let message = tokio::time::timeout(PATIENT, self.answers.message()).await.unwrap();
        Ok(message?.map(|frame| convert::answer_from_frame(frame).unwrap().1))
    }

    async fn ask(&mut self, frame: pb::Frame) -> Answer {
        self.send(frame).await;
        self.answer().await.unwrap().unwrap()
    }

    async fn refusal(&mut self, frame: pb::Frame) -> Error {
        match self.ask(frame).await {
            Answer::Refused(error) => error,
            _ => panic!("not refused"),
        }
    }
}

fn assert_full(error: &Error) {
    assert_eq!((error.kind, error.shard), (Kind::Capacity, Some(0)), "{error}");
    assert!(error.retry_after_ms.is_some() && error.expected.is_some(), "{error}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn readers_that_stall_cannot_stop_pushes() {
    let server = start(|_| ());
    let mut writer = Peer::connect(&server, 1).await;
    let mut stream = writer.exchange().await.unwrap();
    let slice = writer.create(&mut stream, "w", SLICE, pb::Apply::Exact).await.unwrap();
    let other = writer.create(&mut stream, "other", 4000, pb::Apply::Exact).await.unwrap();
    // Three readers, each with a different version: one pin uses the slice's spare buffer, the others take
    // memory.
    let mut stalled = Vec::new();
    for client in 2..5 {
        let reader = Peer::connect(&server, client).await;
        let mut answers = reader.exchange().await.unwrap();
        // Their connections are active and have their memory.
        assert!(matches!(answers.ask(push(reader.route(), other, 1, 4000)).await, Answer::Receipt(_)));
        assert!(matches!(answers.ask(pull(reader.route(), slice)).await, Answer::Values { .. }));
        stalled.push((reader, answers));
    }
    let ones = |n: u64| push(Route { group: 1, epoch: 1, client: 1 }, slice, n, SLICE);
    assert!(matches!(stream.ask(ones(2)).await, Answer::Receipt(_)));
    // Leaves memory for half a copy.
    let mut k = 0;
    loop {
        let free = counter(&server, "memory_limit") - counter(&server, "memory_used");
        let filler = free.saturating_sub(BYTES / 2 + 8192) as usize / 4;
        if filler <= 16 {
            break;
        }
        // Its values and its spare; a tensor of one slice has at most SLICE elements.
        let n = (filler / 2).min(SLICE);
        writer.create(&mut stream, &format!("filler{k}"), n, pb::Apply::Exact).await.unwrap();
        k += 1;
    }
    let mut sequence = 3;
    for (reader, answers) in &stalled {
        let before = counter(&server, "pulls");
        for _ in 0..6 {
            answers.send(pull(reader.route(), slice)).await;
        }
        until("the reader has its pins", || counter(&server, "pulls") == before + 4).await;
        let begin = Instant::now();
        for _ in 0..5 {
            let answer = stream.ask(ones(sequence)).await;
            assert!(matches!(answer, Answer::Receipt(_)), "{answer:?}");
            sequence += 1;
        }
        assert!(begin.elapsed() < PATIENT);
        check_sum(&server);
    }
    assert_eq!(counter(&server, "streams_reset"), 2);
    // The reader that stalled first receives what had been sent, and then the reason.
    let (_, answers) = &mut stalled[0];
    let status = loop {
        match answers.answer().await {
            Ok(Some(Answer::Values { payload, .. })) => assert_eq!(payload.len() as u64, BYTES),
            Ok(other) => panic!("{other:?}"),
            Err(status) => break status,
        }
    };
    assert_eq!(status.code(), Code::ResourceExhausted);
    let error = convert::error_from_status(&status);
    assert_eq!((error.kind, error.shard), (Kind::Capacity, Some(0)));
    assert!(error.to_string().contains("reset") && error.retry_after_ms.is_some(), "{error}");
    // The one that stalled last was not reset.
    let (_, answers) = &mut stalled[2];
    for _ in 0..6 {
        let answer = answers.answer().await.unwrap();
        assert!(matches!(answer, Some(Answer::Values { .. })));
    }
    // A reader that was reset may reconnect.
    let mut again = stalled[0].0.exchange().await.unwrap();
    assert!(matches!(again.ask(pull(stalled[0].0.route(), slice)).await, Answer::Values { .. }));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn a_hogwild_pull_that_does_not_fit_is_refused_and_fits_later() {
    let server = start(|_| ());
    let mut writer = Peer::connect(&server, 1).await;
    let mut stream = writer.exchange().await.unwrap();
    let slice = writer.create(&mut stream, "w", SLICE, pb::Apply::Hogwild).await.unwrap();
    let reader = Peer::connect(&server, 2).await;
    let mut stalled = reader.exchange().await.unwrap();
    for stream in [&mut stream, &mut stalled] {
        assert!(matches!(stream.ask(pull(reader.route(), slice)).await, Answer::Values { .. }));
    }
    until("copies are returned", || counter(&server, "memory_copies") == 0).await;
    // Memory for two and a half copies.
    let mut k = 0;
    loop {
        let free = LIMIT - counter(&server, "memory_used");
        let n = ((free - 5 * BYTES / 2) as usize).saturating_sub(8192) / 4;
        if n < 100 {
            break;
        }
        writer.create(&mut stream, &format!("filler{k}"), n.min(SLICE), pb::Apply::Hogwild).await.unwrap();
        k += 1;
    }
    for _ in 0..4 {
        stalled.send(pull(reader.route(), slice)).await;
    }
    until("two copies wait for the reader", || counter(&server, "memory_copies") == 2 * BYTES).await;
    let refused = stream.refusal(pull(writer.route(), slice)).await;
    assert_full(&refused);
    assert_eq!(refused.tensor.as_deref(), Some("w"));
    check_sum(&server);
    for _ in 0..4 {
        let answer = stalled.answer().await.unwrap();
        assert!(matches!(answer, Some(Answer::Values { .. })));
    }
    until("copies are returned", || counter(&server, "memory_copies") == 0).await;
    assert!(matches!(stream.ask(pull(writer.route(), slice)).await, Answer::Values { .. }));
}

/// Holds every gradient until released.
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
async fn a_held_push_that_does_not_fit_is_refused() {
    let holding = Arc::new(Holding::default());
    let policy: Arc<dyn Policy> = holding.clone();
    let server = start(|config| config.policy = Some(policy));
    let mut writer = Peer::connect(&server, 1).await;
    let mut stream = writer.exchange().await.unwrap();
    let slice = writer.create(&mut stream, "w", SLICE, pb::Apply::Exact).await.unwrap();
    let route = writer.route();
    // After the first ones the connection has the memory for its whole window.
    let first = 6;
    for n in 0..first {
        stream.send(push(route, slice, 2 + n, SLICE)).await;
    }
    until("the first are held", || holding.0.lock().unwrap().len() as u64 == first).await;
    let each = counter(&server, "memory_held") / first;
    let fit = first + (LIMIT - counter(&server, "memory_used") - OWED_BYTES) / each;
    for n in first..fit {
        stream.send(push(route, slice, 2 + n, SLICE)).await;
    }
    until("all are held", || holding.0.lock().unwrap().len() as u64 == fit).await;
    assert!(counter(&server, "memory_held") > fit * BYTES);
    assert_full(&stream.refusal(push(route, slice, 1000, SLICE)).await);
    check_sum(&server);
    let held = std::mem::take(&mut *holding.0.lock().unwrap());
    std::thread::spawn(|| held.into_iter().for_each(Held::release)).join().unwrap();
    for _ in 0..fit {
        assert!(matches!(stream.answer().await.unwrap(), Some(Answer::Receipt(_))));
    }
    assert_eq!(counter(&server, "memory_held"), 0);
    stream.send(push(route, slice, 1000, SLICE)).await;
    until("it is held now", || holding.0.lock().unwrap().len() == 1).await;
    holding.0.lock().unwrap().drain(..).for_each(Held::release);
    assert!(matches!(stream.answer().await.unwrap(), Some(Answer::Receipt(a)) if !a.duplicate));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn all_is_given_back_when_the_clients_have_left() {
    // Long enough for a hundred hellos and pushes: none renews its lease.
    let server = start(|config| config.lease = Duration::from_secs(10));
    assert_eq!(counter(&server, "memory_used"), 0);
    let mut owner = Peer::connect(&server, 1).await;
    let mut stream = owner.exchange().await.unwrap();
    let slice = owner.create(&mut stream, "w", 1000, pb::Apply::Exact).await.unwrap();
    let one = counter(&server, "memory_identities");
    // Many clients over one stream, each with an entry in the slice and a session.
    for client in 2..102 {
        owner.control.hello(timed(hello(client))).await.unwrap();
        let answer = stream.ask(push(Route { client, ..owner.route() }, slice, 1, 1000)).await;
        assert!(matches!(answer, Answer::Receipt(_)), "{answer:?}");
    }
    assert!(counter(&server, "memory_identities") >= 100 * one);
    check_sum(&server);
    let answer = stream.ask(pull(Route { client: 50, ..owner.route() }, slice)).await;
    assert!(matches!(answer, Answer::Values { version: 101, .. }));
    assert!(counter(&server, "memory_answers") >= 4000 && counter(&server, "memory_connections") > 0);
    let kept = counter(&server, "memory_slices") + counter(&server, "memory_map");
    drop((owner, stream));
    // Memory that remembers an ended session.
    let ended = 101 * 128;
    until("only the slices are left", || counter(&server, "memory_used") == kept + ended).await;
    assert_eq!(counter(&server, "memory_identities"), ended);
    assert_eq!((counter(&server, "identity_entries"), counter(&server, "sessions")), (0, 0));
    check_sum(&server);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn connections_and_streams_without_room_are_refused() {
    let server = start(|config| config.memory_limit = Some(12 << 20));
    let mut peers = Vec::new();
    let refused = loop {
        match Peer::try_connect(&server, 1 + peers.len() as u64).await {
            Ok(peer) => peers.push(peer),
            Err(status) => break status,
        }
        check_sum(&server);
        assert!(peers.len() < 1000, "connections are not bounded");
    };
    assert!(peers.len() >= 2);
    assert_eq!(refused.code(), Code::ResourceExhausted, "{refused:?}");
    assert!(format!("{refused:?}").contains("memory is full"), "{refused:?}");
    assert!(counter(&server, "connections_refused") > 0);
    // A native client reports the error at once.
    let addresses = server.addresses().to_vec();
    let options = ConnectOptions { timeout: PATIENT, ..ConnectOptions::default() };
    let begin = Instant::now();
    let error = tokio::task::spawn_blocking(move || Client::connect(&addresses, options)).await.unwrap();
    let error = error.unwrap_err();
    assert_eq!(error.kind, Kind::Capacity, "{error}");
    assert!(error.to_string().contains("memory is full") && begin.elapsed() < PATIENT / 2, "{error}");
    // So does one whose first connection fits, but not its stream of frames.
    drop(peers.pop());
    until("room for one connection", || counter(&server, "connections") == peers.len() as u64).await;
    let addresses = server.addresses().to_vec();
    let options = ConnectOptions { timeout: PATIENT, ..ConnectOptions::default() };
    let begin = Instant::now();
    let error = tokio::task::spawn_blocking(move || Client::connect(&addresses, options)).await.unwrap();
    let error = error.unwrap_err();
    assert_eq!(error.kind, Kind::Capacity, "{error}");
    assert!(error.to_string().contains("memory is full") && begin.elapsed() < PATIENT / 2, "{error}");
    // Existing connections still work, and a stream that does not fit is refused like any call.
    let status = peers[0].exchange().await.err().unwrap();
    assert_full(&convert::error_from_status(&status));
    peers[0].control.stats(timed(pb::StatsRequest::default())).await.unwrap();
    peers.truncate(1);
    until("memory comes back", || counter(&server, "connections") == 1).await;
    peers[0].exchange().await.unwrap();
    Peer::connect(&server, 100).await;
}
