//! A shard's memory accounting, and what it refuses when the memory is used up.

use fastps_core::codec::CodecId;
use fastps_core::dtype::DType;
use fastps_core::error::{Error, Kind, Result};
use fastps_core::frame::{Applied, Identity, Push};
use fastps_core::identity::{Settled, WINDOW};
use fastps_core::isa::Isa;
use fastps_core::optim::{Adam, Optimizer, Sgd};
use fastps_core::policy::{Admission, Held, Policy};
use fastps_core::shard::{Shard, ShardConfig};
use fastps_core::slice::{Resolved, Slice};
use fastps_core::tensor::{Apply, SliceId, TensorSpec};
use std::sync::{Arc, Mutex, mpsc};

const SLICE: SliceId = SliceId(5);
const N: usize = 5000;

/// A shard with one slice and exactly `room` bytes of free memory.
fn shard_with(room: u64, apply: Apply, optimizer: Optimizer, policy: Option<Arc<dyn Policy>>) -> Shard {
    let shard = |limit: u64| {
        let mut config = ShardConfig::new(0, limit, Isa::best());
        if let Some(policy) = policy.clone() {
            config.policy = Some(policy);
        }
        let shard = Shard::new(config);
        let spec = TensorSpec { apply, ..TensorSpec::new("w", [N as u64], optimizer) };
        shard.create(&Arc::new(spec), 0, &[(SLICE, 0)]).unwrap();
        shard
    };
    let slices = counter(&shard(u64::MAX), "memory_slices");
    shard(slices + room)
}

fn ledger() -> Optimizer {
    Optimizer::Sgd(Sgd { lr: 1.0, ..Sgd::default() })
}

fn counter(shard: &Shard, name: &str) -> u64 {
    shard.counters().into_iter().find(|(n, _)| *n == name).unwrap().1
}

/// The counters of all purposes add up to the memory in use, which is within the limit.
fn check_sum(shard: &Shard) {
    let purposes = ["slices", "copies", "answers", "held", "identities", "connections", "map"];
    let sum: u64 = purposes.iter().map(|purpose| counter(shard, &format!("memory_{purpose}"))).sum();
    assert_eq!(sum, counter(shard, "memory_used"));
    assert!(sum <= counter(shard, "memory_limit"));
}

fn push(shard: &Shard, client: u64, sequence: u64) -> mpsc::Receiver<Result<Applied>> {
    let (done, answer) = mpsc::channel();
    let body = vec![-1.0_f32; N].iter().flat_map(|x| x.to_le_bytes()).collect::<Vec<u8>>();
    let push = Push::gradient(SLICE, Identity { client, sequence }, N as u64, CodecId::Float32, &body);
    shard.push(&push, move |result| done.send(result).unwrap());
    answer
}

fn assert_full(error: &Error) {
    assert_eq!((error.kind, error.tensor.as_deref(), error.shard), (Kind::Capacity, Some("w"), Some(0)));
    assert!(error.retry_after_ms.is_some() && error.expected.is_some() && error.got.is_some(), "{error}");
}

#[test]
fn a_copy_for_a_reader_that_does_not_fit_is_refused_and_fits_later() {
    let copy = 4 * N as u64;
    for apply in [Apply::Exact, Apply::Hogwild] {
        // Room for one copy of the two state slots, and of the values.
        let shard = shard_with(3 * copy + 100, apply, Optimizer::Adam(Adam::default()), None);
        let before = counter(&shard, "memory_used");
        let state = shard.pull_state(0, SLICE).unwrap();
        assert_eq!(counter(&shard, "memory_copies"), 2 * copy);
        assert_full(&shard.pull_state(0, SLICE).unwrap_err());
        let values = shard.pull(0, SLICE).unwrap();
        check_sum(&shard);
        if apply == Apply::Hogwild {
            assert_full(&shard.pull(0, SLICE).unwrap_err());
        } else {
            // Pinned, not copied.
            assert_eq!(counter(&shard, "memory_copies"), 2 * copy);
            shard.pull(0, SLICE).unwrap();
        }
        // A second owner of the same bytes neither takes nor frees memory.
        let second = state.clone();
        drop(state);
        assert_full(&shard.pull_state(0, SLICE).unwrap_err());
        drop(second);
        shard.pull_state(0, SLICE).unwrap();
        drop(values);
        assert_eq!(counter(&shard, "memory_used"), before);
    }
}

#[test]
fn a_full_shard_has_an_image() {
    let adam = Optimizer::Adam(Adam::default());
    for apply in [Apply::Exact, Apply::Hogwild] {
        let shard = shard_with(10, apply, adam, None);
        let image = shard.slice(SLICE).unwrap().image().unwrap();
        assert_eq!((image.values.as_ref().len(), image.state.as_ref().len()), (4 * N, 8 * N));
        assert_eq!(counter(&shard, "memory_copies"), 0);
    }
}

#[test]
fn values_of_a_removed_slice_are_counted_as_long_as_they_are_read() {
    let shard = shard_with(1 << 20, Apply::Exact, ledger(), None);
    let first = shard.pull(1, SLICE).unwrap();
    push(&shard, 1, 1).recv().unwrap().unwrap();
    let second = shard.pull(1, SLICE).unwrap();
    shard.remove(&[SLICE]);
    let one = counter(&shard, "memory_used") / 2;
    assert!(one >= 4 * N as u64, "{one}");
    check_sum(&shard);
    drop(first);
    assert_eq!(counter(&shard, "memory_used"), one);
    drop(second);
    assert_eq!(counter(&shard, "memory_used"), 0);
}

#[test]
fn what_a_slice_remembers_of_its_clients_is_counted_until_they_leave() {
    for apply in [Apply::Exact, Apply::Hogwild] {
        let one = shard_with(1 << 20, apply, ledger(), None);
        push(&one, 1, 1).recv().unwrap().unwrap();
        let entry = counter(&one, "memory_identities");
        for sequence in 2..=WINDOW as u64 {
            push(&one, 1, sequence).recv().unwrap().unwrap();
        }
        let full = counter(&one, "memory_identities");
        assert!(full >= entry + (WINDOW as u64 - 1) * size_of::<Settled>() as u64, "{full}");
        for sequence in WINDOW as u64..3 * WINDOW as u64 {
            push(&one, 1, sequence).recv().unwrap().unwrap();
        }
        assert_eq!(counter(&one, "memory_identities"), full, "a window is full with {WINDOW} outcomes");

        let shard = shard_with(100 * entry, apply, ledger(), None);
        let before = counter(&shard, "memory_used");
        for client in 1..=100 {
            push(&shard, client, 1).recv().unwrap().unwrap();
        }
        assert_eq!(counter(&shard, "identity_entries"), 100);
        check_sum(&shard);
        let version = shard.pull(0, SLICE).map(|snapshot| snapshot.version);
        assert_full(&push(&shard, 101, 1).recv().unwrap().unwrap_err());
        assert_full(&shard.resolve(SLICE, Identity { client: 101, sequence: 1 }).unwrap_err().shard(0));
        if let Ok(version) = version {
            assert_eq!(shard.pull(0, SLICE).unwrap().version, version, "nothing was changed");
        }
        assert_full(&push(&shard, 100, 2).recv().unwrap().unwrap_err());
        assert!(push(&shard, 100, 1).recv().unwrap().unwrap().duplicate);
        shard.forget_client(100);
        let fenced = shard.resolve(SLICE, Identity { client: 101, sequence: 1 });
        assert_eq!(fenced, Ok(Resolved::Fenced));
        (1..=101).for_each(|client| shard.forget_client(client));
        assert_eq!((counter(&shard, "memory_used"), counter(&shard, "identity_entries")), (before, 0));
        check_sum(&shard);
    }
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
fn held_pushes_are_counted_and_one_too_many_is_refused() {
    for apply in [Apply::Exact, Apply::Hogwild] {
        let policy = Arc::new(HoldAll::default());
        let body = 4 * N as u64;
        let shard = shard_with(4 * body, apply, ledger(), Some(policy.clone()));
        let before = counter(&shard, "memory_used");
        let held: Vec<_> = (1..=3).map(|sequence| push(&shard, 1, sequence)).collect();
        assert!(counter(&shard, "memory_held") >= 3 * body);
        check_sum(&shard);
        assert_full(&push(&shard, 1, 4).recv().unwrap().unwrap_err());
        assert_eq!(policy.0.lock().unwrap().len(), 3);
        policy.0.lock().unwrap().pop().unwrap().release();
        assert_eq!(held[2].recv().unwrap().unwrap().version, 1);
        // The push counts as never received, so it fits now.
        let again = push(&shard, 1, 4);
        policy.0.lock().unwrap().drain(..).for_each(Held::release);
        assert_eq!(again.recv().unwrap().unwrap().version, 4);
        assert_eq!(counter(&shard, "memory_held"), 0);
        shard.forget_client(1);
        assert_eq!(counter(&shard, "memory_used"), before);
    }
}

#[test]
fn a_large_tensor_is_the_same_wherever_its_slices_lie() {
    let optimizer = Optimizer::Adam(Adam::default());
    let n = 3 * DType::Float32.slice_len() + 1234;
    let spec = Arc::new(TensorSpec::new("w", [n as u64], optimizer));
    let ids: Vec<_> = (0..spec.slice_count()).map(|k| (SliceId(k as u64), k)).collect();
    let shard = || Shard::new(ShardConfig::new(0, u64::MAX, Isa::best()));
    let (together, apart) = (shard(), shard());
    together.create(&spec, 0, &ids).unwrap();
    for id in &ids {
        apart.create(&spec, 0, &[*id]).unwrap();
    }
    assert_eq!(counter(&together, "memory_slices"), counter(&apart, "memory_slices"));

    let gradient: Vec<_> = (0..n).map(|i| (i as f32).sin()).collect();
    let step = |shard: &Shard, sequence| {
        for (id, k) in &ids {
            let values = &gradient[spec.slice_range(*k)];
            let identity = Identity { client: 1, sequence };
            let push = Push::gradient(
                *id,
                identity,
                values.len() as u64,
                CodecId::Float32,
                bytemuck::cast_slice(values),
            );
            shard.push(&push, |applied| assert!(applied.is_ok()));
        }
    };
    let same = |id| {
        let values = |shard: &Shard| shard.pull(1, id).unwrap();
        let state = |shard: &Shard| shard.pull_state(1, id).unwrap();
        assert!(values(&together).as_ref() == values(&apart).as_ref());
        assert!(state(&together).as_ref() == state(&apart).as_ref());
    };
    // Each step finds pins, so it writes to the spare buffers that the previous one left.
    for sequence in 1..=3 {
        let pins: Vec<_> = ids.iter().map(|(id, _)| (together.pull(1, *id), apart.pull(1, *id))).collect();
        step(&together, sequence);
        step(&apart, sequence);
        drop(pins);
        for (id, _) in &ids {
            same(*id);
        }
    }
    together.remove(&ids.iter().map(|(id, _)| *id).collect::<Vec<_>>());
    assert_eq!(counter(&together, "memory_slices"), 0);
}
