//! What a slice remembers of its clients' pushes, against a model: answers are lost, frames repeated and
//! reordered, acknowledgements lost and late, and the shard restarts from its records.

use fastps_core::codec::CodecId;
use fastps_core::error::{Kind, Result};
use fastps_core::frame::{Action, Applied, Identity, Push};
use fastps_core::identity::{IDENTITY_BYTES, Settled, WINDOW};
use fastps_core::isa::Isa;
use fastps_core::optim::{Optimizer, Sgd};
use fastps_core::record::{Identities, Record, Sink};
use fastps_core::shard::{Purpose, Shard, ShardConfig};
use fastps_core::slice::{Resolved, Standing};
use fastps_core::tensor::{Apply, SliceId, TensorSpec};
use proptest::collection::vec;
use proptest::prelude::*;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex, mpsc};

const SLICE: SliceId = SliceId(5);
const CLIENTS: u64 = 3;
/// As many unanswered pushes as a client may have.
const UNANSWERED: usize = WINDOW / 2;

fn shard(limit: u64, sink: Option<Arc<Log>>) -> Shard {
    let sink = sink.map(|log| log as Arc<dyn Sink>);
    let shard = Shard::new(ShardConfig { sink, ..ShardConfig::new(0, limit, Isa::best()) });
    let optimizer = Optimizer::Sgd(Sgd { lr: 1.0, ..Sgd::default() });
    let spec = TensorSpec::new("w", [1], optimizer);
    shard.create(&Arc::new(spec), 0, &[(SLICE, 0)]).unwrap();
    shard
}

fn body() -> [u8; 4] {
    (-1.0_f32).to_le_bytes()
}

fn push(shard: &Shard, identity: Identity, acknowledged: u64) -> Result<Applied> {
    let (done, answer) = mpsc::channel();
    let body = body();
    let push = Push { acknowledged, ..Push::gradient(SLICE, identity, 1, CodecId::Float32, &body) };
    shard.push(&push, move |result| done.send(result).unwrap());
    answer.recv().unwrap()
}

#[derive(Clone, Copy, Debug)]
enum Entry {
    Push { version: u64, identity: Identity, acknowledged: u64 },
    Fence(Identity),
}

/// The records of changes, in order.
#[derive(Debug, Default)]
struct Log(Mutex<Vec<Entry>>);

impl Sink for Log {
    fn record(&self, record: &Record<'_>) {
        let Record { version, identity, acknowledged, .. } = *record;
        self.0.lock().unwrap().push(Entry::Push { version, identity, acknowledged });
    }

    fn fenced(&self, _slice: SliceId, identity: Identity) {
        self.0.lock().unwrap().push(Entry::Fence(identity));
    }
}

/// One event; `which` selects among what there is.
#[derive(Clone, Copy, Debug)]
enum Event {
    /// A client sends its next push.
    Send { client: u64 },
    /// A frame arrives, or a copy of it; the answer may be lost.
    Arrive { which: usize, stays: bool, answered: bool },
    /// A client asks for the outcome of its oldest unanswered push.
    Ask { client: u64, answered: bool },
    /// The shard starts again from an image taken after so many of its records.
    Restart { which: usize },
}

fn event() -> impl Strategy<Value = Event> {
    let client = || 1..=CLIENTS;
    prop_oneof![
        4 => client().prop_map(|client| Event::Send { client }),
        6 => (any::<usize>(), prop::bool::weighted(0.2), prop::bool::weighted(0.8))
            .prop_map(|(which, stays, answered)| Event::Arrive { which, stays, answered }),
        2 => (client(), any::<bool>()).prop_map(|(client, answered)| Event::Ask { client, answered }),
        1 => any::<usize>().prop_map(|which| Event::Restart { which }),
    ]
}

/// What a client knows, and what the slice must remember of it.
#[derive(Debug, Default)]
struct Client {
    last: u64,
    unanswered: BTreeSet<u64>,
    /// Sequences in the order in which the slice learned their outcome, the acknowledged left out.
    window: Vec<u64>,
    acknowledged: u64,
}

impl Client {
    fn note(&mut self, sequence: u64) {
        self.window.push(sequence);
        if self.window.len() > WINDOW {
            self.window.remove(0);
        }
    }

    fn acknowledge(&mut self, sequence: u64) {
        self.acknowledged = self.acknowledged.max(sequence);
        self.window.retain(|noted| *noted > sequence);
    }
}

struct World {
    shard: Shard,
    log: Arc<Log>,
    clients: BTreeMap<u64, Client>,
    /// Frames on their way: identity and acknowledgement.
    frames: Vec<(Identity, u64)>,
    /// The version of each applied push.
    applied: BTreeMap<(u64, u64), u64>,
    fenced: BTreeSet<(u64, u64)>,
}

impl World {
    fn new() -> Self {
        let log = Arc::new(Log::default());
        Self {
            shard: shard(u64::MAX, Some(log.clone())),
            log,
            clients: (1..=CLIENTS).map(|client| (client, Client::default())).collect(),
            frames: Vec::new(),
            applied: BTreeMap::new(),
            fenced: BTreeSet::new(),
        }
    }

    fn client(&mut self, client: u64) -> &mut Client {
        self.clients.get_mut(&client).unwrap()
    }

    fn send(&mut self, client: u64) {
        let sender = self.client(client);
        if sender.unanswered.len() >= UNANSWERED {
            return;
        }
        sender.last += 1;
        let sequence = sender.last;
        sender.unanswered.insert(sequence);
        // The third client is of an earlier version.
        let oldest = sender.unanswered.first().unwrap();
        let acknowledged = if client == CLIENTS { 0 } else { oldest - 1 };
        self.frames.push((Identity { client, sequence }, acknowledged));
    }

    fn arrive(&mut self, which: usize, stays: bool, answered: bool) {
        if self.frames.is_empty() {
            return;
        }
        let at = which % self.frames.len();
        let (identity, acknowledged) = self.frames[at];
        if !stays {
            self.frames.remove(at);
        }
        let Identity { client, sequence } = identity;
        let (id, before) = ((client, sequence), self.applied.len() as u64);
        let sender = self.client(client);
        sender.acknowledge(acknowledged);
        let (remembered, forgotten) = (sender.window.contains(&sequence), sequence <= sender.acknowledged);
        match push(&self.shard, identity, acknowledged) {
            Ok(Applied { version, duplicate: true, .. }) => assert_eq!(self.applied.get(&id), Some(&version)),
            Ok(Applied { version, .. }) => {
                assert!(!forgotten || !self.applied.contains_key(&id), "{identity:?} was acknowledged");
                assert!(self.applied.insert(id, version).is_none(), "{identity:?} was applied twice");
                assert!(!self.fenced.contains(&id), "{identity:?} was fenced");
                assert_eq!(version, before + 1);
                self.client(client).note(sequence);
            }
            Err(error) if error.kind == Kind::Fenced => assert!(self.fenced.contains(&id)),
            Err(error) => {
                assert_eq!(error.kind, Kind::UnknownOutcome, "{error}");
                assert!(!remembered, "{identity:?} must be remembered");
            }
        }
        if answered {
            self.client(client).unanswered.remove(&sequence);
        }
    }

    fn ask(&mut self, client: u64, answered: bool) {
        let Some(sequence) = self.client(client).unanswered.first().copied() else { return };
        let id = (client, sequence);
        match self.shard.resolve(SLICE, Identity { client, sequence }).unwrap() {
            Resolved::Applied(Settled { version, .. }) => assert_eq!(self.applied.get(&id), Some(&version)),
            Resolved::Fenced => {
                assert!(!self.applied.contains_key(&id), "{id:?} was applied");
                if self.fenced.insert(id) {
                    self.client(client).note(sequence);
                }
            }
            // Only more than a window of newer pushes can do this, since it was not acknowledged.
            Resolved::Unknown => assert!(!self.client(client).window.contains(&sequence), "{id:?}"),
        }
        if answered {
            self.client(client).unanswered.remove(&sequence);
        }
    }

    /// Starts again: the first records make an image, and the others are replayed on it.
    fn restart(&mut self, which: usize) {
        let entries = self.log.0.lock().unwrap().clone();
        let before = replayed(&entries[..which % (entries.len() + 1)], None);
        let image = before.slice(SLICE).unwrap().image().unwrap();
        let restored = (&image.standing, image.values.as_ref());
        let log = Arc::new(Log(Mutex::new(entries.clone())));
        self.shard = replayed(&entries, Some((restored, log.clone())));
        self.log = log;
    }

    fn check(&self) {
        let snapshot = self.shard.pull(0, SLICE).unwrap();
        assert_eq!(snapshot.version, self.applied.len() as u64);
        assert_eq!(snapshot.as_ref(), (self.applied.len() as f32).to_le_bytes());
    }
}

/// An image of the slice, and the log that it was taken from.
type Image<'a> = ((&'a Standing, &'a [u8]), Arc<Log>);

/// A shard that has repeated these records on an image.
fn replayed(entries: &[Entry], from: Option<Image<'_>>) -> Shard {
    let shard = shard(u64::MAX, from.as_ref().map(|(_, log)| log.clone()));
    let (slice, body) = (shard.slice(SLICE).unwrap(), body());
    if let Some(((standing, values), _)) = from {
        slice.restore(standing, values, &[]).unwrap();
    }
    for entry in entries {
        match *entry {
            Entry::Push { version, identity, acknowledged } => {
                let record = Record {
                    slice: SLICE,
                    apply: Apply::Exact,
                    version,
                    identity,
                    base: None,
                    once: false,
                    acknowledged,
                    action: Action::Gradient,
                    indices: None,
                    codec: CodecId::Float32,
                    body: &body,
                    lr: 1.0,
                    scale: 1.0,
                    momentum: 0.0,
                    beta1: None,
                    shared_by: Identities::default(),
                    note: "",
                };
                slice.replay(&record).unwrap();
            }
            Entry::Fence(identity) => slice.replay_fence(identity).unwrap(),
        }
    }
    shard
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 2_000, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn a_push_is_applied_once_and_its_outcome_known_until_it_is_acknowledged(events in vec(event(), 0..200)) {
        let mut world = World::new();
        for event in events {
            match event {
                Event::Send { client } => world.send(client),
                Event::Arrive { which, stays, answered } => world.arrive(which, stays, answered),
                Event::Ask { client, answered } => world.ask(client, answered),
                Event::Restart { which } => world.restart(which),
            }
            world.check();
        }
    }
}

/// The bytes that a shard remembers outcomes in.
fn outcomes(shard: &Shard) -> u64 {
    shard.meter().used_for(Purpose::Outcomes)
}

#[test]
fn a_client_that_acknowledges_takes_what_its_unanswered_pushes_need() {
    let shard = shard(u64::MAX, None);
    for client in 1..=100 {
        // Waits for each answer, then has several under way, then waits again.
        for sequence in 1..=200 {
            let behind = if (50..150).contains(&sequence) { 20.min(sequence - 49) } else { 1 };
            push(&shard, Identity { client, sequence }, sequence - behind).unwrap();
            assert!(outcomes(&shard) <= client * IDENTITY_BYTES + WINDOW as u64 * 50, "at {sequence}");
        }
        assert!(outcomes(&shard) <= client * IDENTITY_BYTES, "{client} clients take {}", outcomes(&shard));
    }
    (1..=100).for_each(|client| shard.forget_client(client));
    assert_eq!(outcomes(&shard), 0);
}

#[test]
fn a_repeat_of_what_was_acknowledged_is_refused_as_forgotten_on_every_slice() {
    let shard = shard(u64::MAX, None);
    let id = |sequence| Identity { client: 7, sequence };
    // The slice meets the client with its fifth push.
    assert_eq!(push(&shard, id(5), 4).unwrap().version, 1);
    for acknowledged in [0, 4] {
        for sequence in 1..=4 {
            let refused = push(&shard, id(sequence), acknowledged.min(sequence - 1)).unwrap_err();
            assert_eq!((refused.kind, refused.tensor.as_deref()), (Kind::UnknownOutcome, Some("w")));
        }
    }
    assert!(push(&shard, id(5), 0).unwrap().duplicate);
    // A late frame with an earlier acknowledgement takes nothing back.
    assert_eq!(push(&shard, id(7), 6).unwrap().version, 2);
    assert_eq!(push(&shard, id(8), 2).unwrap().version, 3);
    assert_eq!(push(&shard, id(6), 2).unwrap_err().kind, Kind::UnknownOutcome);
    assert_eq!(shard.resolve(SLICE, id(6)), Ok(Resolved::Unknown));
    assert!(matches!(shard.resolve(SLICE, id(8)), Ok(Resolved::Applied(Settled { version: 3, .. }))));
    // Another client's pushes stay as they were.
    assert_eq!(push(&shard, Identity { client: 8, sequence: 1 }, 0).unwrap().version, 4);
    assert!(push(&shard, Identity { client: 8, sequence: 1 }, 0).unwrap().duplicate);
}

#[test]
fn a_push_without_memory_for_its_outcome_is_refused_and_changes_nothing() {
    // Room for one client that acknowledges.
    let empty = shard(u64::MAX, None).meter().used();
    let shard = shard(empty + IDENTITY_BYTES, None);
    let id = |sequence| Identity { client: 7, sequence };
    assert_eq!(push(&shard, id(1), 0).unwrap().version, 1);
    assert_eq!(push(&shard, id(2), 0).unwrap().version, 2);
    let refused = push(&shard, id(3), 0).unwrap_err();
    assert_eq!((refused.kind, refused.tensor.as_deref()), (Kind::Capacity, Some("w")));
    assert_eq!(shard.pull(7, SLICE).unwrap().version, 2);
    assert!(push(&shard, id(1), 0).unwrap().duplicate);
    assert_eq!(shard.resolve(SLICE, id(3)).unwrap_err().kind, Kind::Capacity);
    for sequence in 3..100 {
        assert_eq!(push(&shard, id(sequence), sequence - 1).unwrap().version, sequence);
    }
}

#[test]
fn memory_for_outcomes_is_taken_by_nothing_else() {
    let shard = shard(1 << 20, None);
    let meter = shard.meter();
    meter.keep_for_outcomes(10 * IDENTITY_BYTES);
    let free = meter.limit() - meter.used();
    let full = meter.take(Purpose::Copies, free).unwrap_err();
    assert_eq!(full.kind, Kind::Capacity);
    let _rest = meter.take(Purpose::Copies, free - 10 * IDENTITY_BYTES).unwrap();
    assert!(meter.take(Purpose::Connections, 1).is_err());
    for client in 1..=10 {
        push(&shard, Identity { client, sequence: 1 }, 0).unwrap();
        push(&shard, Identity { client, sequence: 2 }, 0).unwrap();
    }
    assert_eq!(push(&shard, Identity { client: 11, sequence: 1 }, 0).unwrap_err().kind, Kind::Capacity);
}
