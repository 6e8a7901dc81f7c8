//! Damaged, missing and swapped files yield no wrong value, and every loss is reported.

use crate::world::{Opened, STORY, World, all_files, settings};
use fastps_core::error::Kind;
use fastps_durable::{Generation, Settings, checkpoint, shard_folder};
use std::path::Path;

/// Flips bits in one kind of file: no wrong value comes back, and every loss is reported.
fn flip(name: &Path, flips: usize, mut outcome: impl FnMut(Opened, &Path)) {
    let whole = &STORY.files[name];
    let mut random = 0x9E37_79B9_7F4A_7C15_u64;
    for _ in 0..flips {
        random ^= random << 13;
        random ^= random >> 7;
        random ^= random << 17;
        let bit = (random % (8 * whole.len() as u64)) as usize;
        let mut bytes = whole.clone();
        bytes[bit / 8] ^= 1 << (bit % 8);
        let copy = STORY.copy();
        std::fs::write(copy.0.join(name), &bytes).unwrap();
        outcome(World::open(&copy.0), &copy.0);
    }
}

#[test]
fn a_flipped_bit_in_a_snapshot_loses_nothing() {
    for kind in ["MANIFEST", "slices", "parameters.safetensors", "state.safetensors"] {
        let name = STORY.newest(kind);
        let mut fallen = 0;
        flip(&name, 1000, |opened, path| {
            let world = opened.unwrap();
            // The older snapshot with its log gives the same.
            assert!(STORY.check(&world), "{:?}", world.report);
            if world.report.generation == Some(1) {
                fallen += 1;
                assert!(world.report.notes[0].contains(kind), "{:?}", world.report);
            } else {
                // A name or a shape, which only other programs read.
                assert!(kind.ends_with(".safetensors"));
                let newest = Generation::list(path).unwrap().remove(0).unwrap();
                assert!(newest.verify().unwrap_err().message.contains(kind));
            }
        });
        let least = if kind.ends_with(".safetensors") { 100 } else { 1000 };
        assert!(fallen >= least, "{kind}: {fallen}");
    }
}

#[test]
fn a_flipped_bit_in_the_log_is_reported() {
    let newest = STORY.newest("log-");
    let number: u64 = newest.to_str().unwrap().trim_start_matches("log-").parse().unwrap();
    let mut refused = 0;
    flip(&newest, 1000, |opened, path| match opened {
        // The frame after the last push records that it was durable: damage there loses nothing.
        Ok(world) => assert!(STORY.check(&world) && world.report.notes.len() == 1, "{:?}", world.report),
        Err(error) => {
            assert!(error.kind == Kind::Config && error.message.contains("--accept-loss"), "{error}");
            refused += 1;
            let world = World::with(Settings { accept_loss: true, ..settings(path) }).unwrap();
            assert!(!STORY.check(&world) && world.report.lost.len() == 1, "{:?}", world.report);
            let end = world.state();
            drop(world);
            // An accepted loss is not reported again.
            assert_eq!(World::open(path).unwrap().state(), end);
        }
    });
    assert!(refused > 900, "{refused}");
    // A segment that the newest snapshot does not need does no harm.
    flip(Path::new(&format!("log-{:08}", number - 1)), 200, |opened, _| {
        assert!(STORY.check(&opened.unwrap()));
    });
}

#[test]
fn missing_and_swapped_files_are_reported() {
    for name in STORY.files() {
        let copy = STORY.copy();
        std::fs::remove_file(copy.0.join(&name)).unwrap();
        let shown = name.to_str().unwrap();
        match World::open(&copy.0) {
            Ok(world) => {
                assert!(STORY.check(&world), "{shown}");
                let unused = shown.contains("generation-00000001") && shown.contains("log");
                assert!(unused || !shown.contains("generation") || !world.report.notes.is_empty(), "{shown}");
            }
            Err(error) => assert!(error.message.contains(shown) && shown.contains("log"), "{shown}: {error}"),
        }
    }
    let files = STORY.files();
    for a in &files {
        for b in files.iter().filter(|b| *b > a) {
            let copy = STORY.copy();
            let (a, b) = (copy.0.join(a), copy.0.join(b));
            let (first, second) = (std::fs::read(&a).unwrap(), std::fs::read(&b).unwrap());
            std::fs::write(&a, second).unwrap();
            std::fs::write(&b, first).unwrap();
            match World::open(&copy.0) {
                Ok(world) => assert!(STORY.check(&world), "{} {}", a.display(), b.display()),
                Err(error) => assert!(matches!(error.kind, Kind::Config), "{error}"),
            }
        }
    }
    let copy = STORY.copy();
    for number in [1, 2] {
        std::fs::write(copy.0.join(format!("generation-{number:08}/MANIFEST")), "x").unwrap();
    }
    let error = World::open(&copy.0).err().unwrap();
    assert!(error.message.contains("no snapshot") && error.message.contains("MANIFEST"), "{error}");
}

#[test]
fn every_damage_is_reported_with_its_remedy() {
    let dir = STORY.data_dir();
    let listed = checkpoint::list(&dir.0).unwrap().remove(0);
    assert_eq!(
        (listed.shard, listed.shards, listed.log_segments, listed.put_aside.len()),
        (0, Some(1), 2, 0)
    );
    let numbers: Vec<_> = listed.snapshots.iter().map(|snapshot| snapshot.number).collect();
    assert_eq!(numbers, [2, 1]);
    let newest = &listed.snapshots[0];
    assert!(newest.problem.is_none() && newest.bytes > 0);
    assert_eq!((newest.slices, newest.versions, newest.steps), (2, 80, 80));
    let verified = checkpoint::verify(&dir.0).unwrap().remove(0);
    assert_eq!((verified.whole, verified.damages), (vec![2, 1], Vec::new()));
    for name in STORY.files() {
        let whole = &STORY.files[&name];
        let shown = name.to_str().unwrap();
        let flipped: Vec<_> =
            whole.iter().enumerate().map(|(k, byte)| byte ^ u8::from(k == whole.len() / 2)).collect();
        for damaged in [Some(flipped), None] {
            let dir = STORY.data_dir();
            let path = shard_folder(&dir.0, 0).join(&name);
            match &damaged {
                Some(bytes) => std::fs::write(&path, bytes).unwrap(),
                None => std::fs::remove_file(&path).unwrap(),
            }
            let before = all_files(&dir.0);
            let verified = checkpoint::verify(&dir.0).unwrap().remove(0);
            assert_eq!(verified.damages.len(), 1, "{shown}: {:?}", verified.damages);
            let damage = &verified.damages[0];
            assert!(damage.contains(shown), "{shown}: {damage}");
            let way_out = match shown.split_once('/') {
                Some(("generation-00000002", _)) => "a start sets it aside and uses snapshot 1",
                Some(_) => "a start uses snapshot 2 and does not need it",
                None if shown == "log-00000002" => "a start uses snapshot 2 and does not need it",
                None => "restore the directory from a backup",
            };
            assert!(damage.contains(way_out), "{shown}: {damage}");
            assert_eq!(all_files(&dir.0), before);
        }
    }
    let error = checkpoint::verify(&shard_folder(&dir.0, 0)).unwrap_err();
    assert!(error.message.contains("shard-0"), "{error}");
}
