//! A slice's knowledge of its clients: their own changes decide what is stale, and the end of a client costs
//! time in proportion to the slices it touched, not to those of the shard.

use fastps_core::codec::CodecId;
use fastps_core::correction::Correction;
use fastps_core::error::Kind;
use fastps_core::frame::{Base, Identity, Push};
use fastps_core::isa::Isa;
use fastps_core::mode::{MembershipRequest, Mode, Quorum};
use fastps_core::optim::{Optimizer, Sgd};
use fastps_core::shard::{Shard, ShardConfig};
use fastps_core::tensor::{Apply, SliceId, TensorSpec};
use std::sync::Arc;

/// A shard with `slices` slices in group 1 and two in group 2.
fn shard(slices: u64) -> Shard {
    let shard = Shard::new(ShardConfig::new(0, u64::MAX, Isa::best()));
    for id in 1..=slices + 2 {
        let spec = TensorSpec {
            apply: if id % 2 == 0 { Apply::Exact } else { Apply::Hogwild },
            ..TensorSpec::new(format!("w{id}"), [1], Optimizer::Sgd(Sgd::default()))
        };
        let group = if id > slices { 2 } else { 1 };
        shard.create(&Arc::new(spec), group, &[(SliceId(id), 0)]).unwrap();
    }
    shard
}

fn counter(shard: &Shard, name: &str) -> u64 {
    shard.counters().into_iter().find(|(n, _)| *n == name).unwrap().1
}

fn gradient(client: u64, slice: u64, sequence: u64) -> Push<'static> {
    Push::gradient(SliceId(slice), Identity { client, sequence }, 1, CodecId::Float32, &[0; 4])
}

fn push(shard: &Shard, client: u64, slice: u64) {
    shard.push(&gradient(client, slice, 1), |applied| assert!(applied.is_ok(), "{applied:?}"));
}

#[test]
fn all_changes_count_where_the_pushers_own_are_unknown() {
    let shard = shard(2);
    let strict = Correction { max_staleness: Some(1), reject: true, ..Correction::default() };
    for slice in [1, 2] {
        for client in 2..4 {
            push(&shard, client, slice);
        }
        // Its own count is missing, or larger than what the slice has seen since a restart.
        for (sequence, own) in [(1, None), (2, Some(9))] {
            let stale = Push {
                base: Some(Base { version: 0, own }),
                correction: Some(strict),
                ..gradient(1, slice, sequence)
            };
            shard.push(&stale, |applied| {
                let error = applied.unwrap_err();
                assert_eq!((error.kind, error.got.as_deref()), (Kind::StalePush, Some("2 changes")));
            });
            let fresh = Push { base: Some(Base { version: 1, own }), ..stale };
            assert_eq!(shard.slice(SliceId(slice)).unwrap().version(1).0, 2, "nothing has changed");
            if own.is_some() {
                shard.push(&fresh, |applied| assert_eq!(applied.unwrap().version, 3));
            }
        }
    }
}

/// The number of slices that each call touches.
fn touched(slices: u64) -> Vec<u64> {
    let shard = shard(slices);
    let workers = Quorum { workers: 2, ..Quorum::default() };
    let seat = MembershipRequest::new(Mode::Sync(workers), None, "worker");
    for client in [1, 2] {
        (1..=3).for_each(|slice| push(&shard, client, slice));
        assert!(shard.remembers(client));
    }
    assert_eq!(counter(&shard, "identity_entries"), 6);
    let mut counts = Vec::new();
    let mut count = |work: &mut dyn FnMut()| {
        let before = counter(&shard, "slices_touched");
        work();
        counts.push(counter(&shard, "slices_touched") - before);
    };
    count(&mut || shard.forget_client(3));
    count(&mut || shard.forget_client(1));
    assert!(!shard.remembers(1) && shard.remembers(2));
    assert_eq!(counter(&shard, "identity_entries"), 3);
    // Only slices of its group wait for a worker.
    for client in [4, 5] {
        shard.groups().join(2, client, seat.clone(), shard.meter()).unwrap();
        assert!(shard.remembers(client));
    }
    count(&mut || assert!(shard.leave(2, 4, false)));
    count(&mut || shard.forget_client(5));
    assert!(!shard.remembers(4) && !shard.remembers(5));
    count(&mut || shard.remove(&[SliceId(2), SliceId(4711)]));
    count(&mut || shard.forget_client(2));
    assert!(!shard.remembers(2) && shard.has_group(1) && !shard.has_group(3));
    counts
}

#[test]
fn what_ends_costs_what_it_touched() {
    let few = touched(10);
    assert_eq!(few, [0, 3, 2, 2, 2, 2]);
    assert_eq!(touched(10_000), few);
}

#[test]
fn a_group_is_gone_with_its_last_slice() {
    let shard = shard(1);
    shard.remove(&[SliceId(2)]);
    assert!(shard.has_group(2));
    shard.remove(&[SliceId(3)]);
    assert!(!shard.has_group(2) && shard.has_group(1));
}
