//! A cut holds all slices of a group at one moment, while pushes continue.

use fastps_core::codec::CodecId;
use fastps_core::error::{Kind, Result};
use fastps_core::frame::{Applied, Base, Identity, Push};
use fastps_core::isa::Isa;
use fastps_core::mode::{MembershipRequest, Mode, Quorum};
use fastps_core::optim::{Adam, Optimizer, Sgd};
use fastps_core::shard::{Purpose, Shard, ShardConfig};
use fastps_core::slice::Image;
use fastps_core::tensor::{Apply, SliceId, TensorSpec};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

const N: usize = 100;

fn spec(name: &str, group: &str, apply: Apply, optimizer: Optimizer) -> Arc<TensorSpec> {
    Arc::new(TensorSpec { apply, group: group.into(), ..TensorSpec::new(name, [N as u64], optimizer) })
}

fn shard(tensors: &[(&str, Apply)], optimizer: &Optimizer) -> Arc<Shard> {
    let shard = Shard::new(ShardConfig::new(0, 1 << 24, Isa::get().unwrap()));
    for (k, (group, apply)) in (0..).zip(tensors) {
        let spec = spec(&format!("t{k}"), group, *apply, *optimizer);
        shard.create(&spec, 1, &[(SliceId(k), 0)]).unwrap();
    }
    Arc::new(shard)
}

/// Pushes -1. Returns the answer, or `None` if it comes later.
fn contribute(shard: &Shard, slice: u64, identity: Identity, base: Option<Base>) -> Option<Result<Applied>> {
    let body: Vec<u8> = [-1.0_f32; N].iter().flat_map(|x| x.to_le_bytes()).collect();
    let acknowledged = identity.sequence - 1;
    let whole = Push::gradient(SliceId(slice), identity, N as u64, CodecId::Float32, &body);
    let push = Push { base, acknowledged, ..whole };
    let slice = shard.slice(push.slice).unwrap();
    shard.push_to(&slice, &push, || Box::new(|result| assert!(result.is_ok())))
}

/// Pushes -1 and expects an immediate answer.
fn push(shard: &Shard, slice: u64, client: u64, sequence: u64) {
    contribute(shard, slice, Identity { client, sequence }, None).unwrap().unwrap();
}

fn same(a: &Image, b: &Image) -> bool {
    a.standing == b.standing && a.values.as_ref() == b.values.as_ref() && a.state.as_ref() == b.state.as_ref()
}

#[test]
fn pushes_behind_the_moment_are_in_no_slice_of_it() {
    let adam = Optimizer::Adam(Adam::default());
    let tensors = [("a", Apply::Exact), ("a", Apply::Exact), ("other", Apply::Exact), ("a", Apply::Hogwild)];
    let shard = shard(&tensors, &adam);
    let slices: Vec<_> = (0..4).map(|k| shard.slice(SliceId(k)).unwrap()).collect();
    (0..4).for_each(|slice| push(&shard, slice, 1, 1));
    for round in 0..3 {
        let before: Vec<_> = slices.iter().map(|slice| slice.image().unwrap()).collect();
        shard.begin_cut("a").unwrap();
        assert_eq!(shard.begin_cut("other").unwrap_err().kind, Kind::Unavailable);
        // One slice is changed before it is written, the other is not.
        (2..5).for_each(|sequence| push(&shard, 0, 1, 10 * round + sequence));
        (2..4).for_each(|slice| push(&shard, slice, 1, 10 * round + 2));
        let cut: Vec<_> = slices.iter().map(|slice| slice.image_in_cut().unwrap()).collect();
        assert!(same(&cut[0], &before[0]) && same(&cut[1], &before[1]));
        assert_eq!(slices[0].version(1).0, cut[0].standing.version + 3);
        // These are not in the cut: another group, and a racing tensor.
        assert_eq!(cut[2].standing.version, before[2].standing.version + 1);
        assert_eq!(cut[3].standing.version, before[3].standing.version + 1);
        // A second request returns the current state.
        assert_eq!(slices[0].image_in_cut().unwrap().standing.version, cut[0].standing.version + 3);
        shard.end_cut();
    }
}

#[test]
fn a_cut_that_is_given_up_leaves_nothing_behind() {
    let shard = shard(&[("a", Apply::Exact); 2], &Optimizer::Adam(Adam::default()));
    push(&shard, 0, 1, 1);
    let used = shard.meter().used_for(Purpose::Copies);
    shard.begin_cut("a").unwrap();
    push(&shard, 0, 1, 2);
    assert_eq!(shard.meter().used_for(Purpose::Copies), used + 2 * 4 * N as u64);
    shard.end_cut();
    assert_eq!(shard.meter().used_for(Purpose::Copies), used);
    push(&shard, 0, 1, 3);
    assert_eq!(shard.meter().used_for(Purpose::Copies), used);
}

#[test]
fn a_cut_that_there_is_no_memory_for_is_refused_or_fails_and_no_push_does() {
    let shard = shard(&[("a", Apply::Exact); 2], &Optimizer::Adam(Adam::default()));
    push(&shard, 0, 1, 1);
    let meter = shard.meter();
    let left = |bytes: u64| meter.take(Purpose::Copies, meter.limit() - meter.used() - bytes).unwrap();
    let all = 2 * 2 * 4 * N as u64;
    let taken = left(all - 1);
    let refused = shard.begin_cut("a").unwrap_err();
    assert_eq!(refused.kind, Kind::Capacity);
    assert!(refused.message.contains("group \"a\""), "{refused}");
    drop(taken);
    let taken = left(all);
    shard.begin_cut("a").unwrap();
    // Other uses take the memory meanwhile.
    let more = left(0);
    push(&shard, 0, 1, 2);
    let failed = shard.slice(SliceId(0)).unwrap().image_in_cut().unwrap_err();
    assert_eq!((failed.kind, failed.tensor.as_deref()), (Kind::Capacity, Some("t0")));
    shard.end_cut();
    drop((taken, more));
}

#[test]
fn what_is_sent_on_the_strength_of_an_answer_is_not_in_a_cut_without_it() {
    let shard = shard(&[("a", Apply::Exact); 2], &Optimizer::Sgd(Sgd::default()));
    let done = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            for sequence in 1.. {
                push(&shard, 0, 1, sequence);
                push(&shard, 1, 1, sequence);
                if done.load(Ordering::Relaxed) {
                    break;
                }
            }
        });
        for _ in 0..300 {
            shard.begin_cut("a").unwrap();
            // Without a cut, the slice that is read later would be further ahead.
            let [second, first] =
                [1, 0].map(|k| shard.slice(SliceId(k)).unwrap().image_in_cut().unwrap().standing.version);
            shard.end_cut();
            assert!(first == second || first == second + 1, "{first} {second}");
        }
        done.store(true, Ordering::Relaxed);
    });
}

#[test]
fn a_version_that_several_workers_make_is_in_a_cut_or_not() {
    let shard = shard(&[("a", Apply::Exact)], &Optimizer::Sgd(Sgd { lr: 1.0, ..Sgd::default() }));
    let quorum = Quorum { workers: 1, ..Quorum::default() };
    let seat = MembershipRequest::new(Mode::Sync(quorum), None, String::new());
    shard.groups().join(1, 7, seat, shard.meter()).unwrap();
    let slice = shard.slice(SliceId(0)).unwrap();
    let contribute = |sequence: u64, version: u64| {
        let base = Some(Base { version, own: None });
        assert!(contribute(&shard, 0, Identity { client: 7, sequence }, base).is_none());
    };
    contribute(1, 0);
    shard.begin_cut("a").unwrap();
    contribute(2, 1);
    assert_eq!(slice.version(7).0, 2);
    assert_eq!(slice.image_in_cut().unwrap().standing.version, 1);
    shard.end_cut();
}
