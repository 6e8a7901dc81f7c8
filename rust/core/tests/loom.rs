//! Models of the core's concurrency, checked by loom in every relevant order of their steps (`make loom`).
//! They run the real code: the slice's lock, its table of identities, both kinds of memory and the shard, on
//! the scalar instruction set with tensors of one element. Each model also runs with seeded faults
//! (`fault.rs`), which loom must find, so a model that proves nothing is detected.
//!
//! Models without a bound are exhaustive. A bound limits the preemptions per order (switches away from a
//! thread that could continue); loom tries all orders within it.
#![cfg(loom)]
#![allow(clippy::unwrap_used, clippy::panic, clippy::print_stdout)]

use fastps_core::barrier::Barrier;
use fastps_core::codec::CodecId;
use fastps_core::error::{Kind, Result};
use fastps_core::fault;
use fastps_core::frame::{Applied, Base, Identity, Push};
use fastps_core::identity::Settled;
use fastps_core::isa::Isa;
use fastps_core::lock::{MAX_OVERTAKES, SliceLock};
use fastps_core::mode::{Clocks, MembershipRequest, Mode, Quorum};
use fastps_core::optim::{Optimizer, Sgd};
use fastps_core::policy::{Admission, Held, Policy};
use fastps_core::shard::{Shard, ShardConfig};
use fastps_core::shared_directory::Directory;
use fastps_core::slice::{Resolved, Slice};
use fastps_core::tensor::{Apply, SliceId, TensorSpec};
use loom::sync::atomic::{AtomicU64, Ordering::Relaxed};
use loom::thread;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Mutex};

const SLICE: SliceId = SliceId(5);

/// Checks a model, and that loom finds each seeded fault in it.
fn check(name: &str, bound: Option<usize>, faults: &[&'static str], model: fn()) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = bound;
    builder.max_branches = 20_000;
    let orders = Arc::new(Mutex::new(0_u64));
    let counted = orders.clone();
    builder.check(move || {
        *counted.lock().unwrap() += 1;
        model();
    });
    println!("{name}: {} orders, preemptions {bound:?}", orders.lock().unwrap());
    for fault in faults {
        fault::choose(fault);
        let found = catch_unwind(AssertUnwindSafe(|| builder.check(model))).is_err();
        fault::choose("");
        assert!(found, "loom does not find {fault} in {name}");
    }
}

fn shard(apply: Apply) -> Arc<Shard> {
    shard_of(ShardConfig::new(0, 1 << 20, Isa::Scalar), apply)
}

fn shard_of(config: ShardConfig, apply: Apply) -> Arc<Shard> {
    let shard = Shard::new(config);
    shard.create(&Arc::new(spec(apply)), 0, &[(SLICE, 0)]).unwrap();
    Arc::new(shard)
}

fn spec(apply: Apply) -> TensorSpec {
    TensorSpec { apply, ..TensorSpec::new("w", [1], Optimizer::Sgd(Sgd { lr: 1.0, ..Sgd::default() })) }
}

/// Pushes -1, which adds 1 to the slice's element. Returns a list that receives the answers, one per call of
/// `done`.
fn push(shard: &Shard, slice: SliceId, client: u64) -> Answers {
    push_as(shard, slice, Identity { client, sequence: 1 }, false)
}

fn push_as(shard: &Shard, slice: SliceId, identity: Identity, once: bool) -> Answers {
    let answers = Answers::default();
    let sent = answers.clone();
    let body = (-1.0_f32).to_le_bytes();
    let push =
        Push { largest: Some(0.0), once, ..Push::gradient(slice, identity, 1, CodecId::Float32, &body) };
    shard.push(&push, move |result| sent.0.lock().unwrap().push(result));
    answers
}

#[derive(Clone, Default)]
struct Answers(Arc<Mutex<Vec<Result<Applied>>>>);

impl Answers {
    /// The answer, once all threads are done: exactly one.
    fn one(&self) -> Result<Applied> {
        let mut all = self.0.lock().unwrap();
        assert_eq!(all.len(), 1, "a push has one answer");
        all.pop().unwrap()
    }
}

/// The slice's version and value, which are equal here: every change adds 1.
fn pull(shard: &Shard) -> (u64, f32) {
    let pulled = shard.pull(0, SLICE).unwrap();
    (pulled.version, f32::from_le_bytes(pulled.as_ref().try_into().unwrap()))
}

/// Loads and stores, so that a second thread inside is detected.
fn count_up(count: &SliceLock<AtomicU64>) {
    let count = count.lock();
    count.store(count.load(Relaxed) + 1, Relaxed);
}

#[test]
fn the_lock_lets_one_in() {
    check("lock, 2 threads", None, &["lock_open", "wake_up_lost"], || {
        let count = Arc::new(SliceLock::new(AtomicU64::new(0)));
        let other = thread::spawn({
            let count = count.clone();
            move || count_up(&count)
        });
        count_up(&count);
        other.join().unwrap();
        assert_eq!((count.lock().load(Relaxed), count.queued()), (2, 0));
    });
}

#[test]
fn the_lock_lets_one_of_three_in() {
    check("lock, 3 threads", Some(4), &["lock_open", "wake_up_lost"], || {
        let count = Arc::new(SliceLock::new(AtomicU64::new(0)));
        let others = [(); 2].map(|()| {
            let count = count.clone();
            thread::spawn(move || count_up(&count))
        });
        count_up(&count);
        for other in others {
            other.join().unwrap();
        }
        assert_eq!((count.lock().load(Relaxed), count.queued()), (3, 0));
    });
}

#[test]
fn nobody_is_overtaken_more_often_than_promised() {
    check("overtaking", Some(6), &["lock_not_fair"], || {
        let waiter_was_in = Arc::new(SliceLock::new(false));
        let waiter = thread::spawn({
            let lock = waiter_was_in.clone();
            move || *lock.lock() = true
        });
        let mut overtakes = 0;
        for _ in 0..=MAX_OVERTAKES + 1 {
            let waits = waiter_was_in.queued() == 1;
            let was_in = waiter_was_in.lock();
            overtakes += u64::from(waits && !*was_in);
        }
        assert!(overtakes <= MAX_OVERTAKES, "overtaken {overtakes} times");
        waiter.join().unwrap();
    });
}

#[test]
fn threads_meet_until_one_leaves() {
    check("barrier", Some(4), &["barrier_open", "wake_up_lost"], || {
        let shared = Arc::new((Barrier::new(2), [AtomicU64::new(0), AtomicU64::new(0)]));
        let other = thread::spawn({
            let shared = shared.clone();
            move || {
                let (barrier, [first, second]) = &*shared;
                let seat = barrier.seat();
                second.store(1, Relaxed);
                assert!(seat.meet());
                assert!(first.load(Relaxed) >= 1);
                seat.meet();
                assert_eq!(first.load(Relaxed), 2);
                assert!(!seat.meet());
            }
        });
        let (barrier, [first, second]) = &*shared;
        let seat = barrier.seat();
        first.store(1, Relaxed);
        assert!(seat.meet());
        assert_eq!(second.load(Relaxed), 1);
        first.store(2, Relaxed);
        assert!(seat.meet());
        drop(seat);
        other.join().unwrap();
    });
}

#[test]
fn two_pushes_are_both_applied() {
    check("push and push", None, &["lock_open"], || {
        let shard = shard(Apply::Exact);
        let other = thread::spawn({
            let shard = shard.clone();
            move || push(&shard, SLICE, 1)
        });
        let mine = push(&shard, SLICE, 2);
        let mut versions = [other.join().unwrap(), mine].map(|answers| answers.one().unwrap().version);
        versions.sort_unstable();
        assert_eq!(versions, [1, 2]);
        assert_eq!(pull(&shard), (2, 2.0));
    });
}

/// Pushes of a store, which are never repeated and not remembered; one slice, two clients with two pushes
/// each.
fn pushes_that_come_once(apply: Apply) {
    let shard = shard(apply);
    let other = thread::spawn({
        let shard = shard.clone();
        move || push_as(&shard, SLICE, Identity { client: 1, sequence: 1 }, true)
    });
    let mine = [1, 2].map(|sequence| push_as(&shard, SLICE, Identity { client: 2, sequence }, true));
    let other = other.join().unwrap().one().unwrap();
    let mine = mine.map(|answers| answers.one().unwrap());
    assert!(mine[0].version < mine[1].version);
    assert_eq!((mine[0].own, mine[1].own, other.own), (1, 2, 1));
    assert_eq!(mine[0].version + mine[1].version + other.version, 6);
    assert_eq!(shard.pull(0, SLICE).unwrap().version, 3);
}

#[test]
fn pushes_that_are_not_remembered_are_all_applied() {
    check("push and push once, exact", None, &["lock_open"], || pushes_that_come_once(Apply::Exact));
}

#[test]
fn pushes_that_are_not_remembered_are_all_counted_in_hogwild() {
    check("push and push once, hogwild", Some(4), &["version_not_bumped"], || {
        pushes_that_come_once(Apply::Hogwild);
    });
}

/// A push and its repeat: applied once, answered twice, with the same version.
fn push_and_repeat(apply: Apply) {
    let shard = shard(apply);
    let repeat = thread::spawn({
        let shard = shard.clone();
        move || push(&shard, SLICE, 1)
    });
    let first = push(&shard, SLICE, 1);
    let both = [repeat.join().unwrap(), first].map(|answers| answers.one().unwrap());
    assert_eq!(both.map(|applied| applied.version), [1, 1]);
    assert_eq!(both.iter().filter(|applied| applied.duplicate).count(), 1);
    assert_eq!(pull(&shard), (1, 1.0));
}

#[test]
fn a_repeat_is_not_applied() {
    check("push and repeat, exact", None, &["identity_off"], || push_and_repeat(Apply::Exact));
}

#[test]
fn a_repeat_meets_the_claim() {
    let faults = &["identity_off", "claim_left_out"];
    check("push and repeat, hogwild", None, faults, || push_and_repeat(Apply::Hogwild));
}

/// A push whose sender asks for the outcome while it is on its way: both answers agree with each other and
/// with the value.
fn push_and_resolve(apply: Apply) {
    let shard = shard(apply);
    let sender = thread::spawn({
        let shard = shard.clone();
        move || push(&shard, SLICE, 1)
    });
    let resolved = shard.resolve(SLICE, Identity { client: 1, sequence: 1 });
    let answer = sender.join().unwrap().one();
    let changes = match resolved {
        Ok(Resolved::Applied(applied)) => {
            assert_eq!(Settled::from(answer.unwrap()), applied);
            1
        }
        Ok(Resolved::Fenced) => {
            assert_eq!(answer.unwrap_err().kind, Kind::Fenced);
            0
        }
        Ok(Resolved::Unknown) => panic!("the slice remembers"),
        Err(error) => {
            assert_eq!((apply, error.kind), (Apply::Hogwild, Kind::Unavailable), "asked in the middle of it");
            assert_eq!(answer.unwrap().version, 1);
            1
        }
    };
    assert_eq!(pull(&shard), (changes, changes as f32));
}

#[test]
fn a_fence_and_a_push_exclude_each_other() {
    check("push and resolve, exact", None, &["fence_forgotten"], || push_and_resolve(Apply::Exact));
}

#[test]
fn a_fence_and_a_claim_exclude_each_other() {
    let faults = &["fence_forgotten", "claim_left_out"];
    check("push and resolve, hogwild", None, faults, || push_and_resolve(Apply::Hogwild));
}

/// Three at once: the push, its repeat, and the query for its outcome.
fn push_repeat_and_resolve(apply: Apply) {
    let shard = shard(apply);
    let senders = [(); 2].map(|()| {
        let shard = shard.clone();
        thread::spawn(move || push(&shard, SLICE, 1))
    });
    let resolved = shard.resolve(SLICE, Identity { client: 1, sequence: 1 });
    let answers = senders.map(|sender| sender.join().unwrap()).map(|answers| answers.one());
    let applied = answers.iter().flatten().count();
    match resolved {
        Ok(Resolved::Fenced) => assert_eq!((applied, pull(&shard)), (0, (0, 0.0))),
        _ => assert_eq!((applied, pull(&shard)), (2, (1, 1.0))),
    }
}

#[test]
fn a_repeat_a_fence_and_a_push_agree() {
    let faults = &["identity_off", "fence_forgotten"];
    check("push, repeat and resolve, exact", Some(4), faults, || push_repeat_and_resolve(Apply::Exact));
}

#[test]
fn a_repeat_a_fence_and_a_claim_agree() {
    let faults = &["identity_off", "fence_forgotten", "claim_left_out"];
    check("push, repeat and resolve, hogwild", Some(4), faults, || push_repeat_and_resolve(Apply::Hogwild));
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

/// A held push is released while its sender asks for the outcome, or while a repeat arrives.
fn release_and_resolve(apply: Apply) {
    let policy = Arc::new(HoldAll::default());
    let config = ShardConfig { policy: Some(policy.clone()), ..ShardConfig::new(0, 1 << 20, Isa::Scalar) };
    let shard = shard_of(config, apply);
    let first = push(&shard, SLICE, 1);
    let held = policy.0.lock().unwrap().pop().unwrap();
    let release = thread::spawn(move || held.release());
    let repeat = thread::spawn({
        let shard = shard.clone();
        move || push(&shard, SLICE, 1)
    });
    let resolved = shard.resolve(SLICE, Identity { client: 1, sequence: 1 });
    release.join().unwrap();
    let answers = [first, repeat.join().unwrap()].map(|answers| answers.one());
    let applied = answers.iter().flatten().count();
    match resolved {
        Ok(Resolved::Fenced) => assert_eq!((applied, pull(&shard)), (0, (0, 0.0))),
        _ => assert_eq!((applied, pull(&shard)), (2, (1, 1.0))),
    }
}

#[test]
fn a_fence_and_a_release_exclude_each_other() {
    check("release, repeat and resolve, exact", Some(4), &["fence_forgotten"], || {
        release_and_resolve(Apply::Exact);
    });
}

#[test]
fn a_fence_and_a_release_exclude_each_other_in_hogwild() {
    check("release, repeat and resolve, hogwild", Some(4), &["fence_forgotten"], || {
        release_and_resolve(Apply::Hogwild);
    });
}

#[test]
fn a_pull_is_one_whole_version() {
    check("push and pull", None, &["version_read_early"], || {
        let shard = shard(Apply::Exact);
        let pusher = thread::spawn({
            let shard = shard.clone();
            move || push(&shard, SLICE, 1)
        });
        let pinned = shard.pull(0, SLICE).unwrap();
        pusher.join().unwrap().one().unwrap();
        let value = f32::from_le_bytes(pinned.as_ref().try_into().unwrap());
        assert_eq!(pinned.version as f32, value, "pinned values do not change");
        assert_eq!(pull(&shard), (1, 1.0));
    });
}

/// One client pushes to two slices, to the second after the first has answered. A cut starts meanwhile, and
/// is written in the order that is most likely to show an error.
fn push_twice_and_cut() {
    let shard = shard(Apply::Exact);
    let second = SliceId(6);
    shard.create(&Arc::new(spec(Apply::Exact)), 0, &[(second, 0)]).unwrap();
    let pushing = shard.clone();
    let pusher = thread::spawn(move || {
        push(&pushing, SLICE, 1).one().unwrap();
        push(&pushing, second, 1).one().unwrap();
    });
    shard.begin_cut("default").unwrap();
    let in_cut = |id| shard.slice(id).unwrap().image_in_cut().unwrap().standing.version;
    let (earlier, later) = (in_cut(SLICE), in_cut(second));
    pusher.join().unwrap();
    assert!(later <= earlier, "the cut has a push without one that was answered before it was sent");
}

#[test]
fn a_cut_has_whatever_its_pushes_rely_on() {
    check("a cut", Some(3), &["cut_unseen"], push_twice_and_cut);
}

#[test]
fn a_reader_hands_its_buffer_back() {
    check("push and the end of a pull", None, &["spare_not_filled"], || {
        let shard = shard(Apply::Exact);
        let used = |shard: &Shard| shard.counters().into_iter().find(|(name, _)| *name == "memory_used");
        let before = used(&shard);
        let pinned = shard.pull(0, SLICE).unwrap();
        push(&shard, SLICE, 1).one().unwrap();
        // The first version's buffer is now the spare one; its reader drops it while two pushes look for a
        // spare buffer.
        let reader = thread::spawn(move || {
            let value = f32::from_le_bytes(pinned.as_ref().try_into().unwrap());
            assert_eq!((pinned.version, value), (0, 0.0));
        });
        let second = shard.pull(0, SLICE).unwrap();
        push(&shard, SLICE, 2).one().unwrap();
        assert_eq!(second.as_ref(), 1.0_f32.to_le_bytes());
        drop(second);
        push(&shard, SLICE, 3).one().unwrap();
        reader.join().unwrap();
        assert_eq!(pull(&shard), (3, 3.0));
        (1..=3).for_each(|client| shard.forget_client(client));
        assert_eq!(used(&shard), before, "the readers' memory is returned");
    });
}

#[test]
fn slices_of_one_registration_appear_together() {
    check("create and push", None, &["created_one_by_one"], || {
        let shard = Arc::new(Shard::new(ShardConfig::new(0, 1 << 20, Isa::Scalar)));
        let creator = thread::spawn({
            let shard = shard.clone();
            move || shard.create(&Arc::new(spec(Apply::Exact)), 0, &[(SLICE, 0), (SliceId(6), 0)]).unwrap()
        });
        let first = push(&shard, SLICE, 1).one();
        let second = push(&shard, SliceId(6), 1).one();
        creator.join().unwrap();
        match (first, second) {
            (Err(error), Err(_)) => assert_eq!(error.kind, Kind::UnknownTensor),
            (Err(_), Ok(_)) => {}
            (Ok(_), second) => assert_eq!(second.unwrap().version, 1),
        }
    });
}

#[test]
fn of_two_registrations_of_a_slice_one_wins() {
    check("create and create", None, &["existence_not_checked"], || {
        let shard = Arc::new(Shard::new(ShardConfig::new(0, 1 << 20, Isa::Scalar)));
        let create = |shard: &Shard| shard.create(&Arc::new(spec(Apply::Exact)), 0, &[(SLICE, 0)]).is_ok();
        let other = thread::spawn({
            let shard = shard.clone();
            move || create(&shard)
        });
        let mine = create(&shard);
        assert!(mine != other.join().unwrap(), "exactly one of the two");
    });
}

#[test]
fn a_removal_leaves_nothing_behind() {
    check("remove and push", None, &["slice_kept"], || {
        let shard = shard(Apply::Exact);
        let remover = thread::spawn({
            let shard = shard.clone();
            move || shard.remove(&[SLICE])
        });
        match push(&shard, SLICE, 1).one() {
            Ok(applied) => assert_eq!(applied.version, 1),
            Err(error) => assert_eq!(error.kind, Kind::UnknownTensor),
        }
        remover.join().unwrap();
        let counters = shard.counters();
        assert!(counters.contains(&("slices", 0)) && counters.contains(&("memory_used", 0)), "{counters:?}");
    });
}

/// The names that a process finds in a shared store's list; an incomplete entry is an error.
fn listed(directory: &Directory) -> Vec<String> {
    let mut names = Vec::new();
    directory
        .news(|tensor| {
            names.push(tensor.spec().name.to_string());
            Ok(())
        })
        .unwrap();
    names
}

fn append(directory: &Directory, name: &str) {
    let _lock = directory.lock(std::time::Duration::MAX).unwrap();
    let spec = TensorSpec { name: name.into(), ..spec(Apply::Hogwild) };
    directory.append(&spec, &[0; 4]).unwrap();
}

#[test]
fn processes_that_register_in_a_shared_store_list_both_and_a_reader_sees_whole_entries() {
    check("shared store", None, &["directory_unlocked", "published_early"], || {
        let one = Directory::create().unwrap();
        let (two, reader) = (one.another().unwrap(), one.another().unwrap());
        let appends = thread::spawn(move || append(&two, "b"));
        let reads = thread::spawn(move || {
            let first = listed(&reader);
            (first, reader)
        });
        append(&one, "a");
        appends.join().unwrap();
        let (first, reader) = reads.join().unwrap();
        let all = [first, listed(&reader)].concat();
        assert!(all == ["a", "b"] || all == ["b", "a"], "{all:?}");
        assert_eq!(listed(&one), all);
    });
}

/// A worker takes its place in the group of the only slice.
fn join(shard: &Shard, client: u64, mode: Mode) {
    let seat = MembershipRequest::new(mode, None, String::new());
    shard.groups().join(0, client, seat, shard.meter()).unwrap();
}

fn quorum(workers: u32, backup: u32) -> Mode {
    Mode::Sync(Quorum { workers, backup, sum: true, ..Quorum::default() })
}

fn value(shard: &Shard) -> f32 {
    bytemuck::pod_read_unaligned(shard.pull(0, SLICE).unwrap().as_ref())
}

/// Pushes -1, based on version 0. The list receives the answers.
fn contribute(shard: &Shard, client: u64, results: &Arc<Mutex<Vec<Result<Applied>>>>) {
    let body = (-1.0_f32).to_le_bytes();
    let push = Push {
        base: Some(Base { version: 0, own: Some(0) }),
        largest: Some(0.0),
        ..Push::gradient(SLICE, Identity { client, sequence: 1 }, 1, CodecId::Float32, &body)
    };
    let results = results.clone();
    shard.push(&push, move |result| results.lock().unwrap().push(result));
}

#[test]
fn a_version_takes_the_first_gradients_and_refuses_the_rest() {
    check("a quorum with a backup", Some(3), &["quorum_of_one_less", "late_gradient_counts"], || {
        let (shard, results) = (shard(Apply::Exact), Arc::default());
        (1..=3).for_each(|client| join(&shard, client, quorum(2, 1)));
        let threads: Vec<_> = (1..=2)
            .map(|client| {
                let (shard, results) = (shard.clone(), Arc::clone(&results));
                thread::spawn(move || contribute(&shard, client, &results))
            })
            .collect();
        contribute(&shard, 3, &results);
        threads.into_iter().for_each(|thread| thread.join().unwrap());
        let results = results.lock().unwrap();
        assert_eq!(results.len(), 3);
        assert_eq!(results.iter().filter(|result| result.as_ref().is_ok_and(|a| a.version == 1)).count(), 2);
        let late = results.iter().filter_map(|result| result.as_ref().err()).map(|error| error.kind);
        assert_eq!(late.collect::<Vec<_>>(), [Kind::StalePush]);
        assert_eq!(value(&shard), 2.0);
    });
}

#[test]
fn nobody_waits_for_a_worker_whose_lease_ends() {
    check("a quorum and the end of a lease", Some(3), &["table_looked_at_once"], || {
        let (shard, results) = (shard(Apply::Exact), Arc::default());
        (1..=2).for_each(|client| join(&shard, client, quorum(2, 0)));
        let sweeper = {
            let shard = shard.clone();
            thread::spawn(move || shard.forget_client(2))
        };
        contribute(&shard, 1, &results);
        sweeper.join().unwrap();
        assert!(results.lock().unwrap().iter().all(|result| result.as_ref().unwrap().version == 1));
        assert_eq!((results.lock().unwrap().len(), value(&shard)), (1, 1.0));
    });
}

#[test]
fn clocks_wake_whoever_waits() {
    check("clocks and the end of a lease", Some(3), &["leaver_waited_for"], || {
        let shard = shard(Apply::Exact);
        (1..=3).for_each(|client| join(&shard, client, Mode::Bounded { staleness: 0 }));
        let results: Arc<Mutex<Vec<u64>>> = Arc::default();
        let advance = |shard: &Shard, client, results: &Arc<Mutex<Vec<u64>>>| {
            let results = results.clone();
            let done =
                Box::new(move |result: Result<Clocks>| results.lock().unwrap().push(result.unwrap().slowest));
            shard.groups().advance(0, client, false, 1, done);
        };
        let other = {
            let (shard, results) = (shard.clone(), results.clone());
            thread::spawn(move || advance(&shard, 2, &results))
        };
        let sweeper = {
            let shard = shard.clone();
            thread::spawn(move || shard.forget_client(3))
        };
        advance(&shard, 1, &results);
        other.join().unwrap();
        sweeper.join().unwrap();
        assert_eq!(*results.lock().unwrap(), [1, 1]);
    });
}
