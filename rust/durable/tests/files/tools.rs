//! Restoring a data directory for another number of shards, and exporting it.

use crate::world::{Folder, SLICE, STORY, Whole, World, adam, all_files, settings, sgd};
use fastps_core::error::Kind;
use fastps_core::tensor::{Apply, SliceId, TensorSpec};
use fastps_core::verbs::PullView;
use fastps_durable::{
    Event, Generation, Reading, Reservation, Settings, Stage, export, restore, shard_folder,
};
use std::collections::BTreeMap;
use std::sync::Arc;

#[test]
fn a_directory_is_restored_for_any_number_of_shards() {
    let (dir, parent) = (Folder::new(), Folder::new());
    let world = World::open(&shard_folder(&dir.0, 0)).unwrap();
    (1..=2).for_each(|client| world.session(client));
    world.register(10, "a", 4 * SLICE + 3, Apply::Exact, adam());
    world.register(20, "racing", 9, Apply::Hogwild, sgd());
    world.register(30, "b", 9, Apply::Exact, sgd());
    for round in 1..=3 {
        (10..15).for_each(|slice| world.push(slice, 1, round, 0.5, None));
        world.push(20, 2, round, 1.0, None);
        world.push(30, 2, round, 1.0, Some(4));
        if round == 2 {
            world.journal.snapshot(&world.shard).unwrap();
        }
    }
    let racing = world.whole(20);
    // A tensor being registered, and a removed tensor of which slices remain.
    let underway = TensorSpec {
        name: "underway".into(),
        ..(*world.shard.slice(SliceId(30)).unwrap().spec()).as_ref().clone()
    };
    world.shard.create(&Arc::new(underway.clone()), 1, &[(SliceId(40), 0)]).unwrap();
    let reservation = Reservation { spec: underway, group: 1, slices: vec![(40, 0)], stage: Stage::Open };
    world.journal.note(&Event::Reserved(40, reservation));
    let mut end = world.state();
    end.remove(&40);
    let target = parent.0.join("target");
    let error = restore(&dir.0, &target, 3, Reading::All).unwrap_err();
    assert!(error.message.contains("another server (process"), "{error}");
    drop(world);
    let before = all_files(&dir.0);
    for shards in [1, 2, 3, 9] {
        let target = parent.0.join(shards.to_string());
        let restored = restore(&dir.0, &target, shards, Reading::All).unwrap();
        assert_eq!((restored.tensors, restored.slices), (3, 7));
        assert!(matches!(&restored.notes[..], [note] if note.contains("\"underway\" was being registered")));
        assert_eq!(all_files(&dir.0), before);
        let (mut state, mut map) = (BTreeMap::new(), None);
        for shard in 0..shards {
            let path = shard_folder(&target, shard);
            Generation::list(&path).unwrap()[0].as_ref().unwrap().verify().unwrap();
            let world = World::with(Settings { shard, shards, ..settings(&path) }).unwrap();
            assert_eq!(
                (world.report.generation, world.report.repeated, &world.report.notes),
                (Some(1), 0, &Vec::new())
            );
            let catalog = world.journal.catalog();
            assert_eq!(catalog.sessions.len(), 2);
            let here: Vec<_> = catalog.slices().map(|(id, ..)| id).collect();
            map = map.or(Some(catalog.map));
            for holding in map.iter().flat_map(BTreeMap::values) {
                let on = holding.slices.iter().zip(&holding.shards);
                assert!(on.clone().all(|(id, at)| (*at == shard) == here.contains(id)));
            }
            // Seven slices: one more or less, by weight.
            assert!(shards < 4 || here.len() <= 2, "{here:?}");
            state.extend(world.state());
        }
        // The snapshot has the state that the log lacks.
        let mut expected = end.clone();
        let kept = state[&20].0.version;
        assert!(kept < racing.0.version);
        expected.insert(20, state[&20].clone());
        assert_eq!(state, expected);
        // There and back.
        let back = parent.0.join(format!("{shards}-back"));
        restore(&target, &back, 1, Reading::All).unwrap();
        assert_eq!(World::open(&shard_folder(&back, 0)).unwrap().state(), expected);
    }
    for (target, shards) in [(parent.0.join("1"), 2), (parent.0.join("zero"), 0)] {
        assert_eq!(restore(&dir.0, &target, shards, Reading::All).unwrap_err().kind, Kind::Config);
    }
    let two = parent.0.join("2");
    std::fs::remove_dir_all(shard_folder(&two, 1)).unwrap();
    let error = restore(&two, &parent.0.join("none"), 1, Reading::All).unwrap_err();
    assert!(error.message.contains("shard-1 is missing"), "{error}");
    assert!(!parent.0.join("none").exists() && !parent.0.join("none.tmp").exists());
    // Directories that do not belong together.
    let (nine, three) = (parent.0.join("9"), parent.0.join("3"));
    std::fs::remove_dir_all(shard_folder(&nine, 2)).unwrap();
    std::fs::rename(shard_folder(&three, 2), shard_folder(&nine, 2)).unwrap();
    let error = restore(&nine, &parent.0.join("none"), 1, Reading::All).unwrap_err();
    assert!(
        error.message.contains("another size") && error.message.contains("fastps checkpoint restore"),
        "{error}"
    );
}

#[test]
fn damaged_files_are_not_restored_unless_they_are_not_needed() {
    let parent = Folder::new();
    for (name, refused) in
        [("generation-00000002/slices", false), ("generation-00000001/slices", false), ("log-00000003", true)]
    {
        let dir = STORY.data_dir();
        let path = shard_folder(&dir.0, 0).join(name);
        let mut bytes = std::fs::read(&path).unwrap();
        let at = bytes.len() / 2;
        bytes[at] ^= 1;
        std::fs::write(&path, bytes).unwrap();
        let (before, target) = (all_files(&dir.0), parent.0.join(name.replace('/', "-")));
        let restored = restore(&dir.0, &target, 1, Reading::All);
        assert_eq!(restored.is_err(), refused, "{name}: {restored:?}");
        match restored {
            Ok(restored) => {
                assert!(restored.notes.len() <= 1, "{:?}", restored.notes);
                assert_eq!(World::open(&shard_folder(&target, 0)).unwrap().state(), STORY.end);
            }
            Err(error) => {
                assert!(error.message.contains(name) && error.message.contains("--accept-loss"), "{error}");
                let file = parent.0.join("file.safetensors");
                assert_eq!(
                    export(&dir.0, &file, true, PullView::Values, Reading::All).unwrap_err().message,
                    error.message
                );
                assert!(!file.exists());
                restore(&dir.0, &target, 1, Reading::WhatIsLeft).unwrap();
                assert!(!STORY.check(&World::open(&shard_folder(&target, 0)).unwrap()));
            }
        }
        assert_eq!(all_files(&dir.0), before);
    }
}

#[test]
fn an_export_contains_each_tensor_whole() {
    let (dir, parent) = (Folder::new(), Folder::new());
    let world = World::open(&shard_folder(&dir.0, 0)).unwrap();
    world.session(1);
    let n = 2 * SLICE + 3;
    world.register(10, "a", n, Apply::Exact, adam());
    world.register(20, "b", 9, Apply::Exact, sgd());
    (10..13).for_each(|slice| world.push(slice, 1, slice, slice as f32, None));
    let state = world.state();
    drop(world);
    let four = parent.0.join("four");
    restore(&dir.0, &four, 4, Reading::All).unwrap();
    for (source, name) in [(&dir.0, "one.safetensors"), (&four, "four.safetensors")] {
        let file = parent.0.join(name);
        let exported = export(source, &file, true, PullView::Values, Reading::All).unwrap();
        let bytes = std::fs::read(&file).unwrap();
        assert_eq!((exported.tensors, exported.bytes), (2, bytes.len() as u64));
        let tensors = safetensors::SafeTensors::deserialize(&bytes).unwrap();
        let mut names = tensors.names();
        names.sort_unstable();
        assert_eq!(names, ["a", "a.exp_avg", "a.exp_avg_sq", "b"]);
        let values = |slices: &[u64], part: &dyn Fn(&Whole) -> Vec<u8>| {
            slices.iter().flat_map(|id| part(&state[id])).collect::<Vec<_>>()
        };
        let (a, b) = (tensors.tensor("a").unwrap(), tensors.tensor("b").unwrap());
        assert_eq!((a.shape(), b.shape()), (&[n as usize][..], &[9][..]));
        assert!(a.data() == values(&[10, 11, 12], &|whole| whole.1.clone()));
        assert!(b.data() == values(&[20], &|whole| whole.1.clone()));
        let second = values(&[10, 11, 12], &|whole| whole.2[whole.2.len() / 2..].to_vec());
        assert!(tensors.tensor("a.exp_avg_sq").unwrap().data() == second);
        assert_eq!(
            export(source, &file, false, PullView::Values, Reading::All).unwrap_err().kind,
            Kind::Config
        );
    }
    let file = parent.0.join("parameters.safetensors");
    export(&four, &file, false, PullView::Values, Reading::All).unwrap();
    let bytes = std::fs::read(&file).unwrap();
    assert_eq!(safetensors::SafeTensors::deserialize(&bytes).unwrap().names().len(), 2);
}
