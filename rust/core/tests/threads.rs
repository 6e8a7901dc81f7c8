//! Many threads on one shard; `make tsan` runs these tests under ThreadSanitizer. std is not instrumented, so
//! threads are joined one by one and answers pass through the core's own lock.
#![allow(clippy::unwrap_used, clippy::panic)]

use fastps_core::codec::CodecId;
use fastps_core::error::{Kind, Result};
use fastps_core::factorize::{Epoch, FactorRule, Factors, Order, Ratings};
use fastps_core::frame::{Applied, Identity, Push};
use fastps_core::isa::Isa;
use fastps_core::linear::{Csr, Examples, FeatureRows, Linear, Loss, Schedule, Settings};
use fastps_core::lock::SliceLock;
use fastps_core::optim::{Adam, Optimizer, Sgd};
use fastps_core::shard::{Shard, ShardConfig};
use fastps_core::slice::Resolved;
use fastps_core::tensor::{Apply, SliceId, TensorSpec};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;

const THREADS: u64 = 3;
/// Pushes of each thread; few under Miri, which interprets every access.
const PUSHES: u64 = if cfg!(miri) { 4 } else { 200 };
/// A run of racing memory, and a rest.
const LEN: usize = if cfg!(miri) { 70 } else { 2500 };
const SLICE: SliceId = SliceId(5);

fn spec(apply: Apply, optimizer: Optimizer) -> TensorSpec {
    TensorSpec { apply, ..TensorSpec::new("w", [LEN as u64], optimizer) }
}

fn ledger() -> Optimizer {
    Optimizer::Sgd(Sgd { lr: 1.0, ..Sgd::default() })
}

fn shard(apply: Apply, optimizer: Optimizer) -> Arc<Shard> {
    let shard = Shard::new(ShardConfig::new(0, 1 << 30, Isa::best()));
    shard.create(&Arc::new(spec(apply, optimizer)), 0, &[(SLICE, 0)]).unwrap();
    Arc::new(shard)
}

/// Pushes the same value to every element and waits for the answer, which another thread may give.
fn push(shard: &Shard, slice: SliceId, identity: Identity, value: f32) -> Result<Applied> {
    let answer = Arc::new(SliceLock::new(None));
    let sent = answer.clone();
    let body = value.to_le_bytes().repeat(LEN);
    let push = Push::gradient(slice, identity, LEN as u64, CodecId::Float32, &body);
    shard.push(&push, move |result| *sent.lock() = Some(result));
    loop {
        if let Some(answer) = answer.lock().take() {
            return answer;
        }
        thread::yield_now();
    }
}

/// Runs a closure on every thread, with the thread's number.
fn on_all_threads(run: impl Fn(u64) + Send + Sync + 'static) {
    let run = Arc::new(run);
    let threads: Vec<_> = (1..=THREADS)
        .map(|client| {
            let run = run.clone();
            thread::spawn(move || run(client))
        })
        .collect();
    for thread in threads {
        thread.join().unwrap();
    }
}

fn elements(bytes: &[u8]) -> Vec<f32> {
    bytes.as_chunks().0.iter().map(|&b| f32::from_le_bytes(b)).collect()
}

#[test]
fn the_lock_guards_what_it_holds() {
    let log = Arc::new(SliceLock::new(Vec::new()));
    let shared = log.clone();
    on_all_threads(move |client| (0..10 * PUSHES).for_each(|_| shared.lock().push(client)));
    assert_eq!((log.lock().len() as u64, log.queued()), (10 * PUSHES * THREADS, 0));
}

#[test]
fn pushes_and_pulls_of_an_exact_slice_are_one_after_the_other() {
    let shard = shard(Apply::Exact, ledger());
    let shared = shard.clone();
    on_all_threads(move |client| {
        for sequence in 1..=PUSHES {
            let pulled = shared.pull(client, SLICE).unwrap();
            let (version, values) = (pulled.version as f32, elements(pulled.as_ref()));
            assert!(values.iter().all(|x| *x == version), "a pull is one whole version");
            push(&shared, SLICE, Identity { client, sequence }, -1.0).unwrap();
        }
    });
    assert_eq!(shard.pull(0, SLICE).unwrap().version, PUSHES * THREADS);
}

#[test]
fn a_push_that_all_threads_send_is_applied_once() {
    for apply in [Apply::Exact, Apply::Hogwild] {
        let shard = shard(apply, Optimizer::Adam(Adam::default()));
        let (shared, applied) = (shard.clone(), Arc::new(AtomicU64::new(0)));
        let counted = applied.clone();
        on_all_threads(move |_| {
            for sequence in 1..=PUSHES {
                let identity = Identity { client: 9, sequence };
                match push(&shared, SLICE, identity, 1.0) {
                    Ok(answer) => drop(counted.fetch_add(u64::from(!answer.duplicate), Ordering::Relaxed)),
                    Err(error) => assert_eq!(error.kind, Kind::UnknownOutcome, "a thread that is far behind"),
                }
                let found = shared.resolve(SLICE, identity).unwrap();
                assert!(matches!(found, Resolved::Applied(_) | Resolved::Unknown), "{found:?}");
            }
        });
        assert_eq!(applied.load(Ordering::Relaxed), PUSHES);
        assert_eq!(shard.pull(0, SLICE).unwrap().version, PUSHES);
    }
}

#[test]
fn racing_pushes_to_a_hogwild_slice_tear_nothing() {
    let shard = shard(Apply::Hogwild, ledger());
    let shared = shard.clone();
    on_all_threads(move |client| {
        for sequence in 1..=PUSHES {
            push(&shared, SLICE, Identity { client, sequence }, -1.0).unwrap();
            let values = elements(shared.pull(client, SLICE).unwrap().as_ref());
            // Updates may overwrite each other, but each leaves a whole number that some order of updates
            // gives.
            assert!(values.iter().all(|x| x.fract() == 0.0 && (0.0..=(PUSHES * THREADS) as f32).contains(x)));
        }
    });
    assert_eq!(shard.pull(0, SLICE).unwrap().version, PUSHES * THREADS);
}

#[test]
fn slices_come_and_go_while_others_push() {
    let shard = Arc::new(Shard::new(ShardConfig::new(0, 1 << 30, Isa::best())));
    let shared = shard.clone();
    on_all_threads(move |client| {
        for sequence in 1..=PUSHES {
            let mine = SliceId(client);
            let others = SliceId(client % THREADS + 1);
            shared.create(&Arc::new(spec(Apply::Exact, ledger())), 0, &[(mine, 0)]).unwrap();
            match push(&shared, others, Identity { client, sequence }, -1.0) {
                Ok(applied) => assert!(applied.version >= 1),
                Err(error) => assert_eq!(error.kind, Kind::UnknownTensor),
            }
            shared.forget_client(client);
            shared.remove(&[mine]);
        }
    });
    let counters = shard.counters();
    assert!(counters.contains(&("slices", 0)) && counters.contains(&("memory_used", 0)), "{counters:?}");
}

/// Training of linear models and of factors: racing loads and stores, one counter, one intercept.
#[test]
fn threads_train_on_shared_coefficients() {
    const COLUMNS: usize = 20;
    // Enough rows that the linear threads train on copies.
    let rows = if cfg!(miri) { 40 } else { 13_000 };
    let columns: Vec<i32> = (0..3 * rows as i32).map(|k| (k * k + k / 3) % COLUMNS as i32).collect();
    let values = vec![0.5_f32; 3 * rows];
    let starts: Vec<i32> = (0..=rows as i32).map(|i| 3 * i).collect();
    let targets: Vec<f32> = (0..rows).map(|i| if columns[3 * i] < 10 { 1.0 } else { -1.0 }).collect();
    let order: Vec<u32> = (0..rows as u32).collect();
    let csr = Csr { values: &values, columns: &columns, starts: &starts };
    for (l1_ratio, average) in [(0.0, 0), (0.5, 0), (0.0, 1)] {
        let settings = Settings {
            loss: Loss::Logistic,
            alpha: 1e-3,
            l1_ratio,
            penalty: true,
            schedule: Schedule::Optimal,
            eta0: 0.1,
            power_t: 0.5,
            fit_intercept: true,
            intercept_decay: 1.0,
            average,
            weight_pos: 1.0,
            weight_neg: 1.0,
        };
        let mut model = Linear::new(settings, &[0.0; COLUMNS], 0.0, 1).unwrap();
        let rows = FeatureRows::Csr32(csr);
        let examples = Examples { rows, targets: &targets, weights: None, order: &order };
        for _ in 0..3 {
            let pass = model.pass(examples, THREADS as usize, true, &|| false).unwrap();
            assert_eq!(pass.examples, order.len());
        }
        assert!(model.coefficients().iter().all(|w| w.is_finite()));
    }
    let users: Vec<i32> = (0..rows as i32).map(|k| k % 7).collect();
    let items: Vec<i32> = (0..rows as i32).map(|k| k % 11).collect();
    let ratings = Ratings { users: &users, items: &items, values: &targets };
    let factors = Factors::new(3, (&[0.1; 21], &[0.0; 7]), (&[0.2; 33], &[0.0; 11])).unwrap();
    let rule = FactorRule { lr: 0.01, regularization: 0.1, biases: true };
    let mut order = Order::new(ratings, 7, THREADS as usize);
    let mut seeds = 0..4;
    let first = Epoch { seed: None, rule };
    let mut next = |_, done| {
        assert_eq!(done, users.len());
        seeds.next().map(|seed| Epoch { seed: Some(seed), rule })
    };
    factors.train(ratings, &mut order, first, THREADS as usize, &|| false, &mut next).unwrap();
}
