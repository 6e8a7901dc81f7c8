//! `exchange`, a whole step in one call, against a push and a pull.

use fastps_core::codec::{Codec, ErrorFeedback};
use fastps_core::dtype::View;
use fastps_core::error::Kind;
use fastps_core::frame::Push;
use fastps_core::optim::{Adam, Optimizer};
use fastps_core::policy::{Admission, Held, Policy};
use fastps_core::slice::Slice;
use fastps_core::store::{Exchange, Exchanged, How, Outcome, Store, StoreOptions, Team};
use fastps_core::tensor::{Apply, TensorSpec};
use fastps_core::verbs::prelude::*;
use fastps_core::verbs::{Gradient, GradientRef, PushOptions, Receipt};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

const SECOND: Duration = Duration::from_secs(1);
const PATIENT: Duration = Duration::from_mins(1);
const SLICE: usize = 63 * 4096;

fn spec(name: &str, n: usize, apply: Apply) -> TensorSpec {
    TensorSpec { apply, ..TensorSpec::new(name, [n as u64], Optimizer::Adam(Adam::default())) }
}

/// A store with tensors "0", "1", ... of the given lengths.
fn store(options: StoreOptions, lengths: &[usize], apply: Apply) -> Store {
    let store = Store::new(options).unwrap();
    for (k, n) in lengths.iter().enumerate() {
        store.register(spec(&k.to_string(), *n, apply), View::Float32(&waves(*n, 0.7)), PATIENT).unwrap();
    }
    store
}

fn waves(n: usize, pace: f32) -> Vec<f32> {
    (0..n).map(|i| (i as f32 * pace).sin()).collect()
}

fn list(store: &Store, lengths: &[usize]) -> Exchange {
    let shapes: Vec<_> = lengths.iter().map(|n| [*n as u64]).collect();
    let tensors = shapes.iter().enumerate().map(|(k, shape)| (Arc::<str>::from(k.to_string()), &shape[..]));
    store.exchange_of(&tensors.collect::<Vec<_>>()).unwrap()
}

/// Calls `exchange`; also returns the values it copied out.
fn exchange(
    store: &Store,
    list: &Exchange,
    gradients: &[Option<Vec<f32>>],
    lengths: &[usize],
    how: (&PushOptions, &[Option<f64>]),
) -> (fastps_core::error::Result<Exchanged>, Vec<Vec<f32>>) {
    exchange_by(store, None, list, gradients, lengths, how)
}

/// As [`exchange`], on the threads of a team.
fn exchange_by(
    store: &Store,
    team: Option<&dyn Team>,
    list: &Exchange,
    gradients: &[Option<Vec<f32>>],
    lengths: &[usize],
    (options, rates): (&PushOptions, &[Option<f64>]),
) -> (fastps_core::error::Result<Exchanged>, Vec<Vec<f32>>) {
    let names: Vec<_> = (0..lengths.len()).map(|k| k.to_string()).collect();
    let shapes: Vec<_> = gradients.iter().map(|g| [g.as_ref().map_or(0, Vec::len) as u64]).collect();
    let of = |k: usize| {
        let values = View::Float32(gradients[k].as_ref()?);
        Some(GradientRef::whole(&names[k], &shapes[k], values))
    };
    let gradients: Vec<_> = (0..lengths.len()).map(of).collect();
    let values: Vec<_> = lengths.iter().map(|n| Mutex::new(vec![f32::NAN; *n])).collect();
    let take = |k: usize, at: usize, bytes: &[u8]| {
        let floats = bytes.as_chunks::<4>().0.iter().map(|b| f32::from_le_bytes(*b));
        values[k].lock().unwrap().iter_mut().skip(at).zip(floats).for_each(|(to, from)| *to = from);
    };
    let how = How { rates, team, ..How::default() };
    let done = store.exchange(list, &gradients, options, how, &take).map(|outcome| match outcome {
        Outcome::Done(exchanged) => exchanged,
        Outcome::Held(_) => panic!("nothing is left held"),
    });
    (done, values.into_iter().map(|values| values.into_inner().unwrap()).collect())
}

fn pull(store: &Store, k: usize) -> Vec<f32> {
    let ticket = store.pull_async(vec![k.to_string().into()], SECOND).unwrap();
    ticket.wait(SECOND).unwrap().unwrap().values.remove(0).view().float32s().unwrap().to_vec()
}

fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|value| value.to_bits()).collect()
}

#[test]
fn equals_a_push_and_a_pull() {
    let lengths = [0, 1, 1000, 3 * SLICE + 5, 10];
    for (apply, threads) in [(Apply::Exact, 1), (Apply::Exact, 3), (Apply::Hogwild, 1)] {
        let options = StoreOptions { threads: Some(threads), ..StoreOptions::default() };
        let (one, two) = (store(options.clone(), &lengths, apply), store(options, &lengths, apply));
        let list = list(&one, &lengths);
        let mut how = PushOptions::default();
        for step in 0..6_usize {
            let gradients: Vec<_> = lengths
                .iter()
                .enumerate()
                .map(|(k, n)| (step == 0 || (step + k) % 3 != 0).then(|| waves(*n, 0.1 + step as f32)))
                .collect();
            how.lr = (step % 2 == 1).then_some(0.5);
            let plain: Vec<_> = gradients
                .iter()
                .enumerate()
                .filter_map(|(k, g)| {
                    let values = g.clone()?;
                    let (name, shape) = (k.to_string().into(), vec![values.len() as u64]);
                    Some(Gradient { name, shape, values: Arc::new(values) })
                })
                .collect();
            let receipts = two.push(&plain, &PushOptions { based_on: None, ..how.clone() }).unwrap();
            let (done, values) = exchange(&one, &list, &gradients, &lengths, (&how, &[]));
            let done = done.unwrap();
            let pushed = done.pushed.unwrap();
            assert_eq!(
                pushed.iter().map(|r| (r.version, r.bytes)).collect::<Vec<_>>(),
                receipts.iter().map(|r| (r.version, r.bytes)).collect::<Vec<_>>()
            );
            let stale = pushed.iter().zip(&plain).filter(|(_, g)| !g.values.view().is_empty());
            assert!(step == 0 || stale.into_iter().all(|(r, _)| r.staleness == Some(0)));
            let versions = done.versions.unwrap().unwrap();
            assert_eq!(versions.tensors().len(), lengths.len());
            for (k, values) in values.iter().enumerate() {
                assert_eq!(bits(values), bits(&pull(&two, k)), "{apply:?} {threads} step {step} tensor {k}");
                assert_eq!(bits(values), bits(&pull(&one, k)));
            }
            how.based_on = Some(Arc::new(versions));
        }
    }
}

/// A team with this many threads, and the number of its runs.
struct Lent(usize, AtomicUsize);

impl Team for Lent {
    fn threads(&self) -> usize {
        self.0
    }
    fn run(&self, work: &(dyn Fn(usize) + Sync)) {
        self.1.fetch_add(1, Ordering::SeqCst);
        std::thread::scope(|scope| (0..self.0).for_each(|thread| drop(scope.spawn(move || work(thread)))));
    }
}

#[test]
fn threads_that_are_lent_change_no_bit() {
    let lengths = [0, 1, 1000, 3 * SLICE + 5, 10, 70_000];
    for apply in [Apply::Exact, Apply::Hogwild] {
        let [one, two] = [1, 3].map(|threads| {
            store(StoreOptions { threads: Some(threads), ..StoreOptions::default() }, &lengths, apply)
        });
        let (of_one, of_two) = (list(&one, &lengths), list(&two, &lengths));
        for (step, threads) in [2, 3, 4, 8].into_iter().enumerate() {
            let team = Lent(threads, AtomicUsize::new(0));
            let of = |(k, n): (usize, &usize)| ((step + k) % 3 != 0).then(|| waves(*n, 0.1 + step as f32));
            let gradients: Vec<_> = lengths.iter().enumerate().map(of).collect();
            let how = (&PushOptions::default(), &[] as &[_]);
            let (alone, expected) = exchange_by(&one, Some(&team), &of_one, &gradients, &lengths, how);
            assert_eq!(team.1.load(Ordering::SeqCst), 0, "a store of one thread");
            let (shared, values) = exchange_by(&two, Some(&team), &of_two, &gradients, &lengths, how);
            assert_eq!(team.1.load(Ordering::SeqCst), 1);
            assert_eq!(
                values.iter().map(|v| bits(v)).collect::<Vec<_>>(),
                expected.iter().map(|v| bits(v)).collect::<Vec<_>>()
            );
            let (alone, shared) = (alone.unwrap(), shared.unwrap());
            assert_eq!(shared.pushed.unwrap(), alone.pushed.unwrap());
            assert_eq!(format!("{:?}", shared.versions.unwrap()), format!("{:?}", alone.versions.unwrap()));
        }
    }
    // A few elements do not use the team.
    let (store, team) = (store(StoreOptions::default(), &[5], Apply::Exact), Lent(2, AtomicUsize::new(0)));
    let (list, how) = (list(&store, &[5]), PushOptions::default());
    let (done, _) = exchange_by(&store, Some(&team), &list, &[Some(vec![1.0; 5])], &[5], (&how, &[]));
    assert!(done.unwrap().pushed.is_ok() && team.1.into_inner() == 0);
}

#[test]
fn what_is_wrong_changes_nothing() {
    let lengths = [5, 7];
    let store = store(StoreOptions::default(), &lengths, Apply::Exact);
    let list = list(&store, &lengths);
    let refused = |gradients: &[Option<Vec<f32>>], how: &PushOptions, kind: Kind| {
        let (done, values) = exchange(&store, &list, gradients, &lengths, (how, &[]));
        assert_eq!(done.unwrap_err().kind, kind);
        assert!(values.iter().flatten().all(|value| value.is_nan()), "nothing is handed over");
    };
    let how = PushOptions::default();
    refused(&[Some(vec![1.0; 5]), Some(vec![1.0; 8])], &how, Kind::Shape);
    let mut values = vec![1.0; 7];
    values[3] = f32::INFINITY;
    refused(&[Some(vec![1.0; 5]), Some(values)], &how, Kind::NonFinite);
    refused(&[Some(vec![1.0; 5]), None], &PushOptions { lr: Some(-1.0), ..how.clone() }, Kind::Config);
    let (done, _) =
        exchange(&store, &list, &[Some(vec![1.0; 5]), None], &lengths, (&how, &[Some(f64::NAN), None]));
    assert_eq!(done.unwrap_err().kind, Kind::Config);
    assert_eq!(bits(&pull(&store, 0)), bits(&waves(5, 0.7)));
    assert_eq!(store.exchange_of(&[("1".into(), &[8])]).unwrap_err().kind, Kind::Shape);
    assert_eq!(store.exchange_of(&[("2".into(), &[8])]).unwrap_err().kind, Kind::UnknownTensor);

    // A tensor that was registered again is found, unless its shape differs.
    for (n, kind) in [(7, None), (8, Some(Kind::Shape))] {
        store.unregister("1", SECOND).unwrap();
        store.register(spec("1", n, Apply::Exact), View::Float32(&vec![3.0; n]), SECOND).unwrap();
        let (done, values) = exchange(&store, &list, &[Some(vec![1.0; 5]), None], &lengths, (&how, &[]));
        assert_eq!(done.err().map(|error| error.kind), kind);
        assert!(kind.is_some() || values[1] == [3.0; 7]);
    }
    assert_eq!(store.versions(&["0".into()], SECOND).unwrap().tensors()[0].1[0].version, 2);
}

#[test]
fn each_tensor_may_have_a_rate_of_its_own() {
    let lengths = [5, 6, 7];
    let [one, two] = [(); 2].map(|()| store(StoreOptions::default(), &lengths, Apply::Exact));
    let gradients = lengths.map(|n| Some(vec![1.0; n]));
    let how = PushOptions { lr: Some(0.25), ..PushOptions::default() };
    let rates = [Some(0.5), None, Some(0.0)];
    let (done, values) = exchange(&one, &list(&one, &lengths), &gradients, &lengths, (&how, &rates));
    assert!(done.unwrap().pushed.is_ok());
    for (k, values) in values.iter().enumerate() {
        let how = PushOptions { lr: rates[k].or(how.lr), ..how.clone() };
        let n = lengths[k];
        let gradient =
            Gradient { name: k.to_string().into(), shape: vec![n as u64], values: Arc::new(vec![1.0; n]) };
        two.push(&[gradient], &how).unwrap();
        assert_eq!(bits(values), bits(&pull(&two, k)));
    }
}

/// Holds every push.
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

/// What `make` returns while all that the policy holds is released.
fn releasing<T>(policy: &HoldAll, make: impl FnOnce() -> T) -> T {
    let (over, begin) = (AtomicBool::new(false), Instant::now());
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !over.load(Ordering::SeqCst) && begin.elapsed() < PATIENT {
                let held = std::mem::take(&mut *policy.0.lock().unwrap());
                held.into_iter().for_each(Held::release);
                std::thread::yield_now();
            }
        });
        let made = make();
        over.store(true, Ordering::SeqCst);
        made
    })
}

#[test]
fn the_values_contain_what_a_policy_held() {
    let policy = Arc::new(HoldAll::default());
    let lengths = [5, 2 * SLICE];
    let options = StoreOptions { policy: Some(policy.clone()), ..StoreOptions::default() };
    releasing(&policy, || {
        let store = store(options, &lengths, Apply::Exact);
        let list = list(&store, &lengths);
        let gradients = lengths.map(|n| Some(vec![1.0; n]));
        let how = PushOptions { timeout: PATIENT, ..PushOptions::default() };
        let (done, values) = exchange(&store, &list, &gradients, &lengths, (&how, &[]));
        let done = done.unwrap();
        assert_eq!(done.pushed.unwrap().len(), 2);
        let versions = done.versions.unwrap().unwrap();
        assert!(versions.tensors().iter().flat_map(|(_, slices)| slices).all(|s| s.version == 2));
        for (k, values) in values.iter().enumerate() {
            assert_ne!(bits(values), bits(&waves(lengths[k], 0.7)));
            assert_eq!(bits(values), bits(&pull(&store, k)));
        }
    });
}

#[test]
fn a_held_push_is_left_where_the_caller_asks_for_it() {
    let policy = Arc::new(HoldAll::default());
    let options = StoreOptions { policy: Some(policy.clone()), ..StoreOptions::default() };
    let store = releasing(&policy, || store(options, &[5], Apply::Exact));
    let (list, values) = (list(&store, &[5]), [1.0; 5]);
    let gradients = [Some(GradientRef::whole("0", &[5], View::Float32(&values)))];
    let feedback = Some(Arc::new(Mutex::new(ErrorFeedback::new())));
    let encoded = PushOptions { codec: Some(Codec::BFloat16), feedback, ..PushOptions::default() };
    for (version, options) in [(2, PushOptions::default()), (3, encoded)] {
        let options = PushOptions { timeout: PATIENT, ..options };
        let how = How { leaves_held: true, ..How::default() };
        let take = |_: usize, _: usize, bytes: &[u8]| assert!(bytes.is_empty(), "a value before its push");
        let done = store.exchange(&list, &gradients, &options, how, &take).unwrap();
        let Outcome::Held(ticket) = done else { panic!("{done:?}") };
        assert!(!ticket.is_done());
        std::mem::take(&mut *policy.0.lock().unwrap()).into_iter().for_each(Held::release);
        assert_eq!(ticket.wait(PATIENT).unwrap().unwrap()[0].version, version);
    }
}

#[test]
fn encoded_gradients_leave_the_residuals_of_a_push() {
    let lengths = [5, 0, SLICE + 70, 1_000];
    for codec in [Codec::Int8 { seed: None }, Codec::Int8 { seed: Some(3) }, Codec::OneBit, Codec::BFloat16] {
        let [one, two] = [(); 2].map(|()| store(StoreOptions::default(), &lengths, Apply::Exact));
        let how = || PushOptions {
            codec: Some(codec),
            feedback: Some(Arc::new(Mutex::new(ErrorFeedback::new()))),
            ..PushOptions::default()
        };
        let ([first, second], list) = ([how(), how()], list(&one, &lengths));
        for step in 0..3 {
            let of = |(k, n): (usize, &usize)| (k != step).then(|| waves(*n, 0.1 + step as f32 + k as f32));
            let gradients: Vec<_> = lengths.iter().enumerate().map(of).collect();
            let plain: Vec<_> = gradients
                .iter()
                .enumerate()
                .filter_map(|(k, values)| {
                    let values = values.clone()?;
                    let (name, shape) = (k.to_string().into(), vec![values.len() as u64]);
                    Some(Gradient { name, shape, values: Arc::new(values) })
                })
                .collect();
            let (done, values) = exchange(&one, &list, &gradients, &lengths, (&first, &[]));
            let (pushed, receipts) = (done.unwrap().pushed.unwrap(), two.push(&plain, &second).unwrap());
            let parts = |all: &[Receipt]| all.iter().map(|r| (r.version, r.bytes)).collect::<Vec<_>>();
            assert_eq!(parts(&pushed), parts(&receipts), "{codec:?}, step {step}");
            for (k, values) in values.iter().enumerate() {
                assert_eq!(bits(values), bits(&pull(&two, k)), "{codec:?}, step {step}, tensor {k}");
            }
            let residuals =
                |options: &PushOptions| options.feedback.as_ref().unwrap().lock().unwrap().clone();
            assert!(residuals(&first) == residuals(&second), "{codec:?}, step {step}");
        }
    }
}

#[test]
fn values_follow_what_comes_between_push_and_pull() {
    let lengths = [5, 7];
    let store = store(StoreOptions::default(), &lengths, Apply::Exact);
    let (list, given, shapes) = (list(&store, &lengths), lengths.map(|n| vec![1.0; n]), [[5], [7]]);
    let gradients =
        [0, 1].map(|k| Some(GradientRef::whole(["0", "1"][k], &shapes[k], View::Float32(&given[k]))));
    for pulls in [true, false] {
        let (taken, versions) = (AtomicUsize::new(0), AtomicUsize::new(0));
        let between = || {
            assert_eq!(taken.load(Ordering::SeqCst), 0, "nothing is pulled before");
            let now = store.versions(&["1".into()], SECOND).unwrap();
            versions.store(now.tensors()[0].1[0].version as usize, Ordering::SeqCst);
            pulls
        };
        let take = |_: usize, _: usize, bytes: &[u8]| {
            taken.fetch_add(bytes.len(), Ordering::SeqCst);
        };
        let how = How { before_pull: Some(&between), ..How::default() };
        let done = store.exchange(&list, &gradients, &PushOptions::default(), how, &take).unwrap();
        let Outcome::Done(Exchanged { pushed, versions: pulled }) = done else { panic!("it is held") };
        assert_eq!(pushed.unwrap()[1].version as usize, versions.into_inner());
        assert_eq!(pulled.map(Result::unwrap).is_some(), pulls);
        assert_eq!(taken.into_inner(), if pulls { 48 } else { 0 });
    }
}
