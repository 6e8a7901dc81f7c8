//! The in-process store through its public verbs, and the slices beneath it.

use fastps_core::codec::{Codec, CodecId, ErrorFeedback, Position};
use fastps_core::dtype::View;
use fastps_core::error::{Error, Kind};
use fastps_core::frame::{Applied, Identity, Push};
use fastps_core::isa::Isa;
use fastps_core::optim::{Adam, Optimizer, Sgd};
use fastps_core::policy::{Admission, Held, Policy};
use fastps_core::record::{Record, Sink};
use fastps_core::shard::{Shard, ShardConfig};
use fastps_core::slice::{Resolved, Slice};
use fastps_core::store::{Store, StoreOptions};
use fastps_core::tensor::{Apply, SliceId, TensorSpec};
use fastps_core::verbs::prelude::*;
use fastps_core::verbs::{Fate, Gradient, PushError, PushOptions};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, mpsc};
use std::time::{Duration, Instant};

const SECOND: Duration = Duration::from_secs(1);
/// The deadline for answers that must come.
const PATIENT: Duration = Duration::from_mins(1);
const SLICE: usize = 63 * 4096;

fn spec(name: &str, n: usize, apply: Apply, optimizer: Optimizer) -> TensorSpec {
    TensorSpec { apply, ..TensorSpec::new(name, [n as u64], optimizer) }
}

fn ledger() -> Optimizer {
    Optimizer::Sgd(Sgd { lr: 1.0, ..Sgd::default() })
}

fn options() -> PushOptions {
    PushOptions { timeout: 10 * SECOND, ..PushOptions::default() }
}

fn gradient(name: &str, values: Vec<f32>) -> Gradient {
    Gradient { name: name.into(), shape: vec![values.len() as u64], values: Arc::new(values) }
}

fn pull(store: &dyn ParameterServer, name: &str) -> Vec<f32> {
    let ticket = store.pull_async(vec![name.into()], SECOND).unwrap();
    let values = ticket.wait(SECOND).unwrap().unwrap().values.remove(0);
    values.view().float32s().unwrap().to_vec()
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
        refused(std::slice::from_ref(&good), &PushOptions { codec: Some(Codec::OneBit), ..options() }).kind,
        Kind::Config
    );
    let other = spec("a", 4, Apply::Hogwild, ledger());
    assert_eq!(store.register(other, View::Float32(&[1.0; 4]), SECOND).unwrap_err().kind, Kind::Precondition);
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
    let options = PushOptions { codec: Some(Codec::OneBit), feedback: Some(feedback.clone()), ..options() };
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

// Below the verbs: one shard and hand-made pushes.

fn shard_of(n: usize, apply: Apply, policy: Option<Arc<dyn Policy>>) -> Shard {
    let mut config = ShardConfig::new(3, u64::MAX, Isa::best());
    if let Some(policy) = policy {
        config.policy = Some(policy);
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
    shard.push(&frame(5, identity, CodecId::Float32, body.len(), &bytes), move |result| {
        drop(done.send(result));
    });
    answer
}

fn frame(slice: u64, identity: Identity, codec: CodecId, elements: usize, body: &[u8]) -> Push<'_> {
    Push::gradient(SliceId(slice), identity, elements as u64, codec, body)
}

fn identity(sequence: u64) -> Identity {
    Identity { client: 77, sequence }
}

/// The tensors of fault tests: one of 3 slices and 100 small ones, each once as an SGD counter and once with
/// Adam.
struct Site {
    shard: Shard,
    /// Receives the same pushes without faults.
    quiet: Shard,
    /// Identifier, elements, whether it is a counter.
    slices: Vec<(u64, usize, bool)>,
}

impl Site {
    fn new(apply: Apply, policy: Option<Arc<dyn Policy>>) -> Self {
        let plain = ShardConfig::new(3, u64::MAX, Isa::best());
        let config = match policy {
            Some(policy) => {
                ShardConfig { policy: Some(policy), ..ShardConfig::new(3, u64::MAX, Isa::best()) }
            }
            None => ShardConfig::new(3, u64::MAX, Isa::best()),
        };
        let mut site = Self { shard: Shard::new(config), quiet: Shard::new(plain), slices: Vec::new() };
        for optimizer in [ledger(), Optimizer::Adam(Adam::default())] {
            let counts = optimizer == ledger();
            for (k, n) in std::iter::once(2 * SLICE + 5).chain([10; 100]).enumerate() {
                let spec = Arc::new(spec(&format!("{k} {counts}"), n, apply, optimizer));
                let first = 1 + site.slices.len() as u64;
                let ids: Vec<_> =
                    (0..spec.slice_count()).map(|index| (SliceId(first + index as u64), index)).collect();
                site.shard.create(&spec, 0, &ids).unwrap();
                site.quiet.create(&spec, 0, &ids).unwrap();
                let slice = |(id, index): &(SliceId, usize)| (id.0, spec.slice_range(*index).len(), counts);
                site.slices.extend(ids.iter().map(slice));
            }
        }
        site
    }

    /// Plays a fault on every slice with two clients, Float32 and 1-bit, and compares. `play` returns the
    /// applied values in order.
    fn everywhere(&self, play: impl Fn(&Scene<'_>) -> Vec<f32>) {
        for &(slice, elements, counts) in &self.slices {
            let (mut sum, mut version) = (0.0, 0);
            for (client, codec) in [(77, Codec::Float32), (78, Codec::OneBit)] {
                let scene = Scene { shard: &self.shard, client, codec, slice, elements, version };
                let applied = play(&scene);
                let quiet = Scene { shard: &self.quiet, ..scene };
                for (k, value) in applied.iter().enumerate() {
                    answer(&quiet.push(1 + k as u64, *value)).unwrap();
                }
                sum -= applied.iter().sum::<f32>();
                version += applied.len() as u64;
            }
            let pulled = self.shard.pull(0, SliceId(slice)).unwrap();
            assert_eq!(pulled.version, version, "slice {slice}");
            assert!(pulled.as_ref() == self.quiet.pull(0, SliceId(slice)).unwrap().as_ref(), "slice {slice}");
            let state = |shard: &Shard| shard.pull_state(0, SliceId(slice)).unwrap().as_ref().to_vec();
            assert!(state(&self.shard) == state(&self.quiet), "state of slice {slice}");
            if counts {
                let one = sum.to_le_bytes();
                assert!(
                    pulled.as_ref().chunks_exact(4).all(|bytes| bytes == one),
                    "slice {slice}: not {sum}"
                );
            }
        }
    }
}

/// One client at one slice.
struct Scene<'a> {
    shard: &'a Shard,
    client: u64,
    codec: Codec,
    slice: u64,
    elements: usize,
    /// The slice's version before this client.
    version: u64,
}

impl Scene<'_> {
    fn identity(&self, sequence: u64) -> Identity {
        Identity { client: self.client, sequence }
    }

    /// Pushes this value to every element.
    fn push(&self, sequence: u64, value: f32) -> mpsc::Receiver<fastps_core::error::Result<Applied>> {
        let (done, answer) = mpsc::channel();
        let mut body = Vec::new();
        let values = vec![value; self.elements];
        self.codec.encode(Isa::best(), &values, None, Position::default(), &mut body);
        let push = frame(self.slice, self.identity(sequence), self.codec.id(), self.elements, &body);
        self.shard.push(&push, move |result| drop(done.send(result)));
        answer
    }

    fn resolve(&self, sequence: u64) -> fastps_core::error::Result<Resolved> {
        self.shard.resolve(SliceId(self.slice), self.identity(sequence))
    }
}

fn answer(
    receiver: &mpsc::Receiver<fastps_core::error::Result<Applied>>,
) -> fastps_core::error::Result<Applied> {
    receiver.recv_timeout(PATIENT).unwrap()
}

#[test]
fn a_repeat_is_answered_and_not_applied() {
    for apply in [Apply::Exact, Apply::Hogwild] {
        Site::new(apply, None).everywhere(|scene| {
            let first = answer(&scene.push(1, -1.0)).unwrap();
            let again = answer(&scene.push(1, -1.0)).unwrap();
            assert_eq!(again, Applied { duplicate: true, momentum: None, ..first });
            assert_eq!(scene.shard.pull(0, SliceId(scene.slice)).unwrap().version, scene.version + 1);
            assert!(matches!(scene.resolve(1), Ok(Resolved::Applied(a)) if a == first.into()));
            assert_eq!(scene.resolve(2), Ok(Resolved::Fenced));
            assert_eq!(answer(&scene.push(2, -1.0)).unwrap_err().kind, Kind::Fenced);
            let mut applied = vec![-1.0];
            // Beyond its window a slice does not remember, and says so. The big slices are left out to save
            // time.
            if scene.elements <= 10 {
                for sequence in 3..100 {
                    answer(&scene.push(sequence, -0.5)).unwrap();
                    applied.push(-0.5);
                }
                assert_eq!(scene.resolve(1), Ok(Resolved::Unknown));
                let late = answer(&scene.push(1, -1.0)).unwrap_err();
                assert_eq!((late.kind, late.shard), (Kind::UnknownOutcome, Some(3)));
            }
            applied
        });
    }
}

#[test]
fn a_pinned_version_stays_whole_while_pushes_go_on() {
    let shard = shard_of(5000, Apply::Exact, None);
    let copies = || shard.counters().into_iter().find(|(name, _)| *name == "slice_copies").unwrap().1;
    push_to(&shard, identity(1), &vec![-1.0; 5000]).recv_timeout(PATIENT).unwrap().unwrap();
    drop(shard.pull(0, SliceId(5)).unwrap());
    push_to(&shard, identity(2), &vec![-1.0; 5000]).recv_timeout(PATIENT).unwrap().unwrap();
    assert_eq!(copies(), 0, "an undisturbed pull copies nothing");
    let pinned = shard.pull(0, SliceId(5)).unwrap();
    for sequence in 3..10 {
        push_to(&shard, identity(sequence), &vec![-1.0; 5000]).recv_timeout(PATIENT).unwrap().unwrap();
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
    let shard = Shard::new(ShardConfig::new(0, 4 * buffer + 4600, Isa::best()));
    shard.create(&Arc::new(spec("w", n, Apply::Exact, ledger())), 0, &[(SliceId(5), 0)]).unwrap();
    let counter = |name: &str| shard.counters().into_iter().find(|(n, _)| *n == name).unwrap().1;
    let limit = counter("memory_limit");
    let (mut pins, mut applied) = (Vec::new(), 0_u64);
    let refused = loop {
        pins.push(shard.pull(0, SliceId(5)).unwrap());
        assert!(pins.len() < 10, "there is no limit");
        match push_to(&shard, identity(applied + 1), &vec![-1.0; n]).recv_timeout(PATIENT).unwrap() {
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
    assert_eq!(counter("memory_copies"), 0, "the readers' memory is returned");
    push_to(&shard, identity(applied + 1), &vec![-1.0; n]).recv_timeout(PATIENT).unwrap().unwrap();
}

/// Holds every push unless it is open.
#[derive(Debug, Default)]
struct HoldAll {
    held: Mutex<Vec<Held>>,
    open: AtomicBool,
}

impl HoldAll {
    fn take(&self) -> Vec<Held> {
        std::mem::take(&mut *self.held.lock().unwrap())
    }
}

impl Policy for HoldAll {
    fn admit(&self, _slice: &Slice, _push: &Push<'_>) -> Admission {
        if self.open.load(Ordering::SeqCst) { Admission::Apply } else { Admission::Hold }
    }
    fn hold(&self, held: Held) {
        self.held.lock().unwrap().push(held);
    }
}

/// Runs the work on another thread; it must end in time.
fn elsewhere(work: impl FnOnce() + Send + 'static) {
    let (done, ended) = mpsc::channel();
    std::thread::spawn(move || {
        work();
        done.send(()).unwrap();
    });
    ended.recv_timeout(PATIENT).unwrap();
}

#[test]
fn a_held_push_completes_later_or_is_fenced() {
    for apply in [Apply::Exact, Apply::Hogwild] {
        let policy = Arc::new(HoldAll::default());
        Site::new(apply, Some(policy.clone())).everywhere(|scene| {
            let answers: Vec<_> = (1..=4).map(|sequence| scene.push(sequence, -(sequence as f32))).collect();
            let repeat = scene.push(1, -1.0);
            assert!(answers.iter().chain([&repeat]).all(|answer| answer.try_recv().is_err()));
            assert_eq!(scene.resolve(2), Ok(Resolved::Fenced));
            let mut held = policy.take();
            assert_eq!(held.len(), 4, "a repeat of a held push waits, it is not held again");
            drop(held.pop());
            assert_eq!(answer(&answers[3]).unwrap_err().kind, Kind::Unavailable);
            elsewhere(move || held.into_iter().for_each(Held::release));
            assert_eq!(answer(&answers[0]).unwrap().version, scene.version + 1);
            assert!(answer(&repeat).unwrap().duplicate);
            assert_eq!(answer(&answers[1]).unwrap_err().kind, Kind::Fenced);
            assert_eq!(answer(&answers[2]).unwrap().version, scene.version + 2);
            vec![-1.0, -3.0]
        });
    }
}

#[test]
fn a_fence_outlives_the_held_push() {
    for apply in [Apply::Exact, Apply::Hogwild] {
        let policy = Arc::new(HoldAll::default());
        Site::new(apply, Some(policy.clone())).everywhere(|scene| {
            let first = scene.push(1, -1.0);
            assert_eq!(scene.resolve(1), Ok(Resolved::Fenced));
            let held = policy.take().pop().unwrap();
            held.refuse(fastps_core::error::Error::new(Kind::Config, "no"));
            assert_eq!(answer(&first).unwrap_err().kind, Kind::Config);
            let late = scene.push(1, -1.0);
            assert!(policy.take().is_empty(), "what is fenced is answered at once");
            assert_eq!(answer(&late).unwrap_err().kind, Kind::Fenced, "fenced is for ever");
            let next = scene.push(2, -2.0);
            elsewhere({
                let held = policy.take();
                move || held.into_iter().for_each(Held::release)
            });
            answer(&next).unwrap();
            vec![-2.0]
        });
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
    let store = Store::new(StoreOptions { policy: Some(policy.clone()), ..StoreOptions::default() }).unwrap();
    let shapes: Vec<_> = std::iter::once(2 * SLICE + 5).chain([10; 100]).collect();
    let name =
        |k: usize, owner: Option<usize>| owner.map_or(format!("{k}"), |owner| format!("{owner} adam {k}"));
    let tensors: Vec<_> = [None, Some(0), Some(1)]
        .into_iter()
        .flat_map(|owner| shapes.iter().enumerate().map(move |(k, n)| (k, *n, owner)))
        .collect();
    let mirror = Store::new(StoreOptions::default()).unwrap();
    let (registered, begin) = (AtomicBool::new(false), Instant::now());
    std::thread::scope(|scope| {
        let release = scope.spawn(|| {
            while !registered.load(Ordering::SeqCst) && begin.elapsed() < PATIENT {
                policy.take().into_iter().for_each(Held::release);
                std::thread::yield_now();
            }
        });
        for (k, n, owner) in &tensors {
            let optimizer = if owner.is_none() { ledger() } else { Optimizer::Adam(Adam::default()) };
            for store in [&store, &mirror] {
                let spec = spec(&name(*k, *owner), *n, Apply::Exact, optimizer);
                store.register(spec, View::Float32(&vec![0.0; *n]), PATIENT).unwrap();
            }
        }
        registered.store(true, Ordering::SeqCst);
        release.join().unwrap();
    });
    let clients = [store.another().unwrap(), store.another().unwrap()];
    let feedbacks = [None, Some(Arc::new(Mutex::new(ErrorFeedback::new())))];
    let gradients = |client: usize, value: f32| -> Vec<Gradient> {
        let own = tensors.iter().filter(|(_, _, owner)| owner.is_none_or(|owner| owner == client));
        own.map(|(k, n, owner)| gradient(&name(*k, *owner), vec![value; *n])).collect()
    };
    let how = |client: usize, timeout: Duration| {
        let feedback: Option<Arc<Mutex<ErrorFeedback>>> = feedbacks[client].clone();
        let codec = if feedback.is_some() { Codec::OneBit } else { Codec::Float32 };
        PushOptions { codec: Some(codec), feedback, timeout, ..options() }
    };
    for (client, store) in clients.iter().enumerate() {
        let short = how(client, Duration::from_millis(20));
        let Err(PushError::Partial(partial)) = store.push(&gradients(client, -1.0), &short) else {
            panic!("the push is held");
        };
        assert_eq!((partial.error.kind, partial.in_doubt.len()), (Kind::Deadline, 2 * 103));
        for doubt in &partial.in_doubt {
            assert_eq!(doubt.result(PATIENT), Ok(Fate::Fenced));
        }
    }
    policy.take().into_iter().for_each(Held::release);
    let zeros = |n: usize| vec![0.0_f32; n];
    for (k, n, owner) in &tensors {
        assert_eq!(pull(&store, &name(*k, *owner)), zeros(*n), "what was fenced is never applied");
    }
    policy.open.store(true, Ordering::SeqCst);
    for (client, store) in clients.iter().enumerate() {
        store.push(&gradients(client, -1.0), &options()).unwrap();
        mirror.push(&gradients(client, -1.0), &options()).unwrap();
    }
    for (k, _, owner) in &tensors {
        let name = name(*k, *owner);
        assert_eq!(pull(&store, &name), pull(&mirror, &name), "{name}");
    }
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

/// The residual of "w", which a zero gradient would carry.
fn residual(feedback: &Mutex<ErrorFeedback>) -> Vec<f32> {
    feedback.lock().unwrap().entries().flat_map(|(_, values)| values.to_vec()).collect()
}

#[test]
fn what_was_held_and_never_applied_returns_to_the_residual() {
    let policy = Arc::new(HoldAll::default());
    let store = Store::new(StoreOptions { policy: Some(policy.clone()), ..StoreOptions::default() }).unwrap();
    policy.open.store(true, Ordering::SeqCst);
    let n = 3 * SLICE;
    store.register(spec("w", n, Apply::Exact, ledger()), View::Float32(&vec![0.0; n]), SECOND).unwrap();
    policy.open.store(false, Ordering::SeqCst);
    let feedback = Arc::new(Mutex::new(ErrorFeedback::new()));
    let pushed = |timeout| PushOptions {
        codec: Some(Codec::OneBit),
        feedback: Some(feedback.clone()),
        timeout,
        ..options()
    };
    // Refused while the call waits: the policy's thread needs the store's, not vice versa.
    let refuser = policy.clone();
    let refusing = std::thread::spawn(move || {
        let late = Instant::now() + PATIENT;
        let mut held = Vec::new();
        while held.len() < 3 && Instant::now() < late {
            held.append(&mut refuser.take());
            std::thread::yield_now();
        }
        for held in held {
            held.refuse(Error::new(Kind::Unavailable, "no"));
        }
    });
    let ones = [gradient("w", vec![1.0; n])];
    let refused = store.push(&ones, &pushed(PATIENT)).unwrap_err();
    refusing.join().unwrap();
    assert!(matches!(refused, PushError::Refused(error) if error.kind == Kind::Unavailable));
    assert_eq!(residual(&feedback), vec![1.0; n], "the content of a refused push returns");

    // Still held at the deadline: in doubt, and returned to the residual once, when it is fenced.
    let Err(PushError::Partial(partial)) = store.push(&ones, &pushed(Duration::ZERO)) else { panic!("held") };
    assert_eq!((partial.in_doubt.len(), residual(&feedback)), (3, vec![0.0; n]));
    for doubt in &partial.in_doubt {
        assert_eq!(doubt.result(SECOND).unwrap(), Fate::Fenced);
        assert_eq!(doubt.result(SECOND).unwrap(), Fate::Fenced);
    }
    assert_eq!(residual(&feedback), vec![2.0; n], "both pushes are in it");
    policy.take().into_iter().for_each(Held::release);
    policy.open.store(true, Ordering::SeqCst);
    store.push(&[gradient("w", vec![0.0; n])], &pushed(PATIENT)).unwrap();
    assert_eq!(pull(&store, "w"), vec![-2.0; n], "nothing is lost and nothing counts twice");
}
