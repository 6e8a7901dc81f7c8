//! The end of a client costs time in proportion to the slices it touched, not to those of the shard.

use fastps_core::codec::CodecId;
use fastps_core::dtype::DType;
use fastps_core::frame::{Action, Identity, Push};
use fastps_core::isa::Isa;
use fastps_core::mode::{Mode, PlaceRequest, Quorum};
use fastps_core::optim::{Optimizer, Sgd};
use fastps_core::shard::{Shard, ShardConfig};
use fastps_core::tensor::{Apply, SliceId, TensorSpec};
use std::sync::Arc;

/// A shard with `slices` slices in group 1 and two in group 2.
fn shard(slices: u64) -> Shard {
    let shard = Shard::new(ShardConfig::new(0, u64::MAX, Isa::best()));
    for id in 1..=slices + 2 {
        let spec = TensorSpec {
            name: format!("w{id}").into(),
            shape: vec![1],
            dtype: DType::Float32,
            apply: if id % 2 == 0 { Apply::Exact } else { Apply::Hogwild },
            group: "default".into(),
            optimizer: Optimizer::Sgd(Sgd::default()),
        };
        let group = if id > slices { 2 } else { 1 };
        shard.create(&Arc::new(spec), group, &[(SliceId(id), 0)]).unwrap();
    }
    shard
}

fn counter(shard: &Shard, name: &str) -> u64 {
    shard.counters().into_iter().find(|(n, _)| *n == name).unwrap().1
}

fn push(shard: &Shard, client: u64, slice: u64) {
    let push = Push {
        slice: SliceId(slice),
        action: Action::Gradient,
        identity: Identity { client, sequence: 1 },
        base: None,
        lr: None,
        scale: None,
        momentum: None,
        correction: None,
        count: 1,
        codec: CodecId::Float32,
        body: &[0; 4],
        largest: None,
        indices: None,
        once: false,
    };
    shard.push(&push, |applied| assert!(applied.is_ok(), "{applied:?}"));
}

/// The number of slices that each call touches.
fn touched(slices: u64) -> Vec<u64> {
    let shard = shard(slices);
    let workers = Quorum { workers: 2, backup: 0, deterministic: false, sum: false };
    let seat = PlaceRequest { mode: Mode::Sync(workers), rank: None, name: "worker".to_owned() };
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
