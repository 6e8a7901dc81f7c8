//! Groups of workers: versions made by several workers, clocks, warm starts, and workers that leave. The
//! order of arrivals is fixed, and each slice must equal a serial model bit for bit.

use fastps_core::codec::{Codec, CodecId, Position};
use fastps_core::error::{Error, Kind, Result};
use fastps_core::frame::{Action, Applied, Base, Identity, Push};
use fastps_core::group::Groups;
use fastps_core::identity::Completion;
use fastps_core::isa::Isa;
use fastps_core::mode::{Clocks, Epoch, MembershipRequest, Mode, Presence, Quorum, Robust};
use fastps_core::optim::{Adam, Optimizer, Sgd};
use fastps_core::policy::{Admission, Held, Policy};
use fastps_core::record::{Identities, Record, Sink};
use fastps_core::rows::Indices;
use fastps_core::shard::{Meter, Purpose, Shard, ShardConfig};
use fastps_core::slice::{Image, Resolved, Slice};
use fastps_core::tensor::{Apply, SliceId, TensorSpec};
use std::sync::{Arc, Mutex};

const SLICE: SliceId = SliceId(9);
const LEN: usize = 200;
const WIDTH: usize = 4;
const GROUP: u32 = 4;
const MEDIAN: Option<Robust> = Some(Robust::Median);

type Answer = Arc<Mutex<Option<Result<Applied>>>>;

/// The records, with bodies and identities copied, as a log keeps them.
#[derive(Debug, Default)]
struct Log(Mutex<Vec<(Record<'static>, Vec<u8>)>>);

impl Sink for Log {
    fn record(&self, record: &Record<'_>) {
        let body = Box::leak(record.body.to_vec().into_boxed_slice());
        let shared_by = record.shared_by.bytes().to_vec();
        let indices = record
            .indices
            .map(|indices| Indices::new(Box::leak(indices.bytes().to_vec().into_boxed_slice())));
        let record = Record { body, indices, shared_by: Identities::default(), note: "", ..*record };
        self.0.lock().unwrap().push((record, shared_by));
    }
}

fn spec(apply: Apply) -> Arc<TensorSpec> {
    let optimizer = Optimizer::Sgd(Sgd { lr: 0.1, momentum: 0.9, ..Sgd::default() });
    Arc::new(TensorSpec { apply, group: "g".into(), ..TensorSpec::new("w", [LEN as u64], optimizer) })
}

/// Rows of `WIDTH`, for sparse gradients.
fn table() -> Arc<TensorSpec> {
    let optimizer = Optimizer::Adam(Adam { lr: 0.1, ..Adam::default() });
    let shape = vec![(LEN / WIDTH) as u64, WIDTH as u64];
    Arc::new(TensorSpec { shape, optimizer, ..(*spec(Apply::Exact)).clone() })
}

struct World {
    shard: Shard,
    log: Arc<Log>,
    sequence: u64,
}

impl World {
    fn new() -> Self {
        Self::with_memory(u64::MAX)
    }

    fn with_memory(limit: u64) -> Self {
        Self::with(limit, &spec(Apply::Exact))
    }

    fn with(limit: u64, spec: &Arc<TensorSpec>) -> Self {
        let log = Arc::new(Log::default());
        let shard =
            Shard::new(ShardConfig { sink: Some(log.clone()), ..ShardConfig::new(0, limit, Isa::best()) });
        shard.create(spec, GROUP, &[(SLICE, 0)]).unwrap();
        Self { shard, log, sequence: 0 }
    }

    fn join(&self, client: u64, mode: Mode, rank: Option<u32>) -> Result<Vec<String>> {
        let seat = MembershipRequest::new(mode, rank, format!("w{client}"));
        self.shard.groups().join(GROUP, client, seat, self.shard.meter()).map(|joined| joined.workers)
    }

    /// Joins again, with another presence; the worker's clock.
    fn appear(&self, client: u64, mode: Mode, presence: Presence) -> u64 {
        let seat = MembershipRequest { presence, ..MembershipRequest::new(mode, None, "w") };
        self.shard.join(GROUP, client, &seat).unwrap().clock
    }

    fn send(&self, push: &Push<'_>) -> Answer {
        let answer = Answer::default();
        let reply = answer.clone();
        self.shard.push(push, move |result| *reply.lock().unwrap() = Some(result));
        answer
    }

    /// Pushes a gradient that is based on a version.
    fn push(&mut self, client: u64, base: u64, body: &[u8], codec: CodecId) -> Answer {
        self.sequence += 1;
        self.send(&push(client, self.sequence, base, body, codec))
    }

    fn plain(&mut self, client: u64, base: u64, values: &[f32]) -> Answer {
        self.push(client, base, bytemuck::cast_slice(values), CodecId::Float32)
    }

    fn rows(&mut self, client: u64, base: u64, (rows, values): &(Vec<u32>, Vec<f32>)) -> Answer {
        self.sequence += 1;
        let indices: Vec<u8> = rows.iter().flat_map(|row| row.to_le_bytes()).collect();
        let body = bytemuck::cast_slice(values);
        let whole = push(client, self.sequence, base, body, CodecId::Float32);
        let (indices, count) = (Some(Indices::new(&indices)), values.len() as u64);
        self.send(&Push { indices, count, ..whole })
    }

    fn image(&self) -> Image {
        self.shard.slice(SLICE).unwrap().image().unwrap()
    }

    fn values(&self) -> Vec<f32> {
        bytemuck::cast_slice(self.shard.pull(0, SLICE).unwrap().as_ref()).to_vec()
    }

    fn version(&self) -> u64 {
        self.shard.slice(SLICE).unwrap().version(0).0
    }
}

fn push(client: u64, sequence: u64, base: u64, body: &[u8], codec: CodecId) -> Push<'_> {
    Push {
        base: Some(Base { version: base, own: Some(0) }),
        ..Push::gradient(SLICE, Identity { client, sequence }, LEN as u64, codec, body)
    }
}

fn quorum(workers: u32, backup: u32) -> Quorum {
    Quorum { workers, backup, ..Quorum::default() }
}

fn kind(answer: &Answer) -> Option<Kind> {
    answer.lock().unwrap().clone().map(|result| result.unwrap_err().kind)
}

fn applied(answer: &Answer) -> Applied {
    answer.lock().unwrap().clone().unwrap().unwrap()
}

fn waits(answer: &Answer) -> bool {
    answer.lock().unwrap().is_none()
}

fn gradient(seed: usize) -> Vec<f32> {
    (0..LEN).map(|k| ((k * 37 + seed * 101) % 97) as f32 / 31.0 - 1.5).collect()
}

/// SGD with momentum, as in torch, on the sum of gradients in order.
struct Model {
    values: Vec<f32>,
    momentum: Vec<f32>,
    steps: u64,
}

impl Model {
    fn new() -> Self {
        Self { values: vec![0.0; LEN], momentum: vec![0.0; LEN], steps: 0 }
    }

    fn step(&mut self, gradients: &[&Vec<f32>], share: f32) {
        for k in 0..LEN {
            let sum = gradients.iter().fold(0.0_f32, |sum, gradient| sum + gradient[k]);
            let g = sum * share;
            self.momentum[k] = if self.steps == 0 { g } else { self.momentum[k] * 0.9 + g };
            self.values[k] = (-0.1_f32).mul_add(self.momentum[k], self.values[k]);
        }
        self.steps += 1;
    }
}

#[test]
fn a_version_is_the_mean_of_the_first_gradients_for_it() {
    let (mut world, mut model) = (World::new(), Model::new());
    for client in 1..=4 {
        world.join(client, Mode::Sync(quorum(3, 1)), None).unwrap();
    }
    assert_eq!(world.join(5, Mode::Sync(quorum(3, 1)), None).unwrap_err().kind, Kind::Unavailable);
    let third = 1.0 / 3.0_f32;
    for round in 0..20_usize {
        let base = round as u64;
        // Each round has another order of arrivals.
        let order: Vec<u64> = (0..4).map(|k| 1 + (k * (1 + 2 * (round as u64 % 2)) + base) % 4).collect();
        let gradients: Vec<_> = order.iter().map(|client| gradient(round * 7 + *client as usize)).collect();
        let answers: Vec<_> =
            order.iter().zip(&gradients).map(|(client, g)| world.plain(*client, base, g)).collect();
        assert!(answers[..3].iter().all(|answer| applied(answer).version == base + 1), "{round}");
        assert_eq!(kind(&answers[3]), Some(Kind::StalePush));
        assert_eq!((applied(&answers[0]).staleness, applied(&answers[0]).scale), (Some(0), third));
        model.step(&gradients[..3].iter().collect::<Vec<_>>(), third);
        assert_eq!(world.values(), model.values, "{round}");
    }
    assert_eq!(world.version(), 20);
}

#[test]
fn nothing_counts_before_its_version_is_made() {
    let mut world = World::new();
    for client in 1..=2 {
        world.join(client, Mode::Sync(quorum(2, 0)), None).unwrap();
    }
    let g = gradient(1);
    let first = world.plain(1, 0, &g);
    assert!(waits(&first) && world.version() == 0 && world.values() == vec![0.0; LEN]);
    // A repeat of the push waits with it; a second gradient of the worker does not count.
    let again = world.send(&push(1, 1, 0, bytemuck::cast_slice(&g), CodecId::Float32));
    assert_eq!(kind(&world.plain(1, 0, &g)), Some(Kind::Precondition));
    assert!(waits(&first) && waits(&again));
    // A query for its outcome is answered once the outcome is known.
    let identity = Identity { client: 1, sequence: 1 };
    let result = Arc::new(Mutex::new(false));
    let tell = result.clone();
    let later = || -> Completion { Box::new(move |result| *tell.lock().unwrap() = result.is_ok()) };
    assert!(world.shard.resolve_later(SLICE, identity, later).is_none());
    assert_eq!(world.shard.resolve(SLICE, identity).unwrap_err().kind, Kind::Unavailable);
    let second = world.plain(2, 0, &g);
    assert_eq!((applied(&first).duplicate, applied(&again).duplicate), (false, true));
    assert!(*result.lock().unwrap());
    assert_eq!(applied(&second).version, 1);
    let resolved = world.shard.resolve(SLICE, identity).unwrap();
    assert!(matches!(resolved, Resolved::Applied(applied) if applied.version == 1));
}

#[test]
fn ranks_give_the_order_of_the_sum() {
    let deterministic = Quorum { deterministic: true, ..quorum(4, 0) };
    let big = |x: f32| vec![x; LEN];
    // Another order of the sum gives other bits.
    let gradients = [big(1e8), big(1.0), big(-1e8), big(0.5)];
    let run = |order: [usize; 4], quorum: Quorum| {
        let mut world = World::new();
        for rank in 0..4 {
            world.join(1 + rank, Mode::Sync(quorum), Some(rank as u32)).unwrap();
        }
        for rank in order {
            world.plain(1 + rank as u64, 0, &gradients[rank]);
        }
        assert_eq!(world.version(), 1);
        world.values()[0].to_bits()
    };
    let first = run([0, 1, 2, 3], deterministic);
    for order in [[3, 2, 1, 0], [2, 0, 3, 1], [1, 3, 0, 2]] {
        assert_eq!(run(order, deterministic), first, "{order:?}");
    }
    assert_ne!(run([3, 2, 1, 0], quorum(4, 0)), run([0, 2, 1, 3], quorum(4, 0)));
    let world = World::new();
    assert_eq!(world.join(1, Mode::Sync(deterministic), None).unwrap_err().kind, Kind::Config);
    world.join(1, Mode::Sync(deterministic), Some(2)).unwrap();
    assert_eq!(world.join(2, Mode::Sync(deterministic), Some(2)).unwrap_err().kind, Kind::Unavailable);
    world.join(2, Mode::Sync(deterministic), Some(1)).unwrap();
}

#[test]
fn a_gradient_that_is_replaced_leaves_no_rate_behind() {
    let mode = Mode::Sync(Quorum { deterministic: true, sum: true, ..quorum(2, 1) });
    let mut world = World::new();
    world.join(1, mode, Some(0)).unwrap();
    world.join(2, mode, Some(1)).unwrap();
    let ones = vec![1.0_f32; LEN];
    let small = Push { lr: Some(1e-6), ..push(1, 1, 0, bytemuck::cast_slice(&ones), CodecId::Float32) };
    let old = world.send(&small);
    // The worker restarted while its earlier gradient waits.
    world.shard.forget_client(1);
    world.join(3, mode, Some(0)).unwrap();
    let new = world.plain(3, 0, &ones);
    assert_eq!(kind(&old), Some(Kind::StalePush));
    assert!(waits(&new));
    world.plain(2, 0, &ones);
    assert_eq!(world.values(), [-0.2; LEN]);
}

#[test]
fn of_many_workers_some_are_named() {
    let world = World::new();
    for client in 1..=50 {
        world.join(client, Mode::Bounded { staleness: 1 }, None).unwrap();
    }
    let seat = MembershipRequest::new(Mode::Bounded { staleness: 1 }, None, "last");
    let joined = world.shard.groups().join(GROUP, 51, seat, world.shard.meter()).unwrap();
    assert_eq!((joined.present, joined.workers.len(), &*joined.workers[0]), (51, 8, "\"w1\""));
    let refused = world.join(60, Mode::Free, None).unwrap_err();
    assert!(refused.message.ends_with("\"w8\" and 43 more"), "{refused}");
    advance(&world, 1, false, 1);
    advance(&world, 1, false, 2);
    assert_eq!(world.shard.groups().behind(GROUP, 1, false).len(), 8);
}

#[test]
fn groups_with_workers_are_bounded() {
    let (groups, meter) = (Groups::default(), Meter::new(1 << 30));
    let join = |group| {
        groups.join(group, 1, MembershipRequest::new(Mode::Free, None, String::new()), &meter).map(|_| ())
    };
    (0..1 << 12).for_each(|group| join(group).unwrap());
    assert_eq!(join(1 << 12).unwrap_err().kind, Kind::Capacity);
    // An existing group accepts its worker again.
    join(7).unwrap();
}

#[test]
fn the_sum_takes_the_step_once() {
    let mut world = World::new();
    let sum = Quorum { sum: true, ..quorum(2, 0) };
    for client in 1..=2 {
        world.join(client, Mode::Sync(sum), None).unwrap();
    }
    let (a, b, mut model) = (gradient(1), gradient(2), Model::new());
    world.plain(1, 0, &a);
    world.plain(2, 0, &b);
    model.step(&[&a, &b], 1.0);
    assert_eq!(world.values(), model.values);
    assert_eq!(world.shard.slice(SLICE).unwrap().image().unwrap().standing.step, 1);
    // The smallest requested learning rate applies.
    let bytes = bytemuck::cast_slice(&a);
    world.send(&Push { lr: Some(0.5), ..push(1, 50, 1, bytes, CodecId::Float32) });
    world.send(&Push { lr: Some(0.25), ..push(2, 51, 1, bytes, CodecId::Float32) });
    assert_eq!(world.log.0.lock().unwrap().last().unwrap().0.lr, 0.25);
    // A sum that is not finite changes nothing.
    let huge = vec![f32::MAX; LEN];
    let (before, answers) = (world.values(), [world.plain(1, 2, &huge), world.plain(2, 2, &huge)]);
    assert!(answers.iter().all(|answer| kind(answer) == Some(Kind::NonFinite)));
    assert_eq!((world.values(), world.version()), (before, 2));
    assert!(waits(&world.plain(1, 2, &a)));
    assert_eq!(applied(&world.plain(2, 2, &a)).version, 3);
}

#[test]
fn a_worker_that_is_gone_is_not_waited_for() {
    let mut world = World::new();
    for client in 1..=3 {
        world.join(client, Mode::Sync(quorum(3, 0)), None).unwrap();
    }
    let (a, b, mut model) = (gradient(1), gradient(2), Model::new());
    let waiting = [world.plain(1, 0, &a), world.plain(2, 0, &b)];
    assert!(waiting.iter().all(waits));
    world.shard.forget_client(3);
    model.step(&[&a, &b], 0.5);
    assert!(waiting.iter().all(|answer| applied(answer).version == 1));
    assert_eq!(world.values(), model.values);
    // Late gradients of the dropped worker are refused; it may join again.
    assert_eq!(kind(&world.plain(3, 0, &a)), Some(Kind::Precondition));
    world.join(4, Mode::Sync(quorum(3, 0)), None).unwrap();
    // It counts from the next version on.
    assert!(waits(&world.plain(1, 1, &a)));
    assert_eq!(applied(&world.plain(2, 1, &b)).version, 2);
    assert_eq!(kind(&world.plain(4, 1, &a)), Some(Kind::StalePush));
    let waiting = [world.plain(1, 2, &a), world.plain(2, 2, &b)];
    assert!(waiting.iter().all(waits));
    assert_eq!(applied(&world.plain(4, 2, &a)).version, 3);
    // A worker leaves while its gradient waits: the gradient counts, and no more is expected of it.
    assert!(waits(&world.plain(4, 3, &a)));
    world.shard.leave(GROUP, 4, false);
    assert!(waits(&world.plain(1, 3, &a)));
    world.shard.leave(GROUP, 2, false);
    assert_eq!(world.version(), 4);
    assert_eq!(applied(&world.plain(1, 4, &a)).version, 5);
}

/// The mode of workers that take local steps.
fn rounds(workers: u32, enough: u32, grace_ms: u64) -> Mode {
    Mode::Sync(Quorum { enough, grace_ms, weighted: true, every: 5, ..quorum(workers, 0) })
}

#[test]
fn a_version_waits_for_a_grace_after_its_quorum() {
    let mut world = World::new();
    (1..=4).for_each(|client| drop(world.join(client, rounds(4, 2, 100), None).unwrap()));
    let (a, b, c, mut model) = (gradient(1), gradient(2), gradient(3), Model::new());
    // No grace begins before the quorum, and none is shorter than asked for.
    assert!(waits(&world.plain(1, 0, &a)));
    world.shard.end_graces(1000);
    assert!(waits(&world.plain(2, 0, &b)));
    for now in [1050, 1149] {
        world.shard.end_graces(now);
        assert_eq!(world.version(), 0, "{now}");
    }
    assert!(waits(&world.plain(3, 0, &c)));
    world.shard.end_graces(1150);
    model.step(&[&a, &b, &c], 1.0 / 3.0);
    assert_eq!((world.version(), world.values()), (1, model.values));
    assert_eq!(kind(&world.plain(4, 0, &a)), Some(Kind::StalePush));
    // The next grace begins anew; the version of all does not wait for it.
    assert!((1..=2).all(|client| waits(&world.plain(client, 1, &a))));
    world.shard.end_graces(2000);
    assert!(waits(&world.plain(3, 1, &a)));
    assert_eq!(applied(&world.plain(4, 1, &a)).version, 2);
    assert!((1..=2).all(|client| waits(&world.plain(client, 2, &a))));
    world.shard.end_graces(3000);
    assert_eq!(world.version(), 2);
    // A quorum above the number of workers left is that number; without a grace, it makes the version at once.
    (2..=4).for_each(|client| world.shard.forget_client(client));
    assert_eq!(world.version(), 3);
    world.shard.forget_client(1);
    (5..=7).for_each(|client| drop(world.join(client, rounds(3, 2, 0), None).unwrap()));
    assert!(waits(&world.plain(5, 3, &a)));
    assert_eq!(applied(&world.plain(6, 3, &a)).version, 4);
}

#[test]
fn a_worker_learns_that_a_version_goes_on_without_it() {
    let mut world = World::new();
    (1..=3).for_each(|client| drop(world.join(client, rounds(3, 2, 100), None).unwrap()));
    let a = gradient(1);
    let goes_on = |world: &World, base| {
        let asked = (1..=3).map(|client| world.shard.goes_on_without(GROUP, SLICE, client, base).unwrap());
        asked.collect::<Vec<_>>()
    };
    assert!(waits(&world.plain(1, 0, &a)));
    assert_eq!(goes_on(&world, 0), [false; 3]);
    assert!(waits(&world.plain(2, 0, &a)));
    assert_eq!(goes_on(&world, 0), [false, false, true]);
    assert_eq!(applied(&world.plain(3, 0, &a)).version, 1);
    assert_eq!((goes_on(&world, 0), goes_on(&world, 1)), (vec![true; 3], vec![false; 3]));
    // Only those ask who have a place in the slice's group.
    world.join(4, rounds(3, 2, 100), None).unwrap_err();
    for (group, slice, client) in [(GROUP, SLICE, 4), (GROUP + 1, SLICE, 1), (GROUP, SliceId(77), 1)] {
        world.shard.goes_on_without(group, slice, client, 0).unwrap_err();
    }
}

#[test]
fn nobody_waits_for_the_first_steps_of_a_newcomer() {
    let mut world = World::new();
    let a = gradient(1);
    // Any number of workers; the first one trains alone.
    for client in [1, 2] {
        world.join(client, rounds(0, 0, 0), None).unwrap();
    }
    assert_eq!(applied(&world.plain(1, 0, &a)).version, 1);
    assert!(waits(&world.plain(1, 1, &a)));
    world.join(3, rounds(0, 0, 0), None).unwrap();
    // A newcomer that is fast enough is in the version, but does not take the place of another.
    assert!(waits(&world.plain(3, 1, &a)));
    assert_eq!(applied(&world.plain(2, 1, &a)).version, 2);
    assert!(waits(&world.plain(1, 2, &a)) && waits(&world.plain(2, 2, &a)));
    assert_eq!(applied(&world.plain(3, 2, &a)).version, 3);
}

#[test]
fn a_gradient_counts_by_its_weight() {
    let (a, b, c) = (gradient(1), gradient(2), gradient(3));
    let weights = [3.0_f32, 0.5, 7.0];
    let mut model = Model::new();
    let weighed = |g: &[f32], by: f32| g.iter().map(|x| x * by).collect::<Vec<_>>();
    let parts = [weighed(&a, weights[0]), weighed(&b, weights[1]), weighed(&c, weights[2])];
    model.step(&[&parts[0], &parts[1], &parts[2]], 1.0 / 10.5);
    for (deterministic, order) in [(false, [0, 1, 2]), (true, [0, 1, 2]), (true, [2, 0, 1])] {
        let world = World::new();
        let Mode::Sync(mode) = rounds(3, 0, 0) else { unreachable!() };
        for rank in 0..3 {
            world.join(1 + rank, Mode::Sync(Quorum { deterministic, ..mode }), Some(rank as u32)).unwrap();
        }
        for bad in [0.0, -1.0, f32::NAN, f32::INFINITY] {
            let one = Push { weight: Some(bad), ..push(1, 9, 0, bytemuck::cast_slice(&a), CodecId::Float32) };
            assert_eq!(kind(&world.send(&one)), Some(Kind::Config), "{bad}");
        }
        for k in order {
            let body = bytemuck::cast_slice([&a, &b, &c][k]);
            let whole = push(1 + k as u64, 1, 0, body, CodecId::Float32);
            world.send(&Push { weight: Some(weights[k]), ..whole });
        }
        assert_eq!((world.version(), world.values()), (1, model.values.clone()), "{deterministic} {order:?}");
        // The record has the sum and the factor, so that a replay needs no weight.
        let log = world.log.0.lock().unwrap();
        assert_eq!((log.len(), log[0].0.scale), (1, 1.0 / 10.5));
    }
    // Elsewhere a weight has no meaning.
    for mode in [Mode::Free, Mode::Sync(quorum(1, 0))] {
        let world = World::new();
        world.join(1, mode, None).unwrap();
        let whole = push(1, 1, 0, bytemuck::cast_slice(&a), CodecId::Float32);
        assert_eq!(kind(&world.send(&Push { weight: Some(1.0), ..whole })), Some(Kind::Precondition));
    }
}

#[test]
fn a_worker_without_a_portion_is_not_waited_for_until_the_next_epoch() {
    let mut world = World::new();
    let mode = Mode::Sync(quorum(3, 0));
    let at = |epoch| Epoch { run: 7, epoch };
    (1..=3).for_each(|client| drop(world.join(client, mode, None).unwrap()));
    let (a, b, mut model) = (gradient(1), gradient(2), Model::new());
    let waiting = [world.plain(1, 0, &a), world.plain(2, 0, &b)];
    assert!(waiting.iter().all(waits));
    world.appear(3, mode, Presence::Idle(at(0)));
    model.step(&[&a, &b], 0.5);
    assert!(waiting.iter().all(|answer| applied(answer).version == 1));
    world.appear(2, mode, Presence::Idle(at(0)));
    model.step(&[&a], 1.0);
    assert_eq!(applied(&world.plain(1, 1, &a)).version, 2);
    assert_eq!(world.values(), model.values);
    // The next epoch begins for all; what comes late, of the former one, changes nothing.
    world.appear(1, mode, Presence::Rouses(at(1)));
    world.appear(2, mode, Presence::Idle(at(0)));
    assert!(waits(&world.plain(1, 2, &a)) && waits(&world.plain(2, 2, &b)));
    world.appear(3, mode, Presence::Idle(at(1)));
    assert_eq!(world.version(), 3);
    world.appear(2, mode, Presence::Rouses(at(1)));
    assert!(waits(&world.plain(1, 3, &a)));
    assert_eq!(applied(&world.plain(2, 3, &b)).version, 4);
    // Its place stays its own, and so does the group's size.
    assert_eq!(world.join(4, mode, None).unwrap_err().kind, Kind::Unavailable);
    world.appear(3, mode, Presence::Active);
    let waiting = [world.plain(1, 4, &a), world.plain(2, 4, &b)];
    assert!(waiting.iter().all(waits));
    assert_eq!(applied(&world.plain(3, 4, &b)).version, 5);
    // Of other portions.
    world.appear(3, mode, Presence::Idle(Epoch { run: 8, epoch: 0 }));
    world.appear(1, mode, Presence::Rouses(at(2)));
    assert!(waits(&world.plain(1, 5, &a)));
    assert_eq!(applied(&world.plain(2, 5, &b)).version, 6);
}

#[test]
fn clocks_go_on_without_those_that_have_no_portion() {
    let world = World::new();
    let mode = Mode::Bounded { staleness: 0 };
    (1..=2).for_each(|client| drop(world.join(client, mode, None).unwrap()));
    let ahead = advance(&world, 1, false, 1);
    assert_eq!(clocks(&ahead), None);
    let idle = Presence::Idle(Epoch { run: 7, epoch: 0 });
    world.appear(2, mode, idle);
    assert_eq!(clocks(&ahead), Some((1, false)));
    assert_eq!(clocks(&advance(&world, 1, false, 5)), Some((5, false)));
    assert_eq!(world.shard.groups().behind(GROUP, 1, false), Vec::<String>::new());
    // It begins where the others are.
    assert_eq!(world.appear(2, mode, Presence::Active), 5);
    assert_eq!(clocks(&advance(&world, 1, false, 6)), None);
}

#[test]
fn other_changes_end_a_version_under_way() {
    let mut world = World::new();
    for client in 1..=2 {
        world.join(client, Mode::Sync(quorum(2, 0)), None).unwrap();
    }
    let g = gradient(1);
    let waiting = world.plain(1, 0, &g);
    let assign = Push {
        action: Action::Assign,
        base: None,
        ..push(7, 1, 0, bytemuck::cast_slice(&g), CodecId::Float32)
    };
    assert_eq!(applied(&world.send(&assign)).version, 1);
    assert_eq!(kind(&waiting), Some(Kind::StalePush));
    // The push counts as never received.
    let identity = Identity { client: 1, sequence: 1 };
    assert_eq!(world.shard.resolve(SLICE, identity).unwrap(), Resolved::Fenced);
    let codec = CodecId::Float32;
    let body = bytemuck::cast_slice(&g);
    for (wrong, kind_of) in [
        (push(9, 9, 1, body, codec), Kind::Precondition),
        (Push { base: None, ..push(1, 9, 1, body, codec) }, Kind::Precondition),
        (push(1, 9, 0, body, codec), Kind::StalePush),
        // Momentum moves every row.
        (
            Push {
                indices: Some(Indices::new(&[0, 0, 0, 0])),
                count: 1,
                body: &body[..4],
                ..push(1, 9, 1, body, codec)
            },
            Kind::Precondition,
        ),
    ] {
        assert_eq!(kind(&world.send(&wrong)), Some(kind_of));
    }
    assert_eq!((world.version(), world.shard.meter().used_for(Purpose::Held)), (1, 0));
}

#[test]
fn memory_of_waiting_gradients_is_counted_and_given_back() {
    let probe = World::new();
    let free = probe.shard.meter().used();
    let mut world = World::with_memory(free + 20_000);
    let deterministic = Mode::Sync(Quorum { deterministic: true, ..quorum(3, 0) });
    for client in 1..=3 {
        world.join(client, deterministic, Some(client as u32)).unwrap();
    }
    let held = |world: &World| world.shard.meter().used_for(Purpose::Held);
    let g = gradient(1);
    let waiting = world.plain(1, 0, &g);
    assert!(waits(&waiting) && held(&world) >= 2 * 4 * LEN as u64);
    (1..=3).for_each(|client| world.shard.forget_client(client));
    assert_eq!((held(&world), kind(&waiting)), (0, Some(Kind::StalePush)));
    assert!(world.shard.groups().is_empty());
    let mut small = World::with_memory(free + 2000);
    small.join(1, deterministic, Some(0)).unwrap();
    assert_eq!(kind(&small.plain(1, 0, &g)), Some(Kind::Capacity));
}

#[test]
fn sparse_gradients_of_a_version_step_the_rows_that_anyone_names() {
    let rows_of = |seed: usize| -> (Vec<u32>, Vec<f32>) {
        let rows: Vec<u32> = (0..50).filter(|row| (row * 7 + seed as u32 * 3) % 11 < 2).collect();
        let rows = if seed % 5 == 4 { vec![] } else { rows };
        let values = gradient(seed)[..WIDTH * rows.len()].to_vec();
        (rows, values)
    };
    let in_place = |(rows, values): &(Vec<u32>, Vec<f32>)| {
        let mut whole = vec![0.0; LEN];
        for (row, values) in rows.iter().zip(values.chunks(WIDTH)) {
            whole[WIDTH * *row as usize..][..WIDTH].copy_from_slice(values);
        }
        whole
    };
    for deterministic in [false, true] {
        let (mut world, mut serial) = (World::with(u64::MAX, &table()), World::with(u64::MAX, &table()));
        let mode = Mode::Sync(Quorum { deterministic, sum: true, ..quorum(3, 0) });
        (1..=3).for_each(|client| drop(world.join(client, mode, Some(client as u32)).unwrap()));
        serial.join(1, Mode::Sync(Quorum { sum: true, ..quorum(1, 0) }), None).unwrap();
        for base in 0..12_u64 {
            let before = world.image();
            let order = [1, 2, 3].map(|k| 1 + (k + base) % 3);
            let given = order.map(|client| rows_of(4 * base as usize + client as usize));
            // Some gradients have all rows.
            let whole = base % 4 == 3;
            for (k, (client, given)) in order.iter().zip(&given).enumerate() {
                if whole && k == 1 {
                    world.plain(*client, base, &in_place(given));
                } else {
                    world.rows(*client, base, given);
                }
            }
            let mut by_place: Vec<_> = order.iter().zip(&given).collect();
            if deterministic {
                by_place.sort_by_key(|(client, _)| **client);
            }
            let mut sum = vec![0.0_f32; LEN];
            for (_, given) in by_place {
                sum.iter_mut().zip(in_place(given)).for_each(|(sum, g)| *sum += g);
            }
            let mut named: Vec<u32> = given.iter().flat_map(|(rows, _)| rows.clone()).collect();
            named.sort_unstable();
            named.dedup();
            if whole {
                serial.plain(1, base, &sum);
            } else {
                let values = named.iter().flat_map(|row| sum[WIDTH * *row as usize..][..WIDTH].to_vec());
                let values = values.collect();
                serial.rows(1, base, &(named.clone(), values));
            }
            let (one, other) = (world.image(), serial.image());
            assert_eq!((one.standing.version, one.standing.step), (base + 1, base + 1));
            assert_eq!(one.values.as_ref(), other.values.as_ref(), "{deterministic} {base}");
            assert_eq!(one.state.as_ref(), other.state.as_ref(), "{deterministic} {base}");
            // The serial one makes rounds, too. After whole gradients, other rows stay as they are again.
            let rows = one.values.as_ref().chunks(4 * WIDTH).zip(before.values.as_ref().chunks(4 * WIDTH));
            let changed = rows.enumerate().filter(|(_, (now, then))| now != then);
            let changed: Vec<_> = changed.map(|(row, _)| row as u32).collect();
            assert!(whole || changed.iter().all(|row| named.contains(row)), "{deterministic} {base}");
        }
        // Replaying the log gives the same.
        let copy = Shard::new(ShardConfig::new(0, u64::MAX, Isa::Scalar));
        copy.create(&table(), GROUP, &[(SLICE, 0)]).unwrap();
        let copy = copy.slice(SLICE).unwrap();
        for (record, shared_by) in world.log.0.lock().unwrap().iter() {
            let shared_by = Identities::new(shared_by).unwrap();
            assert!(copy.replay(&Record { shared_by, ..*record }).unwrap());
        }
        assert_eq!(copy.image().unwrap().values.as_ref(), world.image().values.as_ref());
        assert_eq!(copy.image().unwrap().standing, world.image().standing);
        // A sum that is not finite changes nothing and leaves nothing behind.
        let before = world.image();
        let huge = (vec![3, 9], vec![f32::MAX; 2 * WIDTH]);
        let answers = [1, 2, 3].map(|client| world.rows(client, 12, &huge));
        assert!(answers.iter().all(|answer| kind(answer) == Some(Kind::NonFinite)));
        assert_eq!(world.image().values.as_ref(), before.values.as_ref());
        let last = (vec![9], vec![1.0; WIDTH]);
        for client in [1, 2, 3] {
            world.rows(client, 12, &last);
        }
        serial.rows(1, 12, &(vec![9], vec![3.0; WIDTH]));
        assert_eq!(world.image().values.as_ref(), serial.image().values.as_ref());
        (1..=3).for_each(|client| world.shard.forget_client(client));
        assert_eq!(world.shard.meter().used_for(Purpose::Held), 0);
    }
}

#[test]
fn a_log_repeats_what_several_made_together() {
    let mut world = World::new();
    for client in 1..=3 {
        world.join(client, Mode::Sync(quorum(2, 1)), None).unwrap();
    }
    for round in 0..6_u64 {
        for k in 0..3 {
            let client = 1 + (round + k) % 3;
            let mut body = Vec::new();
            let position = Position { first_element: 0, sequence: round };
            let codec = if k == 0 { Codec::BFloat16 } else { Codec::Float32 };
            codec.encode(Isa::best(), &gradient((round + k) as usize), None, position, &mut body);
            world.push(client, round, &body, codec.id());
        }
    }
    let copy = Shard::new(ShardConfig::new(0, u64::MAX, Isa::Scalar));
    copy.create(&spec(Apply::Exact), GROUP, &[(SLICE, 0)]).unwrap();
    let copy: Arc<Slice> = copy.slice(SLICE).unwrap();
    for (record, shared_by) in world.log.0.lock().unwrap().iter() {
        let shared_by = Identities::new(shared_by).unwrap();
        assert_eq!(shared_by.iter().count(), 2);
        assert!(copy.replay(&Record { shared_by, ..*record }).unwrap());
    }
    let (one, other) = (world.shard.slice(SLICE).unwrap().image().unwrap(), copy.image().unwrap());
    assert_eq!(one.values.as_ref(), other.values.as_ref());
    assert_eq!(one.state.as_ref(), other.state.as_ref());
    assert_eq!(one.standing, other.standing);
}

#[test]
fn a_gradient_of_a_removed_slice_waits_for_nobody() {
    let mut world = World::new();
    for client in 1..=2 {
        world.join(client, Mode::Sync(quorum(2, 0)), None).unwrap();
    }
    let answer = world.plain(1, 0, &gradient(1));
    let slice = world.shard.slice(SLICE).unwrap();
    assert!(waits(&answer));
    world.shard.remove(&[SLICE]);
    assert_eq!(kind(&answer), Some(Kind::UnknownTensor));
    // A push that looked the slice up before it was removed.
    let body = bytemuck::cast_slice::<f32, u8>(&[1.0; LEN]).to_vec();
    let late = world.shard.push_to(&slice, &push(2, 9, 0, &body, CodecId::Float32), || panic!("it waits"));
    assert_eq!(late.unwrap().unwrap_err().kind, Kind::UnknownTensor);
}

#[test]
fn readers_that_leave_no_room_keep_back_the_last_gradient_alone() {
    let free = World::new();
    let slices = free.shard.meter().used();
    let mut world = World::with_memory(slices + (1 << 16));
    for client in 1..=2 {
        world.join(client, Mode::Sync(quorum(2, 0)), None).unwrap();
    }
    let (a, b, mut model) = (gradient(1), gradient(2), Model::new());
    let first = world.shard.pull(0, SLICE).unwrap();
    world.plain(1, 0, &a);
    world.plain(2, 0, &b);
    model.step(&[&a, &b], 0.5);
    // Readers hold the values before and after; then the memory is used up.
    let second = world.shard.pull(0, SLICE).unwrap();
    let one = world.plain(1, 1, &b);
    let meter = world.shard.meter().clone();
    // Except for what the slice remembers of one more.
    let rest = meter.take(Purpose::Held, meter.limit() - meter.used() - 64).unwrap();
    assert_eq!(kind(&world.plain(2, 1, &a)), Some(Kind::Capacity));
    assert!(waits(&one));
    drop((first, second));
    let other = world.plain(2, 1, &a);
    drop(rest);
    model.step(&[&b, &a], 0.5);
    assert_eq!((applied(&one).version, applied(&other).version), (2, 2));
    assert_eq!(world.values(), model.values);
}

#[test]
fn a_group_that_is_bound_again_waits_for_all_of_its_workers() {
    let mut world = World::new();
    world.join(1, Mode::Sync(quorum(1, 0)), None).unwrap();
    world.join(1, Mode::Sync(quorum(2, 0)), None).unwrap();
    let answer = world.plain(1, 0, &gradient(1));
    assert!(waits(&answer));
    world.join(2, Mode::Sync(quorum(2, 0)), None).unwrap();
    world.plain(2, 0, &gradient(1));
    assert_eq!(applied(&answer).version, 1);
}

/// A policy without groups.
#[derive(Debug)]
struct Always;

impl Policy for Always {
    fn admit(&self, _: &Slice, _: &Push<'_>) -> Admission {
        Admission::Apply
    }

    fn hold(&self, held: Held) {
        held.release();
    }
}

#[test]
fn places_are_given_back_whatever_the_policy() {
    let policy = Some::<Arc<dyn Policy>>(Arc::new(Always));
    let shard = Shard::new(ShardConfig { policy, ..ShardConfig::new(0, u64::MAX, Isa::best()) });
    let seat = MembershipRequest::new(Mode::Bounded { staleness: 1 }, None, String::new());
    shard.groups().join(GROUP, 1, seat, shard.meter()).unwrap();
    shard.forget_client(1);
    assert_eq!((shard.groups().len(), shard.meter().used()), (0, 0));
}

#[test]
fn a_group_is_bound_by_its_first_worker() {
    let world = World::new();
    let bounded = Mode::Bounded { staleness: 2 };
    assert_eq!(world.join(1, bounded, None).unwrap(), ["\"w1\""]);
    let refused = world.join(2, Mode::Free, None).unwrap_err();
    assert_eq!(refused.kind, Kind::Precondition);
    assert_eq!(refused.expected.as_deref(), Some("Bounded(staleness=2)"));
    assert!(refused.message.contains("w1"), "{refused}");
    assert!(world.join(2, Mode::Bounded { staleness: 3 }, None).is_err());
    assert_eq!(world.join(2, bounded, Some(4)).unwrap(), ["\"w1\"", "\"w2\" (rank 4)"]);
    world.shard.leave(GROUP, 1, false);
    world.shard.forget_client(2);
    world.join(2, Mode::Free, None).unwrap();
    // The only worker may change the mode.
    world.join(2, Mode::Sync(quorum(1, 0)), None).unwrap();
    for (mode, rank) in [
        (Mode::Sync(quorum(0, 1)), None),
        (Mode::Sync(quorum(1, 1 << 20)), None),
        (Mode::Sync(Quorum { enough: 3, ..quorum(2, 0) }), None),
        (Mode::Sync(Quorum { enough: 1, ..quorum(2, 1) }), None),
        (Mode::Sync(Quorum { grace_ms: 1, ..quorum(2, 0) }), None),
        (Mode::Sync(Quorum { sum: true, weighted: true, ..quorum(2, 0) }), None),
        (Mode::Sync(Quorum { robust: MEDIAN, ..quorum(32, 1) }), None),
        (Mode::Sync(Quorum { robust: MEDIAN, weighted: true, ..quorum(8, 0) }), None),
        (Mode::Sync(Quorum { robust: MEDIAN, sum: true, ..quorum(8, 0) }), None),
        (Mode::Sync(Quorum { robust: MEDIAN, every: 5, ..quorum(0, 0) }), None),
        (Mode::Sync(Quorum { robust: Some(Robust::TrimmedMean(0)), ..quorum(8, 0) }), None),
        (Mode::Sync(Quorum { robust: Some(Robust::TrimmedMean(4)), ..quorum(8, 0) }), None),
        (Mode::Sync(Quorum { robust: Some(Robust::TrimmedMean(2)), enough: 4, ..quorum(8, 0) }), None),
        (Mode::Sync(Quorum { every: 5, fragments: 1, ..quorum(2, 0) }), None),
        (Mode::Sync(Quorum { every: 5, fragments: 6, ..quorum(2, 0) }), None),
        (Mode::Sync(Quorum { every: 5, overlap: 5, ..quorum(2, 0) }), None),
        (Mode::Sync(Quorum { every: 5, fragments: 2, overlap: 2, ..quorum(2, 0) }), None),
        (Mode::Sync(Quorum { fragments: 2, ..quorum(2, 0) }), None),
        (Mode::Sync(Quorum { overlap: 1, ..quorum(2, 0) }), None),
        (Mode::WarmStart { steps: 0 }, None),
    ] {
        assert_eq!(world.join(3, mode, rank).unwrap_err().kind, Kind::Config, "{mode}");
    }
    let seat = MembershipRequest::new(bounded, None, "n".repeat(300));
    assert_eq!(Groups::default().join(0, 1, seat, &Meter::new(1 << 20)).unwrap_err().kind, Kind::Config);
}

type ClocksResult = Arc<Mutex<Option<Result<Clocks, Error>>>>;

fn advance(world: &World, client: u64, warm: bool, clock: u64) -> ClocksResult {
    let result = ClocksResult::default();
    let tell = result.clone();
    let done = Box::new(move |result| *tell.lock().unwrap() = Some(result));
    world.shard.groups().advance(GROUP, client, warm, clock, done);
    result
}

fn clocks(result: &ClocksResult) -> Option<(u64, bool)> {
    result.lock().unwrap().clone().map(|clocks| clocks.map(|clocks| (clocks.slowest, clocks.leads)).unwrap())
}

#[test]
fn nobody_is_further_ahead_than_the_bound() {
    // Against a serial model: a random worker takes a step if the model allows it.
    for staleness in 0..4_u64 {
        let world = World::new();
        let mode = Mode::Bounded { staleness };
        (1..=3).for_each(|client| drop(world.join(client, mode, None).unwrap()));
        let mut clock = [0_u64; 3];
        let mut waiting: [Option<ClocksResult>; 3] = [None, None, None];
        let mut random = 12_345_u64;
        for _ in 0..400 {
            random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            let one = (random >> 33) as usize % 3;
            if waiting[one].is_none() {
                clock[one] += 1;
                waiting[one] = Some(advance(&world, 1 + one as u64, false, clock[one]));
            }
            let slowest = *clock.iter().min().unwrap();
            for (k, result) in waiting.iter_mut().enumerate() {
                let free = clock[k] <= slowest + staleness;
                if let Some(asked) = result.clone() {
                    assert_eq!(clocks(&asked).is_some(), free, "{staleness} {clock:?} {k}");
                    if free {
                        *result = None;
                    }
                }
            }
            assert!(clock.iter().all(|c| *c <= slowest + staleness + 1), "{staleness} {clock:?}");
        }
        assert!(*clock.iter().min().unwrap() > 60);
    }
}

#[test]
fn clocks_go_on_without_those_who_are_gone() {
    let world = World::new();
    let mode = Mode::Bounded { staleness: 1 };
    (1..=3).for_each(|client| drop(world.join(client, mode, None).unwrap()));
    assert_eq!(clocks(&advance(&world, 1, false, 1)), Some((0, false)));
    let ahead = advance(&world, 1, false, 2);
    advance(&world, 2, false, 1);
    assert_eq!(clocks(&ahead), None);
    assert_eq!(world.shard.groups().behind(GROUP, 1, false), ["\"w3\""]);
    world.shard.forget_client(3);
    assert_eq!(clocks(&ahead), Some((1, false)));
    // It gets an error when it wakes up; a worker that joins late starts at the slowest clock.
    let late = advance(&world, 3, false, 1);
    assert_eq!(late.lock().unwrap().clone().unwrap().unwrap_err().kind, Kind::Lease);
    let seat = MembershipRequest::new(mode, None, "late");
    let joined = world.shard.groups().join(GROUP, 4, seat, world.shard.meter()).unwrap();
    assert_eq!(joined.clock, 1);
    let waits = advance(&world, 1, false, 3);
    world.shard.leave(GROUP, 1, false);
    assert_eq!(waits.lock().unwrap().clone().unwrap().unwrap_err().kind, Kind::Lease);
}

#[test]
fn one_trains_alone_first() {
    let world = World::new();
    let warm = Mode::WarmStart { steps: 3 };
    assert_eq!(world.join(1, warm, None).unwrap(), ["\"w1\""]);
    (2..=3).for_each(|client| drop(world.join(client, warm, None).unwrap()));
    assert_eq!(clocks(&advance(&world, 1, true, 0)), Some((0, true)));
    let (second, third) = (advance(&world, 2, true, 0), advance(&world, 3, true, 0));
    assert_eq!(clocks(&advance(&world, 1, true, 2)), Some((2, true)));
    assert!(clocks(&second).is_none() && clocks(&third).is_none());
    assert_eq!(world.shard.groups().behind(GROUP, 3, true), ["\"w1\""]);
    // The next leader continues where the first one was.
    world.shard.forget_client(1);
    assert_eq!((clocks(&second), clocks(&third)), (Some((2, true)), None));
    world.join(2, Mode::Free, None).unwrap();
    assert_eq!(clocks(&advance(&world, 2, true, 3)), Some((3, false)));
    assert_eq!(clocks(&third), Some((3, false)));
    // A worker that joins while others train does not wait, either.
    assert!((2..=3).all(|client| world.shard.leave(GROUP, client, true)));
    assert!(!world.shard.leave(GROUP, 2, true));
    world.join(4, warm, None).unwrap();
    assert_eq!(clocks(&advance(&world, 4, true, 0)), Some((3, false)));
}

#[test]
fn hogwild_tensors_make_no_versions() {
    let shard = Shard::new(ShardConfig::new(0, u64::MAX, Isa::best()));
    shard.create(&spec(Apply::Hogwild), GROUP, &[(SLICE, 0)]).unwrap();
    let seat = MembershipRequest::new(Mode::Sync(quorum(1, 0)), None, String::new());
    shard.groups().join(GROUP, 1, seat, shard.meter()).unwrap();
    let values = gradient(1);
    let answer = Answer::default();
    let reply = answer.clone();
    let push = push(1, 1, 0, bytemuck::cast_slice(&values), CodecId::Float32);
    shard.push(&push, move |result| *reply.lock().unwrap() = Some(result));
    assert_eq!(kind(&answer), Some(Kind::Precondition));
}
