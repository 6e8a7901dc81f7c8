//! Programs on vectors at a server whose log is full.

use super::*;
use crate::answers::{AnswerSlot, Owed, StreamState};
use crate::auth::peer::Peer;
use crate::cluster::reservation::Reserve;
use crate::data::Exchange;
use bytes::Bytes;
use fastps_core::optim::{Optimizer, Sgd};
use fastps_core::program::{Command, Op, Program};
use fastps_core::slice::Slice;
use fastps_core::spaces::{Claimant, SeatKey, SeatRequest, SpaceSpec, SpaceStanding};
use fastps_core::tensor::{SliceId, Space, SpaceId, TensorSpec};
use fastps_durable::{Event, Journal};
use fastps_proto::v1 as pb;
use fastps_transport::Medium;
use fastps_transport::convert;
use fastps_transport::convert::header::Target;
use fastps_transport::convert::{Request, Verb};
use fastps_transport::memory_budget::MemoryBudget;
use std::sync::mpsc;
use tokio::sync::mpsc::channel;
use tokio::time::timeout;
use tonic::metadata::MetadataMap;

const ID: SliceId = SliceId(3);
const SPACE: SpaceId = SpaceId(9);

/// A registered slice over which a space is open, whose coordinator shows no secret.
fn slice(node: &Node) -> Arc<Slice> {
    let spec = TensorSpec::new("w", [4], Optimizer::Sgd(Sgd::default()));
    let now = Instant::now();
    let (spec, slices) = (Arc::new(spec), vec![(ID, 0)]);
    let wish = Reserve { reservation: 7, client: 1, spec, group: 1, budget: None, slices };
    assert!(node.reservations.reserve(&node.shard, &wish, now).unwrap());
    node.reservations.arrived(ID, 7);
    node.reservations.seal(7, now).unwrap();
    let slice = node.shard.slice(ID).unwrap();
    let space = Arc::new(Space { id: SPACE, name: "mine".into(), vectors: vec!["g".into()] });
    slice.open_space(&space).unwrap();
    let spec = SpaceSpec { space, tensors: vec!["w".into()], keep_for_ms: 60_000 };
    let mut spaces = node.spaces().unwrap();
    spaces.restore(spec, SpaceStanding { opener: 1, ..SpaceStanding::default() }).unwrap();
    let take = SeatRequest::Take { at_least: 0, name: "test".into() };
    let seat = spaces.coordinate(Claimant { client: 1, key: SeatKey::default() }, SPACE, &take).unwrap();
    assert_eq!(seat.term, 1);
    slice
}

/// Keeps the log from being written until the sender is dropped, and fills its queue.
fn fill(journal: &Journal) -> mpsc::Sender<()> {
    let ((hold, held), (begin, begun)) = (mpsc::channel::<()>(), mpsc::channel::<()>());
    let nothing = |bytes| Event::Removed("-".repeat(bytes).into());
    journal.when_durable(journal.note(&nothing(1)), move || {
        begin.send(()).unwrap();
        held.recv().unwrap_or_default();
    });
    begun.recv().unwrap(); // a batch that is still being written would leave the queue after it was filled
    while !journal.is_full() {
        journal.note(&nothing(1 << 20));
    }
    hold
}

#[tokio::test]
async fn a_program_waits_for_room_in_the_log_before_each_of_its_slices() {
    let folder = std::env::temp_dir().join(format!("fastps program {}", std::process::id()));
    let server = Server::start(&ServerConfig {
        listen: vec!["127.0.0.1:0".into()],
        memory_limit: Some(64 << 20),
        data_dir: Some(folder.clone()),
        snapshot_after: 0,
        ..ServerConfig::default()
    })
    .unwrap();
    let node = server.nodes[0].clone();
    let slice = slice(&node);
    let hold = fill(node.files.journal().unwrap());

    let budget = MemoryBudget::take(node.shard.meter(), node.reservations.room, 0, 0).unwrap();
    let shared = StreamState::new(node.shard.meter(), &budget, false).unwrap();
    let (answers, mut queue) = channel(1);
    let slot = AnswerSlot::new(answers.reserve_owned().await.unwrap(), &budget);
    let peer = Peer::new(budget, None, (Medium::Tcp, None));
    let stream = Exchange::open(&node, peer, shared, &MetadataMap::new()).unwrap();
    let command = Command { space: SPACE, term: 1, number: 1 };
    let header = convert::run_header(Target { slice: SliceId(0), group: 1, epoch: 1 }, command, &[ID]);
    let payload: Bytes =
        convert::program_to_wire(&Program::new(vec![Op::Zero { to: 1 }, Op::MaxAbs { x: 1 }]).unwrap());
    let frame = pb::Frame { header: Some(pb::Header { tag: 5, client: 1, ..header }), payload };
    let Request { tag, route, verb: Verb::Run(run), .. } = convert::request_from_frame(&frame).unwrap()
    else {
        panic!("no program");
    };
    let mut running = std::pin::pin!(stream.run_program(tag, route, run, slot));
    assert!(timeout(Duration::from_millis(100), &mut running).await.is_err());
    assert_eq!(slice.space().unwrap().1.number, 0);
    drop(hold);
    timeout(Duration::from_mins(1), running).await.unwrap();
    assert!(matches!(queue.recv().await.unwrap().what, Ok(Owed::Frame(_))));
    assert_eq!(slice.space().unwrap().1.results, [0.0]);
    drop(server);
    std::fs::remove_dir_all(folder).unwrap();
}
