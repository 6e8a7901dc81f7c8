//! The in-process store through its public verbs, and the slices beneath it.
#![allow(clippy::unwrap_used, clippy::panic)]

use fastps_core::codec::{Codec, CodecId, ErrorFeedback};
use fastps_core::dtype::{DType, View};
use fastps_core::error::Kind;
use fastps_core::frame::{Action, Applied, Identity, Push};
use fastps_core::isa::Isa;
use fastps_core::optim::{Adam, Optimizer, Sgd};
use fastps_core::policy::{Admission, Held, Policy};
use fastps_core::record::{Record, Sink};
use fastps_core::shard::{Shard, ShardConfig};
use fastps_core::slice::{Resolved, Slice};
use fastps_core::store::{Store, StoreOptions};
use fastps_core::tensor::{Apply, SliceId, TensorSpec};
use fastps_core::verbs::{Fate, Gradient, ParameterServer, PushError, PushOptions};
use std::sync::{Arc, Mutex, mpsc};
use std::time::Duration;

const SECOND: Duration = Duration::from_secs(1);
const SLICE: usize = 63 * 4096;

fn spec(name: &str, n: usize, apply: Apply, optimizer: Optimizer) -> TensorSpec {
    TensorSpec {
        name: name.into(),
        shape: vec![n as u64],
        dtype: DType::Float32,
        apply,
        group: "default".into(),
        optimizer,
    }
}

fn ledger() -> Optimizer {
    Optimizer::Sgd(Sgd { lr: 1.0, ..Sgd::default() })
}

fn options() -> PushOptions {
    PushOptions {
        codec: Codec::Float32,
        lr: None,
        scale: None,
        based_on: None,
        feedback: None,
        check_finite: true,
        timeout: 10 * SECOND,
    }
}

fn gradient(name: &str, values: Vec<f32>) -> Gradient {
    Gradient { name: name.into(), shape: vec![values.len() as u64], values: Arc::new(values) }
}

fn pull(store: &dyn ParameterServer, name: &str) -> Vec<f32> {
    let ticket = store.pull_async(vec![name.into()], SECOND).unwrap();
    ticket.wait(SECOND).unwrap().unwrap().values.remove(0).into()
}

fn counter(store: &dyn ParameterServer, name: &str) -> u64 {
    let stats = store.stats(SECOND).unwrap();
    stats.shards[0].1.iter().find(|(n, _)| n == name).unwrap().1
}

#[test]
fn pushes_from_many_threads_lose_nothing() {
    let store = Store::new(StoreOptions::default()).unwrap();
    let n = SLICE + 7;
    store.register(spec("w", n, Apply::Exact, ledger()), View::Float32(&vec![0.0; n]), SECOND).unwrap();
    std::thread::scope(|scope| {
        for _ in 0..3 {
            let client = store.another().unwrap();
            scope.spawn(move || {
                for _ in 0..20 {
                    client.push(&[gradient("w", vec![-1.0; n])], &options()).unwrap();
                }
            });
        }
    });
    assert!(pull(&store, "w").iter().all(|x| *x == 60.0));
    assert_eq!(counter(&store, "versions"), 2 * 61);
}

#[test]
fn hogwild_alone_equals_exact() {
    let store = Store::new(StoreOptions { threads: Some(1), ..StoreOptions::default() }).unwrap();
    let adam = Optimizer::Adam(Adam { amsgrad: true, ..Adam::default() });
    for n in [0, 1, 1023, 1024, 5000, SLICE + 1] {
        let initial: Vec<f32> = (0..n).map(|i| (i as f32).sin()).collect();
        for apply in [Apply::Exact, Apply::Hogwild] {
            store
                .register(spec(&format!("{apply:?}{n}"), n, apply, adam), View::Float32(&initial), SECOND)
                .unwrap();
        }
        for step in 0..3 {
            let g: Vec<f32> = (0..n).map(|i| ((i * 7 + step) as f32).cos()).collect();
            for apply in ["Exact", "Hogwild"] {
                store.push(&[gradient(&format!("{apply}{n}"), g.clone())], &options()).unwrap();
            }
        }
        let bits = |values: Vec<f32>| values.into_iter().map(f32::to_bits).collect::<Vec<_>>();
        assert_eq!(bits(pull(&store, &format!("Exact{n}"))), bits(pull(&store, &format!("Hogwild{n}"))));
        let state = |apply: &str| store.state(&format!("{apply}{n}"), SECOND).unwrap();
        assert_eq!(state("Exact"), state("Hogwild"));
        store.load_state(&format!("Hogwild{n}"), &state("Exact"), SECOND).unwrap();
    }
}

#[test]
fn threads_of_one_call_change_no_bit() {
    let n = 5 * SLICE + 3;
    let g: Vec<f32> = (0..n).map(|i| (i as f32 * 0.37).sin()).collect();
    let values: Vec<_> = [1, 3]
        .into_iter()
        .map(|threads| {
            let store =
                Store::new(StoreOptions { threads: Some(threads), ..StoreOptions::default() }).unwrap();
            store
                .register(
                    spec("w", n, Apply::Exact, Optimizer::Adam(Adam::default())),
                    View::Float32(&g),
                    SECOND,
                )
                .unwrap();
            store.push(&[gradient("w", g.clone())], &options()).unwrap();
            pull(&store, "w")
        })
        .collect();
    assert_eq!(values[0], values[1]);
}

#[test]
fn staleness_counts_the_changes_of_others() {
    let store = Store::new(StoreOptions::default()).unwrap();
    store.register(spec("w", 3, Apply::Exact, ledger()), View::Float32(&[0.0; 3]), SECOND).unwrap();
    let other = store.another().unwrap();
    let base = Arc::new(store.versions(&["w".into()], SECOND).unwrap());
    let push = |client: &dyn ParameterServer, based_on| {
        let options = PushOptions { based_on, ..options() };
        client.push(&[gradient("w", vec![1.0; 3])], &options).unwrap()[0].staleness
    };
    assert_eq!(push(&store, None), None);
    assert_eq!(push(&store, Some(base.clone())), Some(0));
    push(&*other, None);
    push(&*other, None);
    assert_eq!(push(&store, Some(base.clone())), Some(2));
    assert_eq!(push(&*other, Some(base)), None, "a base of another client is no base");
}

#[test]
fn a_bad_push_changes_nothing() {
    let store = Store::new(StoreOptions::default()).unwrap();
    for name in ["a", "b"] {
        store.register(spec(name, 4, Apply::Exact, ledger()), View::Float32(&[1.0; 4]), SECOND).unwrap();
    }
    let refused = |gradients: &[Gradient], options: &PushOptions| match store.push(gradients, options) {
        Err(PushError::Refused(error)) => error,
        other => panic!("{other:?}"),
    };
    let good = gradient("a", vec![1.0; 4]);
    let bad = gradient("b", vec![1.0, 2.0, f32::NAN, 4.0]);
    let error = refused(&[good.clone(), bad], &options());
    assert_eq!((error.kind, error.tensor.as_deref()), (Kind::NonFinite, Some("b")));
    assert!(error.message.contains("index 2"));
    assert_eq!(refused(&[good.clone(), gradient("b", vec![1.0; 5])], &options()).kind, Kind::Shape);
    assert_eq!(refused(&[good.clone(), gradient("c", vec![1.0; 4])], &options()).kind, Kind::UnknownTensor);
    assert_eq!(refused(&[good.clone(), good.clone()], &options()).kind, Kind::Config);
    assert_eq!(
        refused(std::slice::from_ref(&good), &PushOptions { lr: Some(f64::NAN), ..options() }).kind,
        Kind::Config
    );
    assert_eq!(
        refused(std::slice::from_ref(&good), &PushOptions { codec: Codec::OneBit, ..options() }).kind,
        Kind::Config
    );
    let other = spec("a", 4, Apply::Hogwild, ledger());
    assert_eq!(store.register(other, View::Float32(&[1.0; 4]), SECOND).unwrap_err().kind, Kind::Config);
    store.register(spec("a", 4, Apply::Exact, ledger()), View::Float32(&[9.0; 4]), SECOND).unwrap();
    assert_eq!(pull(&store, "a"), [1.0; 4]);
    assert_eq!(counter(&store, "versions"), 2);
}

#[test]
fn a_registration_that_does_not_fit_is_refused() {
    let store = Store::new(StoreOptions { memory_limit: 1 << 20, ..StoreOptions::default() }).unwrap();
    let big = spec("big", SLICE, Apply::Exact, ledger());
    assert_eq!(
        store.register(big, View::Float32(&vec![0.0; SLICE]), SECOND).unwrap_err().kind,
        Kind::Capacity
    );
    assert_eq!(counter(&store, "memory_used"), 0);
    store.register(spec("small", 10, Apply::Exact, ledger()), View::Float32(&[0.0; 10]), SECOND).unwrap();
    store.unregister("small", SECOND).unwrap();
    assert_eq!(counter(&store, "memory_used"), 0);
}

#[test]
fn error_feedback_telescopes() {
    let store = Store::new(StoreOptions::default()).unwrap();
    let n = SLICE + 100;
    store.register(spec("w", n, Apply::Exact, ledger()), View::Float32(&vec![0.0; n]), SECOND).unwrap();
    let feedback = Arc::new(Mutex::new(ErrorFeedback::new()));
    let options = PushOptions { codec: Codec::OneBit, feedback: Some(feedback.clone()), ..options() };
    let mut sum = vec![0.0_f64; n];
    for step in 0..20 {
        let g: Vec<f32> = (0..n).map(|i| ((i * 31 + step * 17) as f32).sin()).collect();
        sum.iter_mut().zip(&g).for_each(|(s, g)| *s += f64::from(*g));
        store.push(&[gradient("w", g)], &options).unwrap();
    }
    let w = pull(&store, "w");
    let mut feedback = feedback.lock().unwrap();
    let residual = feedback.residual("w", n).unwrap();
    for i in 0..n {
        assert!((f64::from(residual[i]) - f64::from(w[i]) - sum[i]).abs() < 1e-4, "{i}");
    }
}

// Below the verbs: one shard, pushes made by hand.

fn shard_of(n: usize, apply: Apply, policy: Option<Arc<dyn Policy>>) -> Shard {
    let mut config = ShardConfig::new(3, u64::MAX, Isa::best());
    if let Some(policy) = policy {
        config.policy = policy;
    }
    let shard = Shard::new(config);
    shard.create(&Arc::new(spec("w", n, apply, ledger())), 0, &[(SliceId(5), 0)]).unwrap();
    shard
}

fn push_to(
    shard: &Shard,
    identity: Identity,
    body: &[f32],
) -> mpsc::Receiver<fastps_core::error::Result<Applied>> {
    let (done, answer) = mpsc::channel();
    let bytes: Vec<u8> = body.iter().flat_map(|x| x.to_le_bytes()).collect();
    let push = Push {
        slice: SliceId(5),
        action: Action::Gradient,
        identity,
        base: None,
        lr: None,
        scale: None,
        count: body.len() as u64,
        codec: CodecId::Float32,
        body: &bytes,
        trusted: false,
        once: false,
    };
    shard.push(&push, move |result| done.send(result).unwrap());
    answer
}

fn identity(sequence: u64) -> Identity {
    Identity { client: 77, sequence }
}

#[test]
fn a_repeat_is_answered_and_not_applied() {
    for apply in [Apply::Exact, Apply::Hogwild] {
        let shard = shard_of(3, apply, None);
        let first = push_to(&shard, identity(1), &[-1.0; 3]).recv().unwrap().unwrap();
        let again = push_to(&shard, identity(1), &[-1.0; 3]).recv().unwrap().unwrap();
        assert_eq!(again, Applied { duplicate: true, ..first });
        assert_eq!(shard.pull(0, SliceId(5)).unwrap().version, 1);
        assert!(matches!(shard.resolve(SliceId(5), identity(1)), Ok(Resolved::Applied(a)) if a == first));
        assert_eq!(shard.resolve(SliceId(5), identity(2)), Ok(Resolved::Fenced));
        assert_eq!(push_to(&shard, identity(2), &[-1.0; 3]).recv().unwrap().unwrap_err().kind, Kind::Fenced);
        for sequence in 3..100 {
            push_to(&shard, identity(sequence), &[0.0; 3]).recv().unwrap().unwrap();
        }
        assert_eq!(shard.resolve(SliceId(5), identity(1)), Ok(Resolved::Unknown));
        let late = push_to(&shard, identity(1), &[-1.0; 3]).recv().unwrap().unwrap_err();
        assert_eq!((late.kind, late.shard), (Kind::UnknownOutcome, Some(3)));
        let values = shard.pull(0, SliceId(5)).unwrap();
        assert_eq!(values.as_ref(), [1.0_f32.to_le_bytes(); 3].concat());
    }
}

#[test]
fn a_pinned_version_stays_whole_while_pushes_go_on() {
    let shard = shard_of(5000, Apply::Exact, None);
    let copies = || shard.counters().into_iter().find(|(name, _)| *name == "slice_copies").unwrap().1;
    push_to(&shard, identity(1), &vec![-1.0; 5000]).recv().unwrap().unwrap();
    drop(shard.pull(0, SliceId(5)).unwrap());
    push_to(&shard, identity(2), &vec![-1.0; 5000]).recv().unwrap().unwrap();
    assert_eq!(copies(), 0, "an undisturbed pull copies nothing");
    let pinned = shard.pull(0, SliceId(5)).unwrap();
    for sequence in 3..10 {
        push_to(&shard, identity(sequence), &vec![-1.0; 5000]).recv().unwrap().unwrap();
    }
    assert_eq!(copies(), 1, "one copy per pin, not per push");
    assert_eq!(pinned.as_ref(), vec![2.0_f32.to_le_bytes(); 5000].concat());
    assert_eq!(shard.pull(0, SliceId(5)).unwrap().as_ref(), vec![9.0_f32.to_le_bytes(); 5000].concat());
}

#[test]
fn versions_that_readers_keep_are_counted_and_bounded() {
    let n = 5000;
    let buffer = 64 * 313;
    // The slice's parameters and spare copy, some bytes for the rest, and two more copies.
    let shard = Shard::new(ShardConfig::new(0, 4 * buffer + 600, Isa::best()));
    shard.create(&Arc::new(spec("w", n, Apply::Exact, ledger())), 0, &[(SliceId(5), 0)]).unwrap();
    let counter = |name: &str| shard.counters().into_iter().find(|(n, _)| *n == name).unwrap().1;
    let (before, limit) = (counter("memory_used"), counter("memory_limit"));
    let (mut pins, mut applied) = (Vec::new(), 0_u64);
    let refused = loop {
        pins.push(shard.pull(0, SliceId(5)).unwrap());
        match push_to(&shard, identity(applied + 1), &vec![-1.0; n]).recv().unwrap() {
            Ok(_) => applied += 1,
            Err(error) => break error,
        }
        assert!(counter("memory_used") <= limit);
    };
    assert_eq!(refused.kind, Kind::Capacity);
    assert!(refused.retry_after_ms.is_some() && refused.tensor.as_deref() == Some("w"));
    assert!(applied >= 2, "one copy is the slice's own, further ones are taken from the limit");
    for (k, pin) in pins.iter().enumerate().take(applied as usize + 1) {
        assert_eq!(
            pin.as_ref(),
            vec![(k as f32).to_le_bytes(); n].concat(),
            "every reader keeps its version"
        );
    }
    drop(pins);
    assert_eq!(counter("memory_used"), before, "what the readers kept is given back");
    push_to(&shard, identity(applied + 1), &vec![-1.0; n]).recv().unwrap().unwrap();
}

#[derive(Debug, Default)]
struct HoldAll(Mutex<Vec<Held>>);

impl Policy for HoldAll {
    fn admit(&self, _slice: &Slice, _push: &Push<'_>) -> Admission {
        Admission::Hold
    }
    fn hold(&self, held: Held) {
        self.0.lock().unwrap().push(held);
    }
}

#[test]
fn a_held_push_completes_later_or_is_fenced() {
    for apply in [Apply::Exact, Apply::Hogwild] {
        let policy = Arc::new(HoldAll::default());
        let shard = shard_of(3, apply, Some(policy.clone()));
        let answers: Vec<_> =
            (1..=4).map(|sequence| push_to(&shard, identity(sequence), &[-1.0; 3])).collect();
        let repeat = push_to(&shard, identity(1), &[-1.0; 3]);
        assert!(answers.iter().chain([&repeat]).all(|answer| answer.try_recv().is_err()));
        assert_eq!(shard.resolve(SliceId(5), identity(2)), Ok(Resolved::Fenced));
        let mut held = std::mem::take(&mut *policy.0.lock().unwrap());
        assert_eq!(held.len(), 4, "a repeat of a held push waits, it is not held again");
        drop(held.pop());
        assert_eq!(answers[3].recv().unwrap().unwrap_err().kind, Kind::Unavailable);
        std::thread::spawn(move || held.into_iter().for_each(Held::release)).join().unwrap();
        assert_eq!(answers[0].recv().unwrap().unwrap().version, 1);
        assert!(repeat.recv().unwrap().unwrap().duplicate);
        assert_eq!(answers[1].recv().unwrap().unwrap_err().kind, Kind::Fenced);
        assert_eq!(answers[2].recv().unwrap().unwrap().version, 2);
        assert_eq!(shard.pull(0, SliceId(5)).unwrap().as_ref(), [2.0_f32.to_le_bytes(); 3].concat());
    }
}

#[test]
fn a_fence_outlives_the_held_push() {
    for apply in [Apply::Exact, Apply::Hogwild] {
        let policy = Arc::new(HoldAll::default());
        let shard = shard_of(3, apply, Some(policy.clone()));
        let first = push_to(&shard, identity(1), &[-1.0; 3]);
        assert_eq!(shard.resolve(SliceId(5), identity(1)), Ok(Resolved::Fenced));
        let held = policy.0.lock().unwrap().pop().unwrap();
        held.refuse(fastps_core::error::Error::new(Kind::Config, "no"));
        assert_eq!(first.recv().unwrap().unwrap_err().kind, Kind::Config);
        let late = push_to(&shard, identity(1), &[-1.0; 3]);
        assert_eq!(late.recv().unwrap().unwrap_err().kind, Kind::Fenced, "fenced is for ever");
    }
}

#[test]
fn an_absurd_step_count_is_refused() {
    let store = Store::new(StoreOptions::default()).unwrap();
    store
        .register(
            spec("w", 3, Apply::Exact, Optimizer::Adam(Adam::default())),
            View::Float32(&[0.0; 3]),
            SECOND,
        )
        .unwrap();
    let mut state = store.state("w", SECOND).unwrap();
    state.steps = vec![u64::MAX];
    let Err(PushError::Refused(error)) = store.load_state("w", &state, SECOND) else { panic!("accepted") };
    assert_eq!(error.kind, Kind::Config);
    store.push(&[gradient("w", vec![1.0; 3])], &options()).unwrap();
}

#[test]
fn a_push_that_is_held_beyond_its_deadline_is_in_doubt() {
    let policy = Arc::new(HoldAll::default());
    let store = Store::new(StoreOptions { policy: policy.clone(), ..StoreOptions::default() }).unwrap();
    std::thread::scope(|scope| {
        let release = scope.spawn(|| {
            loop {
                if let Some(held) = policy.0.lock().unwrap().pop() {
                    return held.release();
                }
                std::thread::yield_now();
            }
        });
        store.register(spec("w", 3, Apply::Exact, ledger()), View::Float32(&[0.0; 3]), 60 * SECOND).unwrap();
        release.join().unwrap();
    });
    let short = PushOptions { timeout: Duration::from_millis(20), ..options() };
    let Err(PushError::Partial(partial)) = store.push(&[gradient("w", vec![-1.0; 3])], &short) else {
        panic!("the push is held");
    };
    assert_eq!((partial.error.kind, partial.in_doubt.len()), (Kind::Deadline, 1));
    assert_eq!(partial.in_doubt[0].result(SECOND), Ok(Fate::Fenced));
    policy.0.lock().unwrap().drain(..).for_each(Held::release);
    assert_eq!(pull(&store, "w"), [0.0; 3], "what was fenced is never applied");
}

type Entry = (u64, u64, f64, Vec<u8>);

#[derive(Debug, Default)]
struct Remember(Mutex<Vec<Entry>>);

impl Sink for Remember {
    fn record(&self, record: &Record<'_>) {
        let entry = (record.slice.0, record.version, record.lr, record.body.to_vec());
        self.0.lock().unwrap().push(entry);
    }
}

#[test]
fn every_applied_change_leaves_one_record() {
    let sink = Arc::new(Remember::default());
    let store = Store::new(StoreOptions { sink: Some(sink.clone()), ..StoreOptions::default() }).unwrap();
    store.register(spec("w", 2, Apply::Exact, ledger()), View::Float32(&[0.0; 2]), SECOND).unwrap();
    store.push(&[gradient("w", vec![1.0; 2])], &PushOptions { lr: Some(0.5), ..options() }).unwrap();
    store.push(&[gradient("w", vec![f32::NAN; 2])], &options()).unwrap_err();
    let records = sink.0.lock().unwrap();
    let one = [1.0_f32.to_le_bytes(); 2].concat();
    assert_eq!(*records, [(1, 1, 1.0, vec![0; 8]), (1, 2, 0.5, one)]);
}
