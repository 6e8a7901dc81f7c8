//! Tensors of float64: SGD on them bit for bit against the formula, and what refuses them.

use fastps_core::codec::{Codec, CodecId, ErrorFeedback};
use fastps_core::dtype::{Array, DType, View};
use fastps_core::error::Kind;
use fastps_core::frame::{Action, Applied, Base, Identity, Push};
use fastps_core::isa::Isa;
use fastps_core::mode::{MembershipRequest, Mode, Quorum};
use fastps_core::optim::{Optimizer, Sgd};
use fastps_core::record::{Identities, Record, Sink};
use fastps_core::rows::Indices;
use fastps_core::shard::{Shard, ShardConfig};
use fastps_core::store::{Store, StoreOptions};
use fastps_core::tensor::program::{Command, Op, Program};
use fastps_core::tensor::{Apply, SliceId, Space, SpaceId, TensorSpec};
use fastps_core::verbs::prelude::*;
use fastps_core::verbs::{Gradient, OptimizerState, PushError, PushOptions, Rows, SparseValues, Values};
use std::sync::{Arc, Mutex};
use std::time::Duration;

const PATIENT: Duration = Duration::from_mins(1);
const SLICE: usize = 31 * 4096;

fn sgd() -> Sgd {
    Sgd { lr: 0.1, ..Sgd::default() }
}

/// Settings that use every form of the rule.
fn forms() -> [Sgd; 7] {
    [
        sgd(),
        Sgd { weight_decay: 1e-3, ..sgd() },
        Sgd { maximize: true, ..sgd() },
        Sgd { momentum: 0.9, ..sgd() },
        Sgd { momentum: 0.9, dampening: 0.3, weight_decay: 1e-3, ..sgd() },
        Sgd { momentum: 0.9, nesterov: true, ..sgd() },
        Sgd { momentum: 0.7, nesterov: true, weight_decay: 0.02, maximize: true, ..sgd() },
    ]
}

/// The formula of `torch.optim.SGD`, one element at a time.
fn reference(o: &Sgd, step: usize, p: &mut [f64], b: &mut [f64], g: &[f64], scale: f64) {
    for ((p, b), g) in p.iter_mut().zip(b).zip(g) {
        let mut g = g * scale;
        if o.maximize {
            g = -g;
        }
        if o.weight_decay != 0.0 {
            g = o.weight_decay.mul_add(*p, g);
        }
        if o.momentum != 0.0 {
            *b = if step == 0 { g } else { (1.0 - o.dampening).mul_add(g, *b * o.momentum) };
            g = if o.nesterov { o.momentum.mul_add(*b, g) } else { *b };
        }
        *p = (-o.lr).mul_add(g, *p);
    }
}

fn numbers(n: usize, seed: u64) -> Vec<f64> {
    let mut state = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
    let mut next = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 11) as f64 / (1_u64 << 52) as f64 - 1.0
    };
    (0..n).map(|_| next()).collect()
}

fn spec(name: &str, n: usize, optimizer: Optimizer) -> TensorSpec {
    TensorSpec { dtype: DType::Float64, ..TensorSpec::new(name, [n as u64], optimizer) }
}

fn gradient<V: Values + 'static>(name: &str, values: V) -> Gradient {
    let len = values.view().len() as u64;
    Gradient { name: name.into(), shape: vec![len], values: Arc::new(values) }
}

fn pull(store: &dyn ParameterServer, name: &str) -> Array {
    let ticket = store.pull_async(vec![name.into()], PATIENT).unwrap();
    ticket.wait(PATIENT).unwrap().unwrap().values.remove(0)
}

fn same(values: &Array, expected: &[f64]) {
    assert_eq!(values.view().bytes(), View::Float64(expected).bytes());
}

#[test]
fn steps_are_the_formula_on_every_instruction_set() {
    let bytes = |values: &[f64]| View::Float64(values).bytes().to_vec();
    for isa in Isa::ALL.into_iter().filter(|isa| isa.is_available()) {
        for (k, form) in forms().into_iter().enumerate() {
            for n in [0, 1, 63, 64, 65, 1024, 5000] {
                let spec = Arc::new(spec("w", n, Optimizer::Sgd(form)));
                let shard = Shard::new(ShardConfig::new(0, u64::MAX, isa));
                shard.create(&spec, 0, &[(SliceId(1), 0)]).unwrap();
                let (mut p, mut b) = (numbers(n, 7), vec![0.0; n]);
                push(&shard, 1, Action::Assign, &bytes(&p), None).unwrap();
                for step in 0..3 {
                    let (g, scale) = (numbers(n, step as u64), [None, Some(0.3_f32)][step % 2]);
                    push(&shard, 2 + step as u64, Action::Gradient, &bytes(&g), scale).unwrap();
                    reference(&form, step, &mut p, &mut b, &g, scale.map_or(1.0, f64::from));
                }
                let slice = shard.slice(SliceId(1)).unwrap();
                assert_eq!(slice.pull(0).unwrap().as_ref(), bytes(&p), "form {k}, {n} elements, {isa:?}");
            }
        }
    }
}

fn push(
    shard: &Shard,
    sequence: u64,
    action: Action,
    body: &[u8],
    scale: Option<f32>,
) -> fastps_core::error::Result<Applied> {
    let slice = shard.slice(SliceId(1)).unwrap();
    let push = Push {
        action,
        scale,
        ..Push::gradient(
            SliceId(1),
            Identity { client: 5, sequence },
            (body.len() / 8) as u64,
            CodecId::Float64,
            body,
        )
    };
    shard.push_to(&slice, &push, || panic!("nothing is held")).unwrap()
}

#[test]
fn a_store_has_them_beside_float32() {
    let store = Store::new(StoreOptions::default()).unwrap();
    let n = 2 * SLICE + 5;
    let momentum = Sgd { momentum: 0.9, ..sgd() };
    let mut p = numbers(n, 1);
    store.register(spec("w", n, Optimizer::Sgd(momentum)), View::Float64(&p), PATIENT).unwrap();
    let float32 = TensorSpec { dtype: DType::Float32, ..spec("v", 3, Optimizer::Sgd(sgd())) };
    store.register(float32, View::Float32(&[0.0; 3]), PATIENT).unwrap();
    assert_eq!(store.spec("w", PATIENT).unwrap().slice_count(), 3);
    let mut b = vec![0.0; n];
    for step in 0..3 {
        let g = numbers(n, 10 + step as u64);
        let both = [gradient("w", Array::from(g.clone())), gradient("v", vec![1.0_f32; 3])];
        let receipts = store.push(&both, &PushOptions::default()).unwrap();
        assert_eq!((receipts[0].version, receipts[0].bytes), (2 + step as u64, 8 * n as u64));
        reference(&momentum, step, &mut p, &mut b, &g, 1.0);
    }
    same(&pull(&store, "w"), &p);
    let state = store.state("w", PATIENT).unwrap();
    assert_eq!(state.steps, [3; 3]);
    same(&state.slots[0].1, &b);
    // A list with sparse gradients takes another way.
    let sparse = Gradient {
        name: "v".into(),
        shape: vec![1],
        values: Arc::new(SparseValues { indices: vec![2], values: vec![1.0_f32] }),
    };
    let g = numbers(n, 20);
    store.push(&[sparse, gradient("w", Array::from(g.clone()))], &PushOptions::default()).unwrap();
    reference(&momentum, 3, &mut p, &mut b, &g, 1.0);
    same(&pull(&store, "w"), &p);
    let assigned = numbers(n, 30);
    store.assign(&gradient("w", Array::from(assigned.clone())), PATIENT).unwrap();
    store.load_state("w", &state, PATIENT).unwrap();
    same(&pull(&store, "w"), &assigned);
    assert_eq!(store.state("w", PATIENT).unwrap(), state);
}

#[derive(Debug, Default)]
struct Log(Mutex<Vec<(Record<'static>, Vec<u8>)>>);

impl Sink for Log {
    fn record(&self, record: &Record<'_>) {
        let body = record.body.to_vec();
        self.0.lock().unwrap().push((
            Record { body: &[], indices: None, shared_by: Identities::default(), note: "", ..*record },
            body,
        ));
    }
}

#[test]
fn an_image_and_later_records_are_the_slice() {
    let spec = Arc::new(spec("w", 777, Optimizer::Sgd(Sgd { momentum: 0.9, dampening: 0.1, ..sgd() })));
    let log = Arc::new(Log::default());
    let isa = Isa::best();
    let live = Shard::new(ShardConfig { sink: Some(log.clone()), ..ShardConfig::new(0, u64::MAX, isa) });
    let copy = Shard::new(ShardConfig::new(0, u64::MAX, isa));
    for shard in [&live, &copy] {
        shard.create(&spec, 0, &[(SliceId(1), 0)]).unwrap();
    }
    let body = |k: u64| View::Float64(&numbers(777, k)).bytes().to_vec();
    let image = |shard: &Shard| shard.slice(SliceId(1)).unwrap().image().unwrap();
    push(&live, 1, Action::Assign, &body(1), None).unwrap();
    push(&live, 2, Action::Gradient, &body(2), None).unwrap();
    let early = image(&live);
    push(&live, 3, Action::Gradient, &body(3), Some(0.25)).unwrap();
    let restored = copy.slice(SliceId(1)).unwrap();
    restored.restore(&early.standing, early.values.as_ref(), early.state.as_ref()).unwrap();
    for (record, body) in log.0.lock().unwrap().iter() {
        restored.replay(&Record { body, ..*record }).unwrap();
    }
    let (now, then) = (image(&copy), image(&live));
    assert_eq!(now.standing, then.standing);
    assert_eq!((now.values.as_ref(), now.state.as_ref()), (then.values.as_ref(), then.state.as_ref()));
}

#[test]
fn what_does_not_support_them_refuses_and_names_the_tensor() {
    let store = Store::new(StoreOptions::default()).unwrap();
    let zeros = [0.0; 4];
    let no = |error: fastps_core::error::Error| {
        assert_eq!((error.kind, error.tensor.as_deref()), (Kind::DType, Some("w")), "{error}");
    };
    for optimizer in Optimizer::all().into_iter().filter(|optimizer| optimizer.name() != "sgd") {
        no(store.register(spec("w", 4, optimizer), View::Float64(&zeros), PATIENT).unwrap_err());
    }
    let hogwild = TensorSpec { apply: Apply::Hogwild, ..spec("w", 4, Optimizer::Sgd(sgd())) };
    no(store.register(hogwild, View::Float64(&zeros), PATIENT).unwrap_err());
    no(store.register(spec("w", 4, Optimizer::Sgd(sgd())), View::Float32(&[0.0; 4]), PATIENT).unwrap_err());
    assert!(store.names(PATIENT).unwrap().is_empty());

    store
        .register(
            spec("w", 4, Optimizer::Sgd(Sgd { momentum: 0.9, ..sgd() })),
            View::Float64(&zeros),
            PATIENT,
        )
        .unwrap();
    let good = || gradient("w", Array::from(vec![1.0_f64; 4]));
    let refused = |pushed| match pushed {
        Err(PushError::Refused(error)) => no(error),
        other => panic!("{other:?}"),
    };
    let with = |codec| PushOptions { codec: Some(codec), ..PushOptions::default() };
    for codec in [Codec::Float32, Codec::BFloat16, Codec::Int8 { seed: None }] {
        refused(store.push(&[good()], &with(codec)));
    }
    let feedback = Some(Arc::new(Mutex::new(ErrorFeedback::new())));
    refused(store.push(&[good()], &PushOptions { feedback: feedback.clone(), ..PushOptions::default() }));
    refused(store.push(&[good()], &PushOptions { feedback, ..with(Codec::OneBit) }));
    let bound = store.bind(Arc::new(vec![good()])).unwrap();
    refused(store.push_bound(&bound, &with(Codec::BFloat16)));
    refused(store.push(&[gradient("w", vec![1.0_f32; 4])], &PushOptions::default()));
    let rows = SparseValues { indices: vec![1], values: Array::from(vec![1.0_f64]) };
    let sparse = Gradient { name: "w".into(), shape: vec![1], values: Arc::new(rows) };
    refused(store.push(&[sparse], &PushOptions::default()));
    let mut none = |_: usize, _: usize, _: &[u8]| panic!("nothing is pulled");
    let pulled = store.push_pull(&[good()], &PushOptions::default(), &mut none);
    refused(pulled.map(|(receipts, _)| receipts));
    let rows = [Rows { name: "w".into(), indices: vec![1] }];
    no(store.pull_rows(&rows, PATIENT, &mut none).unwrap_err());
    no(store.exchange_of(&[("w".into(), &[4])]).unwrap_err());
    let state =
        OptimizerState { steps: vec![1], slots: vec![("momentum_buffer", Array::Float32(vec![1.0; 4]))] };
    refused(store.load_state("w", &state, PATIENT).map(|receipt| vec![receipt]));
    for bad in [f64::NAN, f64::INFINITY] {
        match store.push(&[gradient("w", Array::from(vec![1.0, bad, 1.0, 1.0]))], &PushOptions::default()) {
            Err(PushError::Refused(error)) => assert_eq!(error.kind, Kind::NonFinite),
            other => panic!("{other:?}"),
        }
    }
    same(&pull(&store, "w"), &zeros);
    assert_eq!(store.state("w", PATIENT).unwrap().steps, [0]);
    store.push_bound(&bound, &PushOptions::default()).unwrap();
    same(&pull(&store, "w"), &[-0.1; 4]);
}

#[test]
fn a_frame_of_another_type_is_refused() {
    let shard = Shard::new(ShardConfig::new(0, u64::MAX, Isa::best()));
    let wide = Arc::new(spec("w", 2, Optimizer::Sgd(sgd())));
    let narrow = Arc::new(TensorSpec { dtype: DType::Float32, ..(*wide).clone() });
    shard.create(&wide, 0, &[(SliceId(1), 0)]).unwrap();
    shard.create(&narrow, 0, &[(SliceId(2), 0)]).unwrap();
    let row = 0_u32.to_le_bytes();
    for (slice, codec, body) in
        [(1, CodecId::Float32, &[0; 8][..]), (1, CodecId::Int8, &[0; 3]), (2, CodecId::Float64, &[0; 16])]
    {
        for (action, indices) in [
            (Action::Gradient, None),
            (Action::Assign, None),
            (Action::AssignState { step: 1 }, None),
            (Action::Gradient, Some(Indices::new(&row))),
        ] {
            let push = Push {
                action,
                indices,
                ..Push::gradient(SliceId(slice), Identity { client: 5, sequence: 1 }, 2, codec, body)
            };
            let slice = shard.slice(SliceId(slice)).unwrap();
            let error = shard.push_to(&slice, &push, || panic!("nothing is held")).unwrap().unwrap_err();
            assert_eq!((error.kind, error.tensor.as_deref()), (Kind::DType, Some("w")), "{error}");
        }
    }
    let slice = shard.slice(SliceId(1)).unwrap();
    let error = slice.pull_rows(5, Indices::new(&row), &mut Vec::new()).unwrap_err();
    assert_eq!(error.kind, Kind::DType);
}

#[test]
fn a_version_of_several_workers_is_refused() {
    let shard = Shard::new(ShardConfig::new(0, u64::MAX, Isa::best()));
    shard.create(&Arc::new(spec("w", 2, Optimizer::Sgd(sgd()))), 4, &[(SliceId(1), 0)]).unwrap();
    let mode = Mode::Sync(Quorum { workers: 2, ..Quorum::default() });
    let seat = MembershipRequest::new(mode, None, "a");
    shard.groups().join(4, 5, seat, shard.meter()).unwrap();
    let slice = shard.slice(SliceId(1)).unwrap();
    let push = Push {
        base: Some(Base { version: 0, own: None }),
        ..Push::gradient(SliceId(1), Identity { client: 5, sequence: 1 }, 2, CodecId::Float64, &[0; 16])
    };
    let error = shard.push_to(&slice, &push, || Box::new(|_| ())).unwrap().unwrap_err();
    assert_eq!(error.kind, Kind::DType, "{error}");
}

#[test]
fn vectors_and_sums_of_portions_have_its_type() {
    let shard = Shard::new(ShardConfig::new(0, u64::MAX, Isa::best()));
    shard.create(&Arc::new(spec("w", 100, Optimizer::Sgd(sgd()))), 0, &[(SliceId(1), 0)]).unwrap();
    let slice = shard.slice(SliceId(1)).unwrap();
    let space = Space { id: SpaceId(9), name: "mine".into(), vectors: vec!["g".into()] };
    slice.open_space(&Arc::new(space)).unwrap();
    let run = |number, ops| {
        let command = Command { space: SpaceId(9), term: 1, number };
        slice.run_program(command, &Program::new(ops).unwrap()).unwrap()
    };
    run(1, vec![Op::BeginSum { batch: 1, portions: 2, largest: 0.0, coarser: 0 }]);
    let (a, b) = (numbers(100, 1), numbers(100, 2));
    for (portion, values, new) in [(0, &a, true), (1, &b, true), (0, &a, false)] {
        let body = View::Float64(values).bytes();
        assert_eq!(slice.push_portion(SpaceId(9), 1, portion, body).unwrap(), new);
    }
    let product =
        run(2, vec![Op::EndSum { to: 1 }, Op::Axpy { to: 0, by: -0.5, x: 1 }, Op::Dot { x: 0, y: 0 }]);
    let w = slice.pull(0).unwrap();
    let w: Vec<f64> = w.as_ref().as_chunks().0.iter().map(|&lane| f64::from_le_bytes(lane)).collect();
    for ((w, a), b) in w.iter().zip(&a).zip(&b) {
        assert!((w + 0.5 * (a + b)).abs() <= 1e-16, "{w} {a} {b}");
    }
    let dot: f64 = w.iter().map(|w| w * w).sum();
    assert!((product[0] - dot).abs() <= 1e-13 * dot);
}
