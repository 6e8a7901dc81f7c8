//! Vectors of a space: programs against plain arithmetic, numbers and terms, sums of portions, and what stays
//! unchanged when something is refused.

use fastps_core::batch::{BatchTask, FailureKind};
use fastps_core::codec::CodecId;
use fastps_core::dtype::View;
use fastps_core::error::{Kind, Result};
use fastps_core::frame::{Action, Identity, Push};
use fastps_core::isa::Isa;
use fastps_core::optim::{Optimizer, Sgd};
use fastps_core::portions::Then;
use fastps_core::program::{Command, Op, Program, TENSOR};
use fastps_core::record::{ProgramRecord, Record, Sink, SumRecord};
use fastps_core::shard::{Purpose, Shard, ShardConfig};
use fastps_core::slice::Slice;
use fastps_core::spaces::{PortionReport, ReplicaRequest, SeatRequest};
use fastps_core::store::{Store, StoreOptions};
use fastps_core::tensor::{Apply, SliceId, Space, SpaceId, TensorSpec};
use fastps_core::verbs::prelude::*;
use fastps_core::verbs::{Gradient, PushError, PushOptions, VectorPull};
use proptest::prelude::*;
use std::hash::{Hash, Hasher};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

const SECOND: Duration = Duration::from_secs(1);
const PATIENT: Duration = Duration::from_mins(1);
const ID: SliceId = SliceId(3);
/// Not a multiple of a block or of the lanes.
const LEN: usize = 2 * 1024 + 37;

/// Input of a sink, as owned values.
#[derive(Clone)]
enum Entry {
    Program(u64, Command, Program, Option<(Vec<u8>, f64)>),
    Opened(Space),
    Closed(SpaceId),
}

#[derive(Default)]
struct Log(Mutex<Vec<Entry>>);

impl std::fmt::Debug for Log {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Log")
    }
}

impl Sink for Log {
    fn record(&self, _record: &Record<'_>) {}

    fn program(&self, record: &ProgramRecord<'_>) {
        let ProgramRecord { slice, version, command, program, sum } = *record;
        assert_eq!(slice, ID);
        let sum = sum.map(|sum| (sum.values.to_vec(), sum.largest));
        self.0.lock().unwrap().push(Entry::Program(version, command, program.clone(), sum));
    }

    fn space_opened(&self, slice: SliceId, space: &Space) {
        assert_eq!(slice, ID);
        self.0.lock().unwrap().push(Entry::Opened(space.clone()));
    }

    fn space_closed(&self, _slice: SliceId, space: SpaceId) {
        self.0.lock().unwrap().push(Entry::Closed(space));
    }
}

fn spec(name: &str, n: usize, apply: Apply) -> TensorSpec {
    let optimizer = Optimizer::Sgd(Sgd { lr: 1.0, momentum: 0.5, ..Sgd::default() });
    TensorSpec { apply, ..TensorSpec::new(name, [n as u64], optimizer) }
}

/// A shard with one slice, and a space of two vectors over it.
struct At {
    shard: Shard,
    slice: Arc<Slice>,
    space: Arc<Space>,
    log: Arc<Log>,
    number: u64,
}

fn at(isa: Isa, memory: u64) -> At {
    let log = Arc::new(Log::default());
    let sink = Some(log.clone() as Arc<dyn Sink>);
    let shard = Shard::new(ShardConfig { sink, ..ShardConfig::new(0, memory, isa) });
    shard.create(&Arc::new(spec("w", LEN, Apply::Exact)), 1, &[(ID, 0)]).unwrap();
    let slice = shard.slice(ID).unwrap();
    let space = Space { id: SpaceId(9), name: "mine".into(), vectors: vec!["g".into(), "p".into()] };
    At { shard, slice, space: Arc::new(space), log, number: 0 }
}

impl At {
    fn open(mut self) -> Self {
        self.slice.open_space(&self.space).unwrap();
        self.number = 0;
        self
    }

    fn command(&self, term: u64, number: u64) -> Command {
        Command { space: self.space.id, term, number }
    }

    fn run(&mut self, ops: Vec<Op>) -> Result<Vec<f64>> {
        self.number += 1;
        self.slice.run_program(self.command(1, self.number), &Program::new(ops)?)
    }

    fn begin(&mut self, batch: u64, portions: u32) {
        self.run(vec![Op::BeginSum { batch, portions, largest: 0.0, coarser: 0 }]).unwrap();
    }

    fn add(&self, batch: u64, portion: u32, values: &[f32]) -> Result<bool> {
        self.slice.push_portion(self.space.id, batch, portion, bytemuck::cast_slice(values))
    }

    fn vector(&self, index: u32) -> Vec<f32> {
        let pulled = self.slice.pull_vector(1, self.space.id, index, None).unwrap();
        bytemuck::cast_slice(pulled.as_ref()).to_vec()
    }

    /// The bits of tensor and vectors (as a number, since they are long), and what else the slice knows.
    fn all(&self) -> (u64, String) {
        let mut hasher = std::hash::DefaultHasher::new();
        (0..3).for_each(|k| bytemuck::cast_slice::<f32, u32>(&self.vector(k)).hash(&mut hasher));
        let standing = self.slice.space().map(|(_, standing)| standing);
        (hasher.finish(), format!("{standing:?} {:?}", self.slice.version(1)))
    }

    /// Puts values into a vector by way of a sum, which is exact for them.
    fn put(&mut self, to: u32, values: &[f32]) {
        let batch = self.slice.space().unwrap().1.batch + 1;
        let largest = values.iter().fold(1e-30, |most: f32, x| most.max(x.abs()));
        let coarser = if largest > 1e9 { 6 } else { 0 };
        let begin = Op::BeginSum { batch, portions: 1, largest: largest.into(), coarser };
        self.run(vec![begin]).unwrap();
        assert!(self.add(batch, 0, values).unwrap());
        self.run(vec![Op::EndSum { to }]).unwrap();
        assert_eq!(self.vector(to), values);
    }
}

fn here() -> At {
    at(Isa::get().unwrap(), 1 << 30)
}

fn values(seed: usize) -> Vec<f32> {
    (0..LEN).map(|i| ((i * 7919 + seed * 104_729) % 4093) as f32 * 0.37 - 757.0).collect()
}

fn push(action: Action, sequence: u64, body: &[f32]) -> Push<'_> {
    Push {
        action,
        ..Push::gradient(
            ID,
            Identity { client: 5, sequence },
            body.len() as u64,
            CodecId::Float32,
            bytemuck::cast_slice(body),
        )
    }
}

fn push_now(at: &At, action: Action, sequence: u64, body: &[f32]) -> Result<()> {
    let (done, logged) = std::sync::mpsc::channel();
    at.shard.push(&push(action, sequence, body), move |result| done.send(result.map(|_| ())).unwrap());
    logged.recv().unwrap()
}

fn op() -> impl Strategy<Value = Op> {
    let by = || -2.0..2.0_f64;
    let k = || 0..3_u32;
    prop_oneof![
        (k(), k()).prop_map(|(to, from)| Op::Copy { to, from }),
        k().prop_map(|to| Op::Zero { to }),
        (k(), by()).prop_map(|(to, by)| Op::Scale { to, by }),
        (k(), by(), k()).prop_map(|(to, by, x)| Op::Axpy { to, by, x }),
        (k(), prop::collection::vec((by(), k()), 0..7)).prop_map(|(to, terms)| Op::Combine { to, terms }),
        (k(), k(), k()).prop_map(|(to, x, y)| Op::Multiply { to, x, y }),
        (k(), k()).prop_map(|(x, y)| Op::Dot { x, y }),
        k().prop_map(|x| Op::MaxAbs { x }),
        (prop::collection::vec(k(), 1..4), prop::collection::vec(k(), 1..6))
            .prop_map(|(rows, columns)| Op::Block { rows, columns }),
    ]
}

/// The operation, element by element.
fn plain(vectors: &mut [Vec<f32>], op: &Op, results: &mut Vec<f64>) {
    let dot = |x: &[f32], y: &[f32]| {
        let mut lanes = [0.0_f64; 16];
        for (i, (x, y)) in x.iter().zip(y).enumerate() {
            lanes[i % 16] += f64::from(*x) * f64::from(*y);
        }
        for width in [8, 4, 2, 1] {
            (0..width).for_each(|lane| lanes[lane] += lanes[lane + width]);
        }
        lanes[0]
    };
    let combined = |terms: &[(f64, u32)], vectors: &[Vec<f32>]| -> Vec<f32> {
        let value = |i: usize, k: u32| f64::from(vectors[k as usize][i]);
        let sum = |i: usize| match terms {
            [] => 0.0,
            [(by, x), rest @ ..] => {
                rest.iter().fold(by * value(i, *x), |sum, (by, x)| by.mul_add(value(i, *x), sum))
            }
        };
        (0..LEN).map(|i| sum(i) as f32).collect()
    };
    match op {
        Op::Copy { to, from } => {
            let from = vectors[*from as usize].clone();
            vectors[*to as usize] = from;
        }
        Op::Zero { to } => vectors[*to as usize].fill(0.0),
        Op::Scale { to, by } => vectors[*to as usize] = combined(&[(*by, *to)], vectors),
        Op::Axpy { to, by, x } => vectors[*to as usize] = combined(&[(1.0, *to), (*by, *x)], vectors),
        Op::Combine { to, terms } => vectors[*to as usize] = combined(terms, vectors),
        Op::Multiply { to, x, y } => {
            let product = |i: usize| vectors[*x as usize][i] * vectors[*y as usize][i];
            vectors[*to as usize] = (0..LEN).map(product).collect();
        }
        Op::Dot { x, y } => results.push(dot(&vectors[*x as usize], &vectors[*y as usize])),
        Op::MaxAbs { x } => {
            results.push(vectors[*x as usize].iter().fold(0.0, |most, x| most.max(f64::from(x.abs()))));
        }
        Op::Block { rows, columns } => {
            for row in rows {
                let product = |column: &u32| dot(&vectors[*row as usize], &vectors[*column as usize]);
                results.extend(columns.iter().map(product));
            }
        }
        Op::BeginSum { .. } | Op::EndSum { .. } => unreachable!(),
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    #[test]
    fn programs_do_what_their_operations_say(programs in prop::collection::vec(prop::collection::vec(op(), 0..12), 1..5)) {
        let mut all: Vec<_> =
            Isa::ALL.into_iter().filter(|isa| isa.is_available()).map(|isa| at(isa, 1 << 30).open()).collect();
        let mut expected = vec![vec![0.0; LEN], values(1), values(2)];
        for at in &mut all {
            at.put(1, &expected[1]);
            at.put(2, &expected[2]);
        }
        for ops in programs {
            let mut results = Vec::new();
            let mut after = expected.clone();
            for op in &ops {
                plain(&mut after, op, &mut results);
                prop_assume!(after.iter().flatten().all(|x| x.is_finite()));
            }
            prop_assume!(results.iter().all(|x| x.is_finite()));
            for at in &mut all {
                prop_assert_eq!(at.run(ops.clone()).unwrap(), results.clone());
                prop_assert!((0..3).all(|k| at.vector(k) == after[k as usize]));
            }
            expected = after;
        }
    }
}

#[test]
fn a_program_runs_once_and_answers_again() {
    let mut at = here().open();
    at.put(1, &values(1));
    let program = Program::new(vec![
        Op::Axpy { to: TENSOR, by: 1.0, x: 1 },
        Op::Dot { x: TENSOR, y: TENSOR },
        Op::MaxAbs { x: TENSOR },
    ])
    .unwrap();
    let number = at.number + 1;
    let results = at.slice.run_program(at.command(1, number), &program).unwrap();
    let (before, version) = (at.all(), at.slice.version(1));
    // The same number again, also of the next coordinator: the results are those that the slice remembers.
    let other = Program::new(vec![Op::Zero { to: TENSOR }]).unwrap();
    for (term, program) in [(1, &program), (1, &other), (2, &program)] {
        assert_eq!(at.slice.run_program(at.command(term, number), program).unwrap(), results);
        assert_eq!((at.all().0, at.slice.version(1)), (before.0, version));
    }
    // A smaller number, also of the present coordinator; a former coordinator, whatever it asks.
    let refused = at.slice.run_program(at.command(2, number - 1), &other).unwrap_err();
    assert_eq!((refused.kind, refused.tensor.as_deref()), (Kind::StalePush, Some("w")));
    let fenced = at.slice.run_program(at.command(1, number + 1), &other).unwrap_err();
    assert_eq!(fenced.kind, Kind::Fenced);
    assert_eq!(at.all().0, before.0);
    // A program that does not change the tensor makes no version.
    at.slice
        .run_program(at.command(2, number + 1), &Program::new(vec![Op::Zero { to: 1 }]).unwrap())
        .unwrap();
    assert_eq!(at.slice.version(1), version);
}

#[test]
fn what_is_refused_changes_nothing() {
    let mut at = here().open();
    at.put(1, &values(1));
    at.put(2, &vec![f32::MAX; LEN]);
    at.run(vec![Op::Copy { to: TENSOR, from: 1 }]).unwrap();
    let before = at.all();
    let pinned = at.slice.pull(1).unwrap();
    for ops in [
        // The tensor would be infinite, after other vectors and itself have changed.
        vec![
            Op::Zero { to: 1 },
            Op::Scale { to: TENSOR, by: 2.0 },
            Op::Combine { to: TENSOR, terms: vec![(3.0, 2)] },
            Op::Zero { to: 2 },
        ],
        // It would be infinite in between.
        vec![Op::Combine { to: TENSOR, terms: vec![(3.0, 2)] }, Op::Zero { to: TENSOR }],
        vec![Op::Scale { to: 2, by: 3.0 }, Op::Multiply { to: TENSOR, x: 2, y: 2 }],
    ] {
        let error = at.run(ops).unwrap_err();
        assert_eq!((error.kind, error.tensor.as_deref()), (Kind::NonFinite, Some("w")));
        at.number -= 1;
        assert_eq!(at.all(), before);
    }
    for ops in [
        vec![Op::Zero { to: 1 }, Op::Zero { to: 3 }],
        vec![Op::Zero { to: 1 }, Op::Dot { x: 0, y: 7 }],
        vec![Op::Zero { to: 1 }, Op::Scale { to: 1, by: f64::NAN }],
    ] {
        assert_eq!(at.run(ops).unwrap_err().kind, Kind::Config);
        at.number -= 1;
        assert_eq!(at.all(), before);
    }
    // An image could not have such a count, and counts after it would overflow.
    let endless = Op::BeginSum { batch: (1 << 62) + 1, portions: 1, largest: 1.0, coarser: 0 };
    assert_eq!(at.run(vec![endless]).unwrap_err().kind, Kind::Config);
    at.number -= 1;
    for (term, number) in [(1, (1 << 62) + 1), ((1 << 62) + 1, at.number + 1), (u64::MAX, u64::MAX)] {
        let error =
            at.slice.run_program(at.command(term, number), &Program::new(vec![]).unwrap()).unwrap_err();
        assert_eq!((error.kind, error.tensor.as_deref()), (Kind::Config, Some("w")));
        assert_eq!(at.all(), before);
    }
    // A refused program of a large term leaves the space to those with smaller ones.
    let ops = Program::new(vec![Op::Copy { to: 99, from: 1 }]).unwrap();
    assert_eq!(at.slice.run_program(at.command(1 << 62, 1 << 62), &ops).unwrap_err().kind, Kind::Config);
    let no_sum = at.run(vec![Op::Zero { to: 1 }, Op::EndSum { to: 2 }]).unwrap_err();
    assert_eq!(no_sum.kind, Kind::Precondition);
    at.number -= 1;
    let foreign = Command { space: SpaceId(1), term: 1, number: 99 };
    let refused = at.slice.run_program(foreign, &Program::new(vec![]).unwrap()).unwrap_err();
    assert_eq!((refused.kind, at.all()), (Kind::Config, before));
    // A vector may become infinite; only the tensor may not.
    assert_eq!(at.run(vec![Op::Scale { to: 2, by: 3.0 }, Op::MaxAbs { x: 2 }]).unwrap(), [f64::INFINITY]);
    assert_eq!(pinned.as_ref(), bytemuck::cast_slice::<f32, u8>(&values(1)));
}

#[test]
fn an_open_space_refuses_other_changes_and_no_pulls() {
    let at = here();
    push_now(&at, Action::Gradient, 1, &values(1)).unwrap();
    let mut at = at.open();
    let before = at.slice.image().unwrap();
    let state = vec![0.5; LEN];
    for (action, sequence) in
        [(Action::Gradient, 2), (Action::Assign, 3), (Action::AssignState { step: 7 }, 4)]
    {
        let error = push_now(&at, action, sequence, &state).unwrap_err();
        assert_eq!((error.kind, error.tensor.as_deref()), (Kind::Precondition, Some("w")));
        assert!(error.message.contains("space \"mine\" is open"), "{error}");
    }
    // Earlier pushes are still known; the answer changes nothing.
    push_now(&at, Action::Gradient, 1, &values(1)).unwrap();
    let after = at.slice.image().unwrap();
    assert_eq!(
        (after.values.as_ref(), after.state.as_ref()),
        (before.values.as_ref(), before.state.as_ref())
    );
    assert_eq!(after.standing.version, before.standing.version);
    // A pull pins one version of the tensor and of a vector, whatever programs do meanwhile.
    let (pinned, vector) =
        (at.slice.pull(1).unwrap(), at.slice.pull_vector(1, at.space.id, 1, None).unwrap());
    at.run(vec![Op::Zero { to: TENSOR }, Op::Combine { to: 1, terms: vec![(1.0, 1), (1.0, 2)] }]).unwrap();
    at.run(vec![Op::Copy { to: 1, from: 0 }]).unwrap();
    assert_eq!(pinned.as_ref(), before.values.as_ref());
    assert_eq!(vector.as_ref(), vec![0; 4 * LEN]);
    // Another space over the tensor, or the same one with other vectors.
    let other = Space { id: SpaceId(10), name: "other".into(), ..(*at.space).clone() };
    let more = Space { vectors: vec!["g".into()], ..(*at.space).clone() };
    for space in [other, more] {
        let refused = at.slice.open_space(&Arc::new(space)).unwrap_err();
        assert_eq!(refused.kind, Kind::Precondition);
        assert!(refused.message.contains("\"mine\""));
    }
    assert!(!at.slice.close_space(SpaceId(10)) && at.slice.close_space(at.space.id));
    push_now(&at, Action::Gradient, 9, &values(1)).unwrap();
    assert_eq!(at.slice.pull_vector(1, at.space.id, 1, None).unwrap_err().kind, Kind::Config);
}

#[test]
fn memory_is_counted_refused_and_given_back() {
    let at = here();
    let vectors = |at: &At| at.shard.meter().used_for(Purpose::Vectors);
    let (used, one) = (at.shard.meter().used(), 4 * LEN as u64);
    let mut at = at.open();
    assert!(vectors(&at) >= 2 * one);
    let opened = vectors(&at);
    at.begin(1, 4);
    assert!(vectors(&at) >= opened + 16 * LEN as u64);
    let with_sum = vectors(&at);
    // The next sum takes the same memory.
    at.begin(2, 4);
    assert_eq!(vectors(&at), with_sum);
    let pinned = at.slice.pull_vector(1, at.space.id, 2, None).unwrap();
    assert!(at.slice.close_space(at.space.id));
    assert!(vectors(&at) >= one, "a reader still has a vector");
    drop(pinned);
    assert_eq!((vectors(&at), at.shard.meter().used()), (0, used));
    // No memory for the vectors, for a sum, for the copies of a commit.
    let small = self::at(Isa::get().unwrap(), used + one);
    let refused = small.slice.open_space(&small.space).unwrap_err();
    assert_eq!((refused.kind, refused.tensor.as_deref()), (Kind::Capacity, Some("w")));
    assert_eq!(small.shard.meter().used(), used);
    let mut tight = self::at(Isa::get().unwrap(), used + opened).open();
    tight.run(vec![]).unwrap();
    let before = tight.all();
    let sum = Op::BeginSum { batch: 1, portions: 1, largest: 0.0, coarser: 0 };
    for ops in [vec![Op::Zero { to: 1 }, sum], vec![Op::Zero { to: 1 }, Op::Zero { to: TENSOR }]] {
        assert_eq!(tight.run(ops).unwrap_err().kind, Kind::Capacity);
        tight.number -= 1;
        assert_eq!(tight.all(), before);
    }
    tight.run(vec![Op::Zero { to: TENSOR }]).unwrap();
}

#[test]
fn a_sum_has_the_same_bits_in_every_order_and_whoever_repeats_a_portion() {
    const PORTIONS: u32 = 40;
    let portions: Vec<Vec<f32>> = (0..PORTIONS)
        .map(|k| values(k as usize).iter().map(|x| x * 0.1_f32.powi(k as i32 % 9)).collect())
        .collect();
    let exact = |i: usize| -> f64 {
        // Multiples of 2^-60 below 2^40 add up exactly in 128 bits.
        let units = |x: f32| (f64::from(x) * (1_u64 << 60) as f64) as i128;
        portions.iter().map(|portion| units(portion[i])).sum::<i128>() as f64 / (1_u64 << 60) as f64
    };
    let mut seen: Option<Vec<u32>> = None;
    for (order, isa) in (0..4).flat_map(|order| Isa::ALL.map(|isa| (order, isa))) {
        if !isa.is_available() {
            continue;
        }
        let mut at = at(isa, 1 << 30).open();
        at.begin(1, 1);
        assert!(at.add(1, 0, &portions[0]).unwrap());
        at.run(vec![Op::EndSum { to: 1 }]).unwrap();
        at.begin(2, PORTIONS);
        for k in 0..PORTIONS {
            let portion = (k * [1, 3, 7, 39][order] + 5) % PORTIONS;
            let body = &portions[portion as usize];
            assert!(at.add(2, portion, body).unwrap());
            if k % 3 == 0 {
                // A copy, or the same one again; what it says no longer matters.
                assert!(!at.add(2, portion, &portions[0]).unwrap());
            }
            if k + 1 < PORTIONS {
                let error = at.run(vec![Op::EndSum { to: 1 }]).unwrap_err();
                assert_eq!(error.kind, Kind::Precondition);
                at.number -= 1;
            }
        }
        at.run(vec![Op::EndSum { to: 2 }]).unwrap();
        let sum = at.vector(2);
        for (i, x) in sum.iter().enumerate() {
            assert_eq!(*x, exact(i) as f32, "{i}");
        }
        let bits: Vec<_> = sum.iter().map(|x| x.to_bits()).collect();
        assert_eq!(seen.get_or_insert_with(|| bits.clone()), &bits);
    }
}

#[test]
fn portions_that_do_not_belong_are_refused() {
    let mut at = here().open();
    let body = vec![1.0_f32; LEN];
    let kind = |result: Result<bool>| result.unwrap_err().kind;
    assert_eq!(kind(at.add(1, 0, &body)), Kind::StalePush);
    at.begin(3, 2);
    for batch in [2, 4] {
        assert_eq!(kind(at.add(batch, 0, &body)), Kind::StalePush);
    }
    assert_eq!(kind(at.add(3, 2, &body)), Kind::Config);
    assert_eq!(kind(at.add(3, 0, &body[1..])), Kind::Shape);
    // A slice that has seen no magnitude takes portion 0 first.
    assert_eq!(kind(at.add(3, 1, &body)), Kind::Config);
    assert!(at.add(3, 0, &body).unwrap());
    for (bad, expected) in [
        (f32::NAN, FailureKind::NotFinite),
        (f32::NEG_INFINITY, FailureKind::NotFinite),
        // The grid reaches 2^21 times as far as the power of two below the largest magnitude.
        (2.5e6, FailureKind::Outside),
    ] {
        let mut body = body.clone();
        body[LEN - 1] = bad;
        let error = at.add(3, 1, &body).unwrap_err();
        assert_eq!((FailureKind::of(error.kind), error.tensor.as_deref()), (Some(expected), Some("w")));
    }
    // None of them was taken.
    assert!(at.add(3, 1, &body).unwrap());
    at.run(vec![Op::EndSum { to: 1 }]).unwrap();
    assert_eq!(at.vector(1), vec![2.0; LEN]);
    assert_eq!(kind(at.add(3, 1, &body)), Kind::StalePush);
    // On a coarser grid, they have room. The number of a batch is not used twice.
    let begin = |batch, coarser| Op::BeginSum { batch, portions: 1, largest: 0.0, coarser };
    assert_eq!(at.run(vec![begin(3, 1)]).unwrap_err().kind, Kind::StalePush);
    at.number -= 1;
    at.run(vec![begin(4, 1)]).unwrap();
    assert!(at.add(4, 0, &vec![2.5e6; LEN]).unwrap());
    // A batch that begins again forgets what the sum had.
    at.run(vec![begin(5, 1)]).unwrap();
    assert!(at.add(5, 0, &body).unwrap());
    let results = at.run(vec![Op::EndSum { to: 1 }, begin(6, 0), Op::MaxAbs { x: 1 }]).unwrap();
    assert_eq!(results, [1.0]);
}

#[test]
fn the_grid_changes_with_commits_only() {
    let mut at = here().open();
    let grid = |at: &At| at.slice.space().unwrap().1.grid;
    let sum = |at: &mut At, batch, x: f32| {
        at.begin(batch, 1);
        at.add(batch, 0, &vec![x; LEN]).unwrap();
        at.run(vec![Op::EndSum { to: 1 }]).unwrap();
    };
    assert_eq!(grid(&at), None);
    sum(&mut at, 1, 0.0);
    assert_eq!((grid(&at), at.vector(1)), (None, vec![0.0; LEN]));
    sum(&mut at, 2, 1.0);
    let first = grid(&at).unwrap();
    sum(&mut at, 3, 1024.0);
    at.run(vec![Op::Copy { to: 2, from: 1 }]).unwrap();
    assert_eq!(grid(&at), Some(first));
    // The largest magnitude of the batch that is committed counts, not that of its sum.
    at.begin(4, 2);
    at.add(4, 0, &vec![4096.0; LEN]).unwrap();
    at.add(4, 1, &vec![-4096.0; LEN]).unwrap();
    at.run(vec![Op::EndSum { to: 1 }, Op::Copy { to: TENSOR, from: 1 }]).unwrap();
    assert_eq!((grid(&at), at.vector(0)), (Some(first + 12), vec![0.0; LEN]));
    // A slice whose portions are all 0 keeps its grid.
    sum(&mut at, 5, 0.0);
    at.run(vec![Op::Copy { to: TENSOR, from: 1 }]).unwrap();
    assert_eq!(grid(&at), Some(first + 12));
}

/// A short run: a space, commits, sums, an open sum at the end.
fn some_history(at: &mut At) {
    for batch in 1..4_u64 {
        at.begin(batch, 2);
        for portion in 0..2 {
            at.add(batch, portion, &values(batch as usize + portion as usize)).unwrap();
        }
        at.run(vec![Op::EndSum { to: 1 }, Op::Scale { to: 1, by: 1e-3 }, Op::Dot { x: 1, y: 1 }]).unwrap();
        at.run(vec![Op::Axpy { to: 2, by: 0.5, x: 1 }, Op::Axpy { to: TENSOR, by: -0.1, x: 2 }]).unwrap();
    }
    at.begin(9, 2);
    at.add(9, 0, &values(1)).unwrap();
}

fn replay(slice: &Slice, logged: &[Entry]) -> usize {
    let mut new = 0;
    for logged in logged {
        match logged {
            Entry::Opened(space) => drop(slice.open_space(&Arc::new(space.clone())).unwrap()),
            Entry::Closed(space) => drop(slice.close_space(*space)),
            Entry::Program(version, command, program, sum) => {
                let bytes = program.to_bytes();
                let program = &Program::from_bytes(&bytes).unwrap();
                let sum = sum.as_ref().map(|(values, largest)| SumRecord { values, largest: *largest });
                let record = ProgramRecord { slice: ID, version: *version, command: *command, program, sum };
                new += usize::from(slice.replay_program(&record).unwrap());
            }
        }
    }
    new
}

#[test]
fn records_from_before_an_image_change_nothing() {
    let mut at = here().open();
    some_history(&mut at);
    at.slice.close_space(at.space.id);
    let (logged, image) = (at.log.0.lock().unwrap().clone(), at.slice.image().unwrap());
    let tensor = image.values.as_ref().to_vec();
    // All records, and only those after the one that opened the space.
    for first in [0, 1] {
        let restored = here();
        restored.slice.restore(&image.standing, &tensor, image.state.as_ref()).unwrap();
        replay(&restored.slice, &logged[first..]);
        let again = restored.slice.image().unwrap();
        assert!(again.values.as_ref() == tensor && again.vectors.is_none());
        assert_eq!(again.standing, image.standing);
    }
}

#[test]
fn records_of_a_former_coordinator_from_before_an_image_change_nothing() {
    let mut at = here().open();
    at.run(vec![Op::Copy { to: 1, from: TENSOR }]).unwrap();
    at.run(vec![Op::Copy { to: TENSOR, from: 1 }]).unwrap();
    let program = Program::new(vec![Op::MaxAbs { x: 1 }]).unwrap();
    at.slice.run_program(at.command(2, 3), &program).unwrap();
    let (logged, image) = (at.log.0.lock().unwrap().clone(), at.slice.image().unwrap());
    let restored = here();
    restored.slice.restore(&image.standing, image.values.as_ref(), image.state.as_ref()).unwrap();
    let vectors = image.vectors.as_ref().unwrap();
    let arrays: Vec<_> = vectors.vectors.iter().map(AsRef::as_ref).collect();
    restored.slice.restore_space(&vectors.space, &vectors.standing, &arrays).unwrap();
    assert_eq!((replay(&restored.slice, &logged), restored.all()), (0, at.all()));
}

#[test]
fn records_and_images_restore_the_space_but_not_an_open_sum() {
    let mut at = here().open();
    some_history(&mut at);
    let logged = at.log.0.lock().unwrap().clone();
    let mut repeated = here();
    assert_eq!(replay(&repeated.slice, &logged), logged.len() - 1);
    assert_eq!(repeated.all(), at.all());
    assert!(repeated.log.0.lock().unwrap().len() == 1, "a replay records nothing but what opened the space");
    // A record that the slice already includes is not run again.
    assert_eq!((replay(&repeated.slice, &logged), repeated.all()), (0, at.all()));

    let image = at.slice.image().unwrap();
    let vectors = image.vectors.as_ref().unwrap();
    let mut restored = here();
    restored.slice.restore(&image.standing, image.values.as_ref(), image.state.as_ref()).unwrap();
    assert!(restored.slice.space().is_none());
    let arrays: Vec<_> = vectors.vectors.iter().map(AsRef::as_ref).collect();
    restored.slice.restore_space(&vectors.space, &vectors.standing, &arrays).unwrap();
    assert_eq!(restored.all(), at.all());
    let wrong = restored.slice.restore_space(&vectors.space, &vectors.standing, &arrays[1..]);
    assert_eq!(wrong.unwrap_err().kind, Kind::Shape);

    for lost in [&mut repeated, &mut restored] {
        // The sum of batch 9 was open. Replicas learn that it is lost; the batch begins again.
        lost.number = at.number;
        let error = lost.add(9, 1, &values(2)).unwrap_err();
        assert_eq!(FailureKind::of(error.kind), Some(FailureKind::SumLost));
        assert_eq!(lost.run(vec![Op::EndSum { to: 1 }]).unwrap_err().kind, Kind::UnknownOutcome);
        lost.number -= 1;
        lost.begin(10, 2);
        assert!(lost.add(10, 0, &values(1)).unwrap() && lost.add(10, 1, &values(2)).unwrap());
    }
    assert!(at.add(9, 1, &values(2)).unwrap());
    for at in [&mut at, &mut repeated, &mut restored] {
        at.run(vec![Op::EndSum { to: 1 }]).unwrap();
    }
    assert_eq!((repeated.vector(1), restored.vector(1)), (at.vector(1), at.vector(1)));
}

#[test]
fn a_cut_has_the_vectors_of_its_moment() {
    let mut at = here().open();
    some_history(&mut at);
    let before: Vec<_> = (0..3).map(|k| at.vector(k)).collect();
    at.shard.begin_cut("default").unwrap();
    at.run(vec![Op::Zero { to: TENSOR }, Op::Zero { to: 1 }, Op::Copy { to: 2, from: 1 }]).unwrap();
    let image = at.slice.image_in_cut().unwrap();
    at.shard.end_cut();
    let vectors = image.vectors.unwrap();
    for (k, vector) in vectors.vectors.iter().enumerate() {
        assert_eq!(vector.as_ref(), bytemuck::cast_slice::<f32, u8>(&before[k + 1]));
    }
    assert_eq!(image.values.as_ref(), bytemuck::cast_slice::<f32, u8>(&before[0]));
}

const SLICE: usize = 63 * 4096;

fn store(n: usize) -> Arc<Store> {
    let store = Store::new(StoreOptions { threads: Some(2), ..StoreOptions::default() }).unwrap();
    for (name, len) in [("a", n), ("b", 5)] {
        let start: Vec<f32> = (0..len).map(|i| (i % 13) as f32).collect();
        store.register(spec(name, len, Apply::Exact), View::Float32(&start), SECOND).unwrap();
    }
    Arc::new(store)
}

fn names(list: &[&str]) -> Vec<Arc<str>> {
    list.iter().map(|name| Arc::from(*name)).collect()
}

fn gradient(name: &str, values: Vec<f32>) -> Gradient {
    Gradient { name: name.into(), shape: vec![values.len() as u64], values: Arc::new(values) }
}

#[test]
fn a_store_opens_a_space_on_all_slices_or_on_none() {
    let store = store(2 * SLICE + 3);
    store.register(spec("h", 4, Apply::Hogwild), View::Float32(&[0.0; 4]), SECOND).unwrap();
    let open = |tensors: &[&str], vectors: &[&str]| {
        store.open_space(&"s".into(), &names(tensors), &names(vectors), SECOND, SECOND)
    };
    for (tensors, vectors, kind, tensor) in [
        (&["a", "none"][..], &["g"][..], Kind::UnknownTensor, Some("none")),
        (&["a", "h"], &["g"], Kind::Config, Some("h")),
        (&["a", "a"], &["g"], Kind::Config, Some("a")),
        (&[], &["g"], Kind::Config, None),
        (&["a"], &["w"], Kind::Config, None),
    ] {
        let error = open(tensors, vectors).unwrap_err();
        assert_eq!((error.kind, error.tensor.as_deref()), (kind, tensor), "{error}");
        assert!(store.spaces(SECOND).unwrap().is_empty());
    }
    let opened = open(&["a", "b"], &["g", "p"]).unwrap();
    assert!(opened.new && opened.last == 0);
    assert!(!open(&["a", "b"], &["g", "p"]).unwrap().new);
    assert_eq!(open(&["a"], &["g", "p"]).unwrap_err().kind, Kind::Precondition);
    let overlapping = store.open_space(&"t".into(), &names(&["b"]), &names(&["g"]), SECOND, SECOND);
    assert_eq!(overlapping.unwrap_err().kind, Kind::Precondition);
    let PushError::Refused(refused) =
        store.push(&[gradient("b", vec![1.0; 5])], &PushOptions::default()).unwrap_err()
    else {
        panic!("no slice took the push")
    };
    assert!(refused.message.contains("space \"s\""));
    let error = store.unregister("b", SECOND).unwrap_err();
    assert!(error.message.contains("space \"s\""), "{error}");

    // A program over four slices, of two tensors.
    let space = opened.spec.space.id;
    let (command, size) = (Command { space, term: 1, number: 1 }, 2 * SLICE + 3 + 5);
    let program = Program::new(vec![
        Op::Copy { to: 1, from: TENSOR },
        Op::Combine { to: 2, terms: vec![(2.0, 1), (1.0, 1)] },
        Op::MaxAbs { x: 2 },
        Op::Block { rows: vec![0], columns: vec![1, 2] },
    ]);
    let results = store.run_program(command, &Arc::new(program.unwrap()), SECOND).unwrap();
    assert_eq!(results.iter().map(Vec::len).collect::<Vec<_>>(), [3; 4]);
    let square: f64 = (0..size - 5).chain(0..5).map(|i| ((i % 13) * (i % 13)) as f64).sum();
    assert_eq!(results.iter().map(|of_slice| of_slice[1]).sum::<f64>(), square);
    assert_eq!(results.iter().map(|of_slice| of_slice[2]).sum::<f64>(), 3.0 * square);
    let mut pulled = [vec![0.0_f32; 2 * SLICE + 3], vec![0.0; 5]];
    let pull = VectorPull { space, vector: 2, batch: None };
    let mut take = |tensor: usize, first: usize, bytes: &[u8]| {
        pulled[tensor][first..][..bytes.len() / 4].copy_from_slice(bytemuck::cast_slice(bytes));
    };
    store.pull_vector(&pull, SECOND, &mut take).unwrap();
    assert!(pulled.iter().all(|values| values.iter().enumerate().all(|(i, x)| *x == (3 * (i % 13)) as f32)));
    store.close_space(space, SECOND).unwrap();
    store.push(&[gradient("b", vec![1.0; 5])], &PushOptions::default()).unwrap();
    store.unregister("b", SECOND).unwrap();
}

#[test]
fn a_second_coordinator_waits_for_the_first_to_go_and_fences_it() {
    let (first, name) = (store(10), Arc::<str>::from("s"));
    let second = first.sibling();
    let opened = first.open_space(&name, &names(&["a"]), &names(&["g"]), SECOND, SECOND).unwrap();
    let space = opened.spec.space.id;
    let take = |who: &str| SeatRequest::Take { at_least: opened.term, name: who.into() };
    let seat = first.coordinate(space, &take("first"), SECOND).unwrap();
    let refused = second.coordinate(space, &take("second"), SECOND).unwrap_err();
    assert_eq!(refused.kind, Kind::Precondition);
    assert!(refused.to_string().contains("\"first\""), "{refused}");
    let store_state = |term, len: usize| SeatRequest::Store { term, state: vec![7; len].into() };
    let endless = SeatRequest::Take { at_least: 1 << 62, name: "first".into() };
    assert_eq!(first.coordinate(space, &endless, SECOND).unwrap_err().kind, Kind::Config);
    first.coordinate(space, &store_state(seat.term, 9), SECOND).unwrap();
    let too_long = first.coordinate(space, &store_state(seat.term, (1 << 16) + 1), SECOND).unwrap_err();
    assert_eq!(too_long.kind, Kind::Config);
    first.close(SECOND);
    let next = second.coordinate(space, &take("second"), SECOND).unwrap();
    assert_eq!((next.term, &next.state[..]), (seat.term + 1, &[7_u8; 9][..]));
    assert_eq!(second.spaces(SECOND).unwrap()[0].coordinator.as_deref(), Some("second"));
    let task =
        BatchTask { batch: 1, portions: 1, asked: 1, samples: 1, vector: 1, min_replicas: 1, backups: true };
    let fenced = [
        first.coordinate(space, &store_state(seat.term, 1), SECOND).unwrap_err(),
        first.batch(space, seat.term, &task, SECOND, SECOND).unwrap_err(),
    ];
    assert!(fenced.iter().all(|error| error.kind == Kind::Fenced));
    second.coordinate(space, &SeatRequest::Leave { term: next.term }, SECOND).unwrap();
    let third = first.sibling();
    assert_eq!(third.coordinate(space, &take("third"), SECOND).unwrap().term, next.term + 1);
}

/// A replica whose gradient of a portion is its number in every element.
fn replica(store: &Store, number: u64, over: &AtomicBool) {
    let ask = |report, then| ReplicaRequest {
        space: "s".into(),
        replica: number,
        name: format!("r{number}").into(),
        report,
        then,
    };
    let mut report = None;
    while !over.load(Ordering::Relaxed) {
        let answer = store.batch_portion(&ask(report.take(), Then::Take), SECOND / 20, SECOND).unwrap();
        let Some(given) = answer else { continue };
        let mut seen = [f32::NAN; 10];
        let pull =
            VectorPull { space: given.space, vector: given.task.vector, batch: Some(given.task.batch) };
        let mut take = |_: usize, first: usize, bytes: &[u8]| {
            seen[first..][..bytes.len() / 4].copy_from_slice(bytemuck::cast_slice(bytes));
        };
        let portion = u32::try_from(given.portion).unwrap();
        let pushed = store.pull_vector(&pull, SECOND, &mut take).and_then(|()| {
            let body = seen.iter().map(|x| x + given.portion as f32).collect();
            store.push_portion(given.space, given.task.batch, portion, &[gradient("a", body)], SECOND)
        });
        if let Err(error) = pushed {
            // The other holder of the portion was faster, and the batch is over.
            assert_eq!(error.kind, Kind::StalePush);
            continue;
        }
        report = Some(PortionReport {
            batch: given.task.batch,
            portion: given.portion,
            outcome: Ok(given.portion as f64 + 0.5),
        });
        if given.task.batch == 2 && report.is_some() {
            store.batch_portion(&ask(report.take(), Then::Rest), SECOND, SECOND).unwrap();
        }
    }
    store.batch_portion(&ask(None, Then::Leave), SECOND, SECOND).unwrap();
}

#[test]
fn replicas_that_come_early_compute_the_batches_of_a_coordinator() {
    const PORTIONS: u64 = 20;
    let store = store(10);
    let over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        for number in 1..4 {
            let (own, over) = (store.sibling(), &over);
            scope.spawn(move || replica(&own, number, over));
        }
        let opened =
            store.open_space(&"s".into(), &names(&["a"]), &names(&["t", "g"]), SECOND, SECOND).unwrap();
        let space = opened.spec.space.id;
        let request = SeatRequest::Take { at_least: 0, name: "c".into() };
        let term = store.coordinate(space, &request, SECOND).unwrap().term;
        let run = |number, ops| {
            let command = Command { space, term, number };
            store.run_program(command, &Arc::new(Program::new(ops).unwrap()), SECOND).unwrap()
        };
        for (batch, portions) in [(1, 1), (2, PORTIONS)] {
            let begin = Op::BeginSum { batch, portions: portions as u32, largest: 12.0, coarser: 0 };
            run(2 * batch, vec![Op::Copy { to: 1, from: TENSOR }, begin]);
            let task = BatchTask {
                batch,
                portions: PORTIONS,
                asked: portions,
                samples: 100,
                vector: 1,
                min_replicas: 3,
                backups: true,
            };
            let report = store.batch(space, term, &task, PATIENT, PATIENT).unwrap();
            over.store(batch == 2 || !report.over, Ordering::Relaxed);
            assert!(report.over && report.failures.is_empty());
            let losses: Vec<_> = report.finished.iter().map(|one| one.as_ref().unwrap().loss).collect();
            assert_eq!(losses, (0..portions).map(|k| k as f64 + 0.5).collect::<Vec<_>>());
            run(2 * batch + 1, vec![Op::EndSum { to: 2 }, Op::Dot { x: 2, y: 2 }]);
        }
        let mut sum = vec![0.0_f32; 10];
        let mut take = |_: usize, first: usize, bytes: &[u8]| {
            sum[first..][..bytes.len() / 4].copy_from_slice(bytemuck::cast_slice(bytes));
        };
        store.pull_vector(&VectorPull { space, vector: 2, batch: None }, SECOND, &mut take).unwrap();
        let expected: Vec<_> =
            (0..10).map(|i| (PORTIONS * i + PORTIONS * (PORTIONS - 1) / 2) as f32).collect();
        assert_eq!(sum, expected);
    });
}

#[test]
fn a_portion_has_one_gradient_for_each_tensor_of_the_space() {
    let store = store(10);
    let opened = store.open_space(&"s".into(), &names(&["a", "b"]), &names(&["g"]), SECOND, SECOND).unwrap();
    let space = opened.spec.space.id;
    let begin = Op::BeginSum { batch: 1, portions: 1, largest: 1.0, coarser: 0 };
    let program = Arc::new(Program::new(vec![begin]).unwrap());
    store.run_program(Command { space, term: 1, number: 1 }, &program, SECOND).unwrap();
    let (a, b) = (gradient("a", vec![1.0; 10]), gradient("b", vec![1.0; 5]));
    for (gradients, kind, tensor) in [
        (vec![a.clone()], Kind::Config, "b"),
        (vec![a.clone(), b.clone(), b.clone()], Kind::Config, "b"),
        (vec![a.clone(), gradient("b", vec![1.0; 4])], Kind::Shape, "b"),
        (vec![a.clone(), b.clone(), gradient("c", vec![1.0])], Kind::Config, "c"),
        (vec![a.clone(), gradient("b", vec![f32::NAN; 5])], Kind::NonFinite, "b"),
    ] {
        let error = store.push_portion(space, 1, 0, &gradients, SECOND).unwrap_err();
        assert_eq!((error.kind, error.tensor.as_deref()), (kind, Some(tensor)), "{error}");
    }
    // The last one had left its first tensor's part, so this adds the other one.
    assert!(store.push_portion(space, 1, 0, &[b.clone(), a.clone()], SECOND).unwrap());
    assert!(!store.push_portion(space, 1, 0, &[a, b], SECOND).unwrap());
}
