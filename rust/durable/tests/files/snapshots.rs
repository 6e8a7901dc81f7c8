//! Snapshots under pushes, at a cut, for other programs, and how long they are kept.

use crate::world::{Folder, SLICE, Whole, World, adam, settings, sgd};
use fastps_core::error::Kind;
use fastps_core::tensor::{Apply, SliceId, TensorSpec};
use fastps_core::verbs::PullView;
use fastps_durable::{
    Cut, Event, Generation, Reading, Reservation, Settings, Stage, checkpoint, export, restore, shard_folder,
};
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

#[test]
fn snapshots_under_pushes_lose_nothing() {
    let folder = Folder::new();
    let world = World::open(&folder.0).unwrap();
    world.session(1);
    world.session(2);
    world.register(10, "a", 3 * SLICE, Apply::Exact, adam());
    world.register(20, "b", 1000, Apply::Exact, sgd());
    std::thread::scope(|scope| {
        let pushers: Vec<_> = (1..=2)
            .map(|client| {
                let world = &world;
                scope.spawn(move || {
                    for round in 1..=60 {
                        world.push(10 + round % 3, client, round, 1.0, None);
                        world.push(20, client, round, 1.0, None);
                    }
                })
            })
            .collect();
        while !pushers.iter().all(std::thread::ScopedJoinHandle::is_finished) {
            let summary = world.journal.snapshot(&world.shard).unwrap();
            // Each slice is at one version, whatever came later.
            let generation = Generation::list(&folder.0).unwrap().remove(0).unwrap();
            generation.verify().unwrap();
            assert_eq!(generation.summary(), summary);
        }
    });
    let (end, kept) = (world.state(), Generation::list(&folder.0).unwrap().len());
    assert_eq!(kept, 2);
    drop(world);
    let world = World::open(&folder.0).unwrap();
    assert_eq!(world.state(), end);
    drop(world);
    // The older snapshot with its log gives the same.
    let newest = Generation::list(&folder.0).unwrap().remove(0).unwrap().summary();
    std::fs::remove_dir_all(newest.path).unwrap();
    let world = World::open(&folder.0).unwrap();
    assert_eq!((world.state(), world.report.generation), (end, Some(newest.generation - 1)));
}

#[test]
fn snapshots_open_as_safetensors() {
    let folder = Folder::new();
    let world = World::open(&folder.0).unwrap();
    world.session(1);
    world.register(10, "layer.weight", SLICE + 3, Apply::Exact, adam());
    world.register(20, "small", 4, Apply::Exact, adam());
    world.register(30, "__metadata__", 2, Apply::Exact, sgd());
    // A part of a tensor, as on one shard of several.
    let spec = |n: u64| TensorSpec::new("part", [n], sgd());
    world.shard.create(&Arc::new(spec(3 * SLICE)), 1, &[(SliceId(40), 1)]).unwrap();
    let part =
        Reservation { spec: spec(3 * SLICE), group: 1, slices: vec![(40, 1)], stage: Stage::Committed };
    world.journal.note(&Event::Reserved(40, part));
    for (k, slice) in [10, 11, 20, 30, 40].into_iter().enumerate() {
        world.push(slice, 1, 1 + k as u64, 2.0, None);
    }
    let summary = world.journal.snapshot(&world.shard).unwrap();
    assert_eq!(summary.slices, 5);
    let read = |name: &str| std::fs::read(summary.path.join(name)).unwrap();
    let (values, state) = (read("parameters.safetensors"), read("state.safetensors"));
    let values = safetensors::SafeTensors::deserialize(&values).unwrap();
    let mut names = values.names();
    names.sort_unstable();
    assert_eq!(names, ["__metadata__~", "layer.weight", "part[258048:516096]", "small"]);
    let weight = values.tensor("layer.weight").unwrap();
    assert_eq!(weight.shape(), [SLICE as usize + 3]);
    assert_eq!(weight.data(), [world.whole(10).1, world.whole(11).1].concat());
    assert_eq!(values.tensor("part[258048:516096]").unwrap().data(), world.whole(40).1);
    let state = safetensors::SafeTensors::deserialize(&state).unwrap();
    let both = world.whole(20).2;
    assert_eq!(state.tensor("small.exp_avg").unwrap().data(), &both[..16]);
    assert_eq!(state.tensor("small.exp_avg_sq").unwrap().data(), &both[16..]);
    assert_eq!(state.tensor("layer.weight.exp_avg[258048:258051]").unwrap().data(), &world.whole(11).2[..12]);
}

#[test]
fn snapshots_are_kept_by_number_and_by_age() {
    let folder = Folder::new();
    let keep = |keep, keep_for| Settings { keep, keep_for, ..settings(&folder.0) };
    let numbers = |world: &World| {
        world.journal.snapshot(&world.shard).unwrap();
        let found = Generation::list(&folder.0).unwrap();
        found.into_iter().map(|generation| generation.unwrap().summary().generation).collect::<Vec<_>>()
    };
    let world = World::with(keep(1, Duration::from_hours(1))).unwrap();
    world.register(1, "w", 10, Apply::Exact, sgd());
    for expected in [vec![1], vec![2, 1], vec![3, 2, 1]] {
        assert_eq!(numbers(&world), expected);
    }
    drop(world);
    // Earlier snapshots count, too.
    let world = World::with(keep(3, Duration::ZERO)).unwrap();
    assert_eq!(numbers(&world), [4, 3, 2]);
    drop(world);
    let world = World::with(keep(1, Duration::ZERO)).unwrap();
    assert_eq!(numbers(&world), [5]);
}

#[test]
fn a_cut_is_from_one_moment_and_the_log_continues_after_it() {
    let (dir, parent) = (Folder::new(), Folder::new());
    let path = shard_folder(&dir.0, 0);
    let world = World::open(&path).unwrap();
    world.session(1);
    let n = SLICE + 3;
    world.register(10, "a", n, Apply::Exact, adam());
    world.register(20, "b", 9, Apply::Hogwild, sgd());
    let push_all = |value: f32| [10, 11, 20].map(|slice| world.push(slice, 1, value as u64, value, None));
    push_all(1.0);
    let before = world.state();
    let cut = |id| Cut { id, group: "default".to_owned() };
    // These pushes come after the cut and before anything is written.
    let begun = || {
        push_all(2.0);
        Ok(())
    };
    world.journal.snapshot_of_cut(&world.shard, cut(7), &begun).unwrap();
    push_all(3.0);
    let values = |state: &BTreeMap<u64, Whole>| [&state[&10].1[..], &state[&11].1[..]].concat();
    // A server may be running there.
    let file = |name: &str| parent.0.join(name);
    let exported = export(&dir.0, &file("cut"), false, PullView::Values, Reading::Cut).unwrap();
    assert_eq!(exported.notes, ["tensor \"b\" is hogwild: its values are not from the cut"]);
    let bytes = std::fs::read(file("cut")).unwrap();
    let tensors = safetensors::SafeTensors::deserialize(&bytes).unwrap();
    assert!(tensors.tensor("a").unwrap().data() == values(&before));
    let listed = checkpoint::list(&dir.0).unwrap();
    assert_eq!(listed[0].snapshots[0].cut, Some(cut(7)));
    // A failed snapshot keeps the one before it, and the next can begin.
    let failed = world.journal.snapshot_of_cut(&world.shard, cut(8), &|| {
        push_all(4.0);
        Err(fastps_core::error::Error::new(Kind::Unavailable, "too late"))
    });
    assert_eq!(failed.unwrap_err().kind, Kind::Unavailable);
    let end = world.state();
    drop(world);
    restore(&dir.0, &parent.0.join("two"), 2, Reading::Cut).unwrap();
    export(&parent.0.join("two"), &file("restored"), false, PullView::Values, Reading::All).unwrap();
    let bytes = std::fs::read(file("restored")).unwrap();
    let tensors = safetensors::SafeTensors::deserialize(&bytes).unwrap();
    assert!(tensors.tensor("a").unwrap().data() == values(&before));
    let error =
        export(&parent.0.join("two"), &file("none"), false, PullView::Values, Reading::Cut).unwrap_err();
    assert!(error.message.contains("no cut over all shards"), "{error}");
    // A start includes all later changes.
    let world = World::open(&path).unwrap();
    let exact = |state: BTreeMap<u64, Whole>| [state[&10].clone(), state[&11].clone()];
    assert!(exact(world.state()) == exact(end));
    world.journal.snapshot_of_cut(&world.shard, cut(9), &|| Ok(())).unwrap();
}
