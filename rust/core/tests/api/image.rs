//! A slice's image and the records after it restore the slice bit for bit: values, state, version, step
//! count, and the outcomes of pushes.

use fastps_core::codec::{Codec, CodecId, Position};
use fastps_core::correction::Correction;
use fastps_core::error::{Kind, Result};
use fastps_core::frame::{Action, Applied, Base, Identity, MAX_STEP, Push};
use fastps_core::isa::Isa;
use fastps_core::optim::{Adadelta, Adagrad, Adam, AdamW, Average, Ftrl, Lion, Optimizer, Rmsprop, Sgd};
use fastps_core::record::{Identities, Record, Sink};
use fastps_core::rows::Indices;
use fastps_core::shard::{Shard, ShardConfig};
use fastps_core::slice::{Image, Resolved, Slice};
use fastps_core::tensor::{Apply, SliceId, TensorSpec};
use proptest::prelude::*;
use std::sync::{Arc, Mutex};

const ROWS: usize = 67;
const WIDTH: usize = 5;
const ID: SliceId = SliceId(7);

/// Input of a sink, as owned values.
#[derive(Clone, Debug)]
enum Entry {
    Record(Box<Record<'static>>, Option<Vec<u8>>, Vec<u8>),
    Fenced(Identity),
}

#[derive(Debug, Default)]
struct Log(Mutex<Vec<Entry>>);

impl Sink for Log {
    fn record(&self, record: &Record<'_>) {
        let (indices, body) = (record.indices.map(|i| i.bytes().to_vec()), record.body.to_vec());
        let kept = Record { indices: None, body: &[], shared_by: Identities::default(), note: "", ..*record };
        self.0.lock().unwrap().push(Entry::Record(Box::new(kept), indices, body));
    }

    fn fenced(&self, slice: SliceId, identity: Identity) {
        assert_eq!(slice, ID);
        self.0.lock().unwrap().push(Entry::Fenced(identity));
    }
}

fn replay(slice: &Slice, logged: &Entry) -> Result<bool> {
    match logged {
        Entry::Record(record, indices, body) => {
            let indices = indices.as_deref().map(Indices::new);
            slice.replay(&Record { indices, body, ..**record })
        }
        Entry::Fenced(identity) => slice.replay_fence(*identity).map(|()| true),
    }
}

fn spec(optimizer: Optimizer, apply: Apply) -> Arc<TensorSpec> {
    Arc::new(TensorSpec { apply, ..TensorSpec::new("w", [ROWS as u64, WIDTH as u64], optimizer) })
}

fn shard(spec: &Arc<TensorSpec>, log: Option<Arc<Log>>) -> (Shard, Arc<Slice>) {
    let sink = log.map(|log| log as Arc<dyn Sink>);
    let shard = Shard::new(ShardConfig { sink, ..ShardConfig::new(0, 1 << 30, Isa::get().unwrap()) });
    shard.create(spec, 1, &[(ID, 0)]).unwrap();
    let slice = shard.slice(ID).unwrap();
    (shard, slice)
}

fn optimizers() -> Vec<Optimizer> {
    vec![
        Optimizer::Sgd(Sgd { lr: 0.1, ..Sgd::default() }),
        Optimizer::Sgd(Sgd { lr: 0.1, momentum: 0.9, dampening: 0.25, ..Sgd::default() }),
        Optimizer::Adagrad(Adagrad { initial_accumulator_value: 0.5, ..Adagrad::default() }),
        Optimizer::Rmsprop(Rmsprop { momentum: 0.5, centered: true, ..Rmsprop::default() }),
        Optimizer::Adadelta(Adadelta::default()),
        Optimizer::Adam(Adam { amsgrad: true, ..Adam::default() }),
        Optimizer::Adam(Adam::default()),
        Optimizer::AdamW(AdamW::default()),
        Optimizer::Lion(Lion::default()),
        Optimizer::Ftrl(Ftrl::default()),
        Optimizer::Average(Average::default()),
    ]
}

/// One action of a client.
#[derive(Clone, Debug)]
struct Deed {
    client: u64,
    what: u8,
    codec: usize,
    seed: u32,
    lr: Option<f64>,
    scale: Option<f32>,
}

fn deed() -> impl Strategy<Value = Deed> {
    let lr = proptest::option::of(0.001..0.5_f64);
    let scale = proptest::option::of(0.1..2.0_f32);
    (1..4_u64, 0..16_u8, 0..4_usize, any::<u32>(), lr, scale)
        .prop_map(|(client, what, codec, seed, lr, scale)| Deed { client, what, codec, seed, lr, scale })
}

fn values(n: usize, seed: u32) -> Vec<f32> {
    (0..n as u32).map(|i| (i.wrapping_mul(2_654_435_761) ^ seed) as i32 as f32 / 2e9).collect()
}

/// Performs the action; `sequences` counts the pushes of each client.
fn perform(shard: &Shard, spec: &TensorSpec, sequences: &mut [u64; 4], deed: &Deed) -> Option<Applied> {
    let isa = Isa::get().unwrap();
    let sequence = &mut sequences[deed.client as usize];
    let identity = |sequence| Identity { client: deed.client, sequence };
    // Fences the next push, which is then refused.
    if deed.what == 0 {
        assert_eq!(shard.resolve(ID, identity(*sequence + 1)).unwrap(), Resolved::Fenced);
    }
    let repeats = deed.what == 1 && *sequence > 0;
    *sequence += u64::from(!repeats);
    let slots = spec.slots().len();
    let sparse = deed.what.is_multiple_of(3) && spec.optimizer.check_sparse().is_ok() && !repeats;
    let (action, codec, n, rows) = match deed.what {
        2 => (Action::Assign, Codec::Float32, ROWS * WIDTH, None),
        3 if slots > 0 => {
            let step = u64::from(deed.seed % 50);
            (Action::AssignState { step }, Codec::Float32, slots * ROWS * WIDTH, None)
        }
        _ if sparse => {
            let rows: Vec<u32> = (0..ROWS as u32).filter(|row| (deed.seed >> (row % 32)) & 1 == 1).collect();
            let codec = [Codec::Float32, Codec::BFloat16, Codec::Int8 { seed: None }][deed.codec % 3];
            (Action::Gradient, codec, rows.len() * WIDTH, Some(rows))
        }
        _ => {
            let all = [Codec::Float32, Codec::BFloat16, Codec::Int8 { seed: Some(3) }, Codec::OneBit];
            (Action::Gradient, all[deed.codec], ROWS * WIDTH, None)
        }
    };
    let state = matches!(action, Action::AssignState { .. });
    let values =
        values(n, deed.seed).into_iter().map(|x| if state { x.abs() } else { x }).collect::<Vec<_>>();
    let mut body = Vec::new();
    codec.encode(isa, &values, None, Position::default(), &mut body);
    let rows = rows.map(|rows| rows.into_iter().flat_map(u32::to_le_bytes).collect::<Vec<_>>());
    let gradient = action == Action::Gradient;
    let (version, own) = shard.slice(ID).unwrap().version(deed.client);
    let push = Push {
        action,
        base: deed
            .seed
            .is_multiple_of(3)
            .then_some(Base { version: version.saturating_sub(2), own: Some(own.saturating_sub(1)) }),
        lr: deed.lr.filter(|_| gradient),
        scale: deed.scale.filter(|_| gradient),
        correction: (gradient && deed.seed.is_multiple_of(2)).then_some(Correction {
            delay_adaptive: true,
            max_staleness: Some(u64::from(deed.seed % 3)),
            reject: deed.seed.is_multiple_of(5),
            momentum_matching: true,
        }),
        indices: rows.as_deref().map(Indices::new),
        ..Push::gradient(
            ID,
            identity(*sequence),
            if rows.is_some() { n } else { ROWS * WIDTH } as u64,
            codec.id(),
            &body,
        )
    };
    let mut outcome = None;
    let slice = shard.slice(ID).unwrap();
    match shard.push_to(&slice, &push, || panic!("nothing is held")) {
        Some(Ok(applied)) => outcome = Some(applied),
        Some(Err(error)) => assert!(matches!(error.kind, Kind::Fenced | Kind::StalePush), "{error}"),
        None => panic!("nothing is held"),
    }
    outcome
}

fn same(a: &Image, b: &Image) {
    assert_eq!(a.standing, b.standing);
    assert_eq!(a.values.as_ref(), b.values.as_ref());
    assert_eq!(a.state.as_ref(), b.state.as_ref());
    assert_eq!((a.values.version, a.state.version), (b.values.version, b.state.version));
}

fn check(optimizer: Optimizer, deeds: &[Deed], cut: usize) {
    let (spec, log) = (spec(optimizer, Apply::Exact), Arc::new(Log::default()));
    let (live, slice) = shard(&spec, Some(log.clone()));
    let mut sequences = [0; 4];
    let mut images = vec![(0, slice.image().unwrap())];
    for (k, deed) in deeds.iter().enumerate() {
        perform(&live, &spec, &mut sequences, deed);
        if k == cut {
            images.push((log.0.lock().unwrap().len(), slice.image().unwrap()));
        }
    }
    let (logged, truth) = (log.0.lock().unwrap().clone(), slice.image().unwrap());
    for (at, image) in images {
        let (restored, copy) = shard(&spec, None);
        copy.restore(&image.standing, image.values.as_ref(), image.state.as_ref()).unwrap();
        same(&copy.image().unwrap(), &image);
        for (k, logged) in logged.iter().enumerate() {
            // A record that the image already includes changes nothing.
            let new = replay(&copy, logged).unwrap();
            assert!(!matches!(logged, Entry::Record(..)) || new == (k >= at));
        }
        same(&copy.image().unwrap(), &truth);
        assert_eq!(restored.counters()[2], live.counters()[2], "identity entries");
        // Both give the same answers to further pushes, repeats included.
        let (mut here, mut there) = (sequences, sequences);
        for client in 1..4 {
            for what in [1, 4, 1, 0] {
                let deed = Deed { client, what, codec: 0, seed: 5, lr: None, scale: None };
                let answers =
                    (perform(&live, &spec, &mut here, &deed), perform(&restored, &spec, &mut there, &deed));
                assert_eq!(answers.0, answers.1);
            }
        }
        same(&copy.image().unwrap(), &slice.image().unwrap());
        // The next round starts from the same state.
        slice.restore(&truth.standing, truth.values.as_ref(), truth.state.as_ref()).unwrap();
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 60, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn an_image_and_later_records_are_the_slice(
        deeds in proptest::collection::vec(deed(), 1..120), which in 0..9_usize, cut in 0..120_usize,
    ) {
        check(optimizers()[which], &deeds, cut.min(deeds.len() - 1));
    }
}

#[test]
fn every_optimizer_is_repeated() {
    for (k, optimizer) in optimizers().into_iter().enumerate() {
        let deed = |i: u32| Deed {
            client: 1 + u64::from(i % 3),
            what: (i % 16) as u8,
            codec: i as usize % 4,
            seed: i.wrapping_mul(0x9E37_79B9) ^ k as u32,
            lr: i.is_multiple_of(4).then_some(0.05),
            scale: i.is_multiple_of(5).then_some(0.5),
        };
        check(optimizer, &(0..250).map(deed).collect::<Vec<_>>(), 120);
    }
}

#[test]
fn an_image_stays_as_it_is_under_pushes() {
    let spec = spec(optimizers()[6], Apply::Exact);
    let (shard, slice) = shard(&spec, None);
    let mut sequences = [0; 4];
    let push = Deed { client: 1, what: 4, codec: 0, seed: 9, lr: None, scale: None };
    perform(&shard, &spec, &mut sequences, &push);
    let image = slice.image().unwrap();
    let before = (image.values.as_ref().to_vec(), image.state.as_ref().to_vec());
    perform(&shard, &spec, &mut sequences, &push);
    assert_eq!((image.standing.version, image.values.version), (1, 1));
    assert_eq!((image.values.as_ref(), image.state.as_ref()), (&*before.0, &*before.1));
    assert_ne!(slice.image().unwrap().values.as_ref(), before.0);
}

#[test]
fn what_does_not_fit_is_refused() {
    let (spec, log) = (spec(optimizers()[0], Apply::Exact), Arc::new(Log::default()));
    let (live, slice) = shard(&spec, Some(log.clone()));
    let mut sequences = [0; 4];
    let push = Deed { client: 1, what: 4, codec: 0, seed: 9, lr: None, scale: None };
    for _ in 0..3 {
        perform(&live, &spec, &mut sequences, &push);
    }
    let (_, empty) = shard(&spec, None);
    let logged = log.0.lock().unwrap().clone();
    assert!(replay(&empty, &logged[0]).unwrap());
    let gap = replay(&empty, &logged[2]).unwrap_err();
    assert!(gap.message.contains("missing"), "{gap}");
    let Entry::Record(record, _, body) = &logged[1] else { panic!() };
    let short = Record { body: &body[1..], ..**record };
    assert_eq!(empty.replay(&short).unwrap_err().kind, Kind::Frame);
    assert_eq!(
        empty.replay(&Record { codec: CodecId::OneBit, body, ..**record }).unwrap_err().kind,
        Kind::Frame
    );
    for momentum in [f64::NAN, f64::INFINITY, -0.5] {
        let error = empty.replay(&Record { momentum, body, ..**record }).unwrap_err();
        assert!(error.kind == Kind::Config && error.message.contains("momentum"), "{error}");
    }
    for beta1 in [f64::NAN, 1.0, -0.5] {
        let error = empty.replay(&Record { beta1: Some(beta1), body, ..**record }).unwrap_err();
        assert!(error.kind == Kind::Config && error.message.contains("beta1"), "{error}");
    }
    assert_eq!(empty.version(1), (1, 1));
    let image = slice.image().unwrap();
    assert_eq!(empty.restore(&image.standing, &[0; 4], &[]).unwrap_err().kind, Kind::Shape);
    let full = |limit| {
        let full = Shard::new(ShardConfig::new(0, limit, Isa::get().unwrap()));
        full.create(&spec, 1, &[(ID, 0)]).unwrap();
        full
    };
    let full = full(full(u64::MAX).meter().used() + 100);
    let refused = full.slice(ID).unwrap().restore(&image.standing, image.values.as_ref(), &[]).unwrap_err();
    assert_eq!(refused.kind, Kind::Capacity);
}

#[test]
fn what_is_accepted_alive_can_be_restored() {
    let spec = spec(optimizers()[6], Apply::Exact);
    let (live, slice) = shard(&spec, None);
    let slots = spec.slots().len();
    let state = vec![0; 4 * ROWS * WIDTH * slots];
    let count = (ROWS * WIDTH) as u64;
    let whole = Push { count, ..plain(1, 1, Action::AssignState { step: MAX_STEP }, &state) };
    let logged = Arc::new(Mutex::new(Vec::new()));
    let gradient = vec![0; 4 * ROWS * WIDTH];
    for push in [whole, Push { count, ..plain(1, 2, Action::Gradient, &gradient) }] {
        let logged = logged.clone();
        live.push(&push, move |result| logged.lock().unwrap().push(result.unwrap().version));
    }
    assert_eq!(*logged.lock().unwrap(), [1, 2]);
    let image = slice.image().unwrap();
    assert_eq!(image.standing.step, MAX_STEP + 1);
    assert_eq!(image.standing.clients[0].assigned, 1);
    let (_, copy) = shard(&spec, None);
    copy.restore(&image.standing, image.values.as_ref(), image.state.as_ref()).unwrap();
    same(&copy.image().unwrap(), &image);
}

fn plain(client: u64, sequence: u64, action: Action, body: &[u8]) -> Push<'_> {
    Push { action, ..Push::gradient(ID, Identity { client, sequence }, 0, CodecId::Float32, body) }
}

#[test]
fn a_hogwild_slice_has_an_image_and_repeats_assignments() {
    let spec = spec(optimizers()[6], Apply::Hogwild);
    let log = Arc::new(Log::default());
    let (live, slice) = shard(&spec, Some(log.clone()));
    let mut sequences = [0; 4];
    let push = Deed { client: 1, what: 4, codec: 0, seed: 9, lr: None, scale: None };
    perform(&live, &spec, &mut sequences, &push);
    let image = slice.image().unwrap();
    let (restored, copy) = shard(&spec, None);
    copy.restore(&image.standing, image.values.as_ref(), image.state.as_ref()).unwrap();
    same(&copy.image().unwrap(), &image);
    let again = perform(&restored, &spec, &mut [0; 4], &push).unwrap();
    assert!(again.duplicate);
    assert_eq!(replay(&copy, &log.0.lock().unwrap()[0]).unwrap_err().kind, Kind::Config);
    perform(&live, &spec, &mut sequences, &Deed { what: 2, ..push.clone() });
    perform(&live, &spec, &mut sequences, &Deed { what: 3, ..push });
    let logged = log.0.lock().unwrap().clone();
    assert!(logged[1..].iter().all(|logged| replay(&copy, logged).unwrap()));
    assert!(!logged[1..].iter().any(|logged| replay(&copy, logged).unwrap()));
    same(&copy.image().unwrap(), &slice.image().unwrap());
}
