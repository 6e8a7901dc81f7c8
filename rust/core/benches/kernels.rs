//! Timings that Python's overhead would hide, for `benchmarks/kernels.py`: codecs, bodies as a server applies
//! them, threads that meet in one vector, lists of small tensors.
//!
//! Reads lines "CASE ELEMENTS REPETITIONS" from standard input and answers each with one line: the
//! nanoseconds of every repetition. The data of a case is made at its first line and kept until another
//! number of elements is requested.
#![allow(clippy::unwrap_used, clippy::panic, clippy::print_stdout)]

use fastps_core::codec::{Codec, CodecId, Position};
use fastps_core::dtype::{DType, View};
use fastps_core::frame::{Identity, Push};
use fastps_core::isa::Isa;
use fastps_core::optim::{Adam, Optimizer, Sgd};
use fastps_core::program::{Command, Op, Program};
use fastps_core::shard::{Shard, ShardConfig};
use fastps_core::slice::Slice;
use fastps_core::store::{Store, StoreOptions};
use fastps_core::tensor::{Apply, SliceId, Space, SpaceId, TensorSpec};
use fastps_core::verbs::prelude::*;
use fastps_core::verbs::{Gradient, PushOptions};
use std::collections::HashMap;
use std::ops::{Deref, DerefMut};
use std::sync::{Arc, Barrier};
use std::time::{Duration, Instant};

/// A repetition with threads makes at least this many updates, so that starting them does not show.
const ELEMENTS: usize = 1 << 25;

/// One repetition.
type Case = Box<dyn FnMut() -> Duration>;

fn main() {
    let mut cases: HashMap<String, Case> = HashMap::new();
    let mut made_for = 0;
    for line in std::io::stdin().lines() {
        let line = line.unwrap();
        let words: Vec<_> = line.split(' ').collect();
        let [name, elements, repetitions] = words[..] else {
            panic!("not CASE ELEMENTS REPETITIONS: {line}")
        };
        let (elements, repetitions): (usize, u32) = (elements.parse().unwrap(), repetitions.parse().unwrap());
        if elements != made_for {
            cases.clear();
            made_for = elements;
        }
        let case = cases.entry(name.to_owned()).or_insert_with(|| case(name, elements));
        let times: Vec<_> = (0..repetitions).map(|_| case().as_nanos().to_string()).collect();
        println!("{}", times.join(" "));
    }
}

fn case(name: &str, n: usize) -> Case {
    let (what, how) = name.split_once('-').unwrap();
    match (what, how) {
        ("encode", codec) => encode(codec_of(codec), n, false),
        ("feedback", codec) => encode(codec_of(codec), n, true),
        ("decode", codec) => decode(codec_of(codec), n),
        ("apply", codec) => apply(codec_of(codec), n),
        // Threads that push into one vector, with its lock or racing, or each into its own: the same number
        // of updates altogether.
        ("meet", threads) => contend(n, threads.parse().unwrap(), Apply::Exact, false),
        ("race", threads) => contend(n, threads.parse().unwrap(), Apply::Hogwild, false),
        ("private", threads) => contend(n, threads.parse().unwrap(), Apply::Exact, true),
        // A bound list of this many tensors.
        ("sgd", tensors) => {
            let sgd = Sgd { lr: 1e-3, ..Sgd::default() };
            bound(n, tensors.parse().unwrap(), Optimizer::Sgd(sgd))
        }
        ("vector32", operation) => vector(n, DType::Float32, operation),
        ("vector64", operation) => vector(n, DType::Float64, operation),
        ("adam", tensors) => bound(n, tensors.parse().unwrap(), Optimizer::Adam(Adam::default())),
        _ => panic!("unknown case {name}"),
    }
}

fn codec_of(name: &str) -> Codec {
    match name {
        "float32" => Codec::Float32,
        "bfloat16" => Codec::BFloat16,
        "int8" => Codec::Int8 { seed: None },
        "onebit" => Codec::OneBit,
        _ => panic!("unknown codec {name}"),
    }
}

/// Rows and columns of a block of inner products.
const BLOCK: (u32, u32) = (3, 21);
/// Portions of a sum.
const PORTIONS: u32 = 1 << 16;

/// A tensor's slices with a space of vectors that are not zero.
struct VectorCase {
    slices: Vec<Arc<Slice>>,
    /// A portion of each slice.
    bodies: Vec<Vec<u8>>,
    program: u64,
    batch: u64,
}

const SPACE: SpaceId = SpaceId(1);

impl VectorCase {
    fn new(n: usize, dtype: DType, vectors: u32) -> Self {
        let spec =
            Arc::new(TensorSpec { dtype, ..spec("w", n, Apply::Exact, Optimizer::Sgd(Sgd::default())) });
        let shard = Shard::new(ShardConfig::new(0, u64::MAX, Isa::get().unwrap()));
        let ids: Vec<_> = (0..spec.slice_count()).map(|k| (SliceId(k as u64), k)).collect();
        shard.create(&spec, 0, &ids).unwrap();
        let slices: Vec<_> = ids.iter().map(|(id, _)| shard.slice(*id).unwrap()).collect();
        let names = (0..vectors).map(|k| k.to_string().into()).collect();
        let space = Arc::new(Space { id: SPACE, name: "bench".into(), vectors: names });
        let values = values(n);
        let body = |slice: &Arc<Slice>| {
            let values = &values[slice.range()];
            if dtype == DType::Float64 {
                values.iter().flat_map(|x| f64::from(*x).to_ne_bytes()).collect()
            } else {
                bytemuck::cast_slice(values).to_vec()
            }
        };
        let bodies = slices.iter().map(body).collect();
        let mut case = Self { slices, bodies, program: 0, batch: 0 };
        for slice in &case.slices {
            slice.open_space(&space).unwrap();
        }
        for k in 1..=vectors {
            case.begin(1);
            case.add(0);
            case.run(vec![Op::EndSum { to: k }]);
        }
        case
    }

    fn run(&mut self, ops: Vec<Op>) -> Duration {
        self.program += 1;
        let command = Command { space: SPACE, term: 1, number: self.program };
        let program = Program::new(ops).unwrap();
        timed(|| self.slices.iter().for_each(|slice| drop(slice.run_program(command, &program).unwrap())))
    }

    /// Begins the next sum.
    fn begin(&mut self, portions: u32) {
        self.batch += 1;
        self.run(vec![Op::BeginSum { batch: self.batch, portions, largest: 1.0, coarser: 0 }]);
    }

    /// Adds one portion to the sum.
    fn add(&self, portion: u32) -> Duration {
        timed(|| {
            for (slice, body) in self.slices.iter().zip(&self.bodies) {
                slice.push_portion(SPACE, self.batch, portion, body).unwrap();
            }
        })
    }
}

/// An operation on the vectors of a space over one tensor.
fn vector(n: usize, dtype: DType, operation: &str) -> Case {
    let count = if matches!(operation, "block" | "single") { BLOCK.0 + BLOCK.1 } else { 3 };
    let mut case = VectorCase::new(n, dtype, count);
    let (rows, columns): (Vec<u32>, Vec<u32>) = ((1..=BLOCK.0).collect(), (BLOCK.0 + 1..=count).collect());
    let ops = match operation {
        "dot" => vec![Op::Dot { x: 1, y: 2 }],
        "max" => vec![Op::MaxAbs { x: 1 }],
        "axpy" => vec![Op::Axpy { to: 3, by: 1e-3, x: 2 }],
        "combine" => vec![Op::Combine { to: 3, terms: vec![(0.5, 3), (0.25, 1), (0.125, 2)] }],
        "multiply" => vec![Op::Multiply { to: 3, x: 1, y: 2 }],
        "block" => vec![Op::Block { rows, columns }],
        "single" => rows.iter().flat_map(|x| columns.iter().map(|y| Op::Dot { x: *x, y: *y })).collect(),
        "sum" => {
            return Box::new(move || {
                case.begin(1);
                case.add(0);
                case.run(vec![Op::EndSum { to: 3 }])
            });
        }
        "portion" => {
            let mut portion = PORTIONS;
            return Box::new(move || {
                if portion == PORTIONS {
                    portion = 0;
                    case.begin(PORTIONS);
                }
                portion += 1;
                case.add(portion - 1)
            });
        }
        _ => panic!("unknown operation {operation}"),
    };
    Box::new(move || case.run(ops.clone()))
}

/// Values of both signs and many magnitudes (a linear congruential generator).
fn values(n: usize) -> Vec<f32> {
    let mut state = 12_345_u32;
    let mut next = || {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        state as i32 as f32
    };
    (0..n).map(|_| 1e-3 / 2_147_483_648.0 * next()).collect()
}

/// Values that begin a cache line, as those of C do.
struct Aligned {
    memory: Vec<f32>,
    start: usize,
}

impl Aligned {
    fn new(values: &[f32]) -> Self {
        let mut memory = vec![0.0; values.len() + 64 / size_of::<f32>()];
        let start = memory.as_ptr().align_offset(64);
        memory.truncate(start + values.len());
        memory[start..].copy_from_slice(values);
        Self { memory, start }
    }
}

impl Deref for Aligned {
    type Target = [f32];

    fn deref(&self) -> &[f32] {
        &self.memory[self.start..]
    }
}

impl DerefMut for Aligned {
    fn deref_mut(&mut self) -> &mut [f32] {
        &mut self.memory[self.start..]
    }
}

fn spec(name: &str, n: usize, apply: Apply, optimizer: Optimizer) -> TensorSpec {
    TensorSpec { apply, ..TensorSpec::new(name, [n as u64], optimizer) }
}

fn timed(work: impl FnOnce()) -> Duration {
    let start = Instant::now();
    work();
    start.elapsed()
}

fn encode(codec: Codec, n: usize, feedback: bool) -> Case {
    let isa = Isa::get().unwrap();
    let values = Aligned::new(&values(n));
    let mut residual = Aligned::new(&vec![1e-9; if feedback { n } else { 0 }]);
    let mut body = vec![1; codec.id().body_len(n)];
    Box::new(move || {
        timed(|| {
            let residual = feedback.then_some(&mut residual[..]);
            codec.encode_into(isa, &values, residual, Position::default(), &mut body);
        })
    })
}

fn decode(codec: Codec, n: usize) -> Case {
    let isa = Isa::get().unwrap();
    let mut body = Vec::new();
    codec.encode(isa, &values(n), None, Position::default(), &mut body);
    let mut out = Aligned::new(&vec![1.0; n]);
    Box::new(move || timed(|| codec.id().decode(isa, &body, &mut out)))
}

/// One SGD tensor on a separate shard, and the bodies of one gradient for its slices.
struct Tensor {
    shard: Shard,
    codec: CodecId,
    bodies: Vec<(SliceId, usize, Vec<u8>)>,
}

impl Tensor {
    fn new(codec: Codec, n: usize, apply: Apply) -> Arc<Self> {
        let isa = Isa::get().unwrap();
        let spec = Arc::new(spec("w", n, apply, Optimizer::Sgd(Sgd { lr: 1e-3, ..Sgd::default() })));
        let shard = Shard::new(ShardConfig::new(0, u64::MAX, isa));
        let ids: Vec<_> = (0..spec.slice_count()).map(|k| (SliceId(k as u64), k)).collect();
        shard.create(&spec, 0, &ids).unwrap();
        let gradient = values(n);
        let body = |(id, k): &(SliceId, usize)| {
            let values = &gradient[spec.slice_range(*k)];
            let mut body = Vec::new();
            codec.encode(isa, values, None, Position::default(), &mut body);
            (*id, values.len(), body)
        };
        let bodies = ids.iter().map(body).collect();
        Arc::new(Self { shard, codec: codec.id(), bodies })
    }

    /// Pushes the gradient; `checked`: without the check of a server.
    fn push(&self, identity: Identity, checked: bool) {
        for (slice, n, body) in &self.bodies {
            let push = Push {
                largest: checked.then_some(1.0),
                once: checked,
                ..Push::gradient(*slice, identity, *n as u64, self.codec, body)
            };
            self.shard.push(&push, |applied| assert!(applied.is_ok()));
        }
    }
}

/// float32 without a check, the plain step; the others as a server applies them, checked.
fn apply(codec: Codec, n: usize) -> Case {
    let tensor = Tensor::new(codec, n, Apply::Exact);
    let mut sequence = 0;
    Box::new(move || {
        sequence += 1;
        timed(|| tensor.push(Identity { client: 1, sequence }, codec == Codec::Float32))
    })
}

fn contend(n: usize, threads: u64, apply: Apply, private: bool) -> Case {
    let shared = Tensor::new(Codec::Float32, n, apply);
    let tensor = |_| if private { Tensor::new(Codec::Float32, n, apply) } else { shared.clone() };
    let tensors: Vec<_> = (0..threads).map(tensor).collect();
    // An even number, at least one push of each of two threads.
    let updates = 2 * (ELEMENTS / n / 2).max(1) as u64;
    let mut sequence = 0;
    Box::new(move || {
        let barrier = Barrier::new(tensors.len());
        let sequences = sequence + 1..sequence + 1 + updates / threads;
        sequence = sequences.end;
        let work = |client: u64, tensor: &Tensor| {
            barrier.wait();
            let start = Instant::now();
            sequences.clone().for_each(|sequence| tensor.push(Identity { client, sequence }, true));
            (start, Instant::now())
        };
        let work = &work;
        let times: Vec<_> = std::thread::scope(|scope| {
            let spawn = |(client, tensor): (u64, &Arc<Tensor>)| {
                let tensor = tensor.clone();
                scope.spawn(move || work(client, &tensor))
            };
            let spawned: Vec<_> = (1..).zip(&tensors).map(spawn).collect();
            spawned.into_iter().map(|thread| thread.join().unwrap()).collect()
        });
        let first = times.iter().map(|(start, _)| *start).min().unwrap();
        let last = times.iter().map(|(_, end)| *end).max().unwrap();
        // Of one update of n elements.
        (last - first) / updates as u32
    })
}

/// A store's bound list of tensors of n elements each, without the finite check.
fn bound(n: usize, tensors: usize, optimizer: Optimizer) -> Case {
    let store = Store::new(StoreOptions::default()).unwrap();
    let timeout = Duration::from_secs(1);
    let gradient = |k| {
        let spec = spec(&format!("layer.{k}.weight"), n, Apply::Exact, optimizer);
        let gradient =
            Gradient { name: spec.name.clone(), shape: spec.shape.clone(), values: Arc::new(values(n)) };
        store.register(spec, View::Float32(&vec![0.0; n]), timeout).unwrap();
        gradient
    };
    let list = store.bind(Arc::new((0..tensors).map(gradient).collect())).unwrap();
    let options = PushOptions { check_finite: false, timeout, ..PushOptions::default() };
    Box::new(move || timed(|| assert!(store.push_bound(&list, &options).is_ok())))
}
