//! The end of a log: torn frames, and what is known to have been durable.

use crate::world::{Folder, SLICE, STORY, World, settings, sgd};
use fastps_core::error::Kind;
use fastps_core::tensor::Apply;
use fastps_durable::{Cut, Settings};
use std::time::Duration;

#[test]
fn a_log_truncated_anywhere_is_valid_up_to_there() {
    let name = STORY.newest("log-");
    let whole = &STORY.files[&name];
    let (mut losses, mut torn) = (0, 0);
    for length in (0..whole.len()).step_by(7).chain(whole.len() - 40..whole.len()) {
        let copy = STORY.copy();
        std::fs::write(copy.0.join(&name), &whole[..length]).unwrap();
        match World::open(&copy.0) {
            Ok(world) => {
                losses += u64::from(!STORY.check(&world));
                torn += world.report.notes.len();
            }
            // The first frame was durable.
            Err(error) => assert!(length < 80 && error.message.contains("log-"), "{length}: {error}"),
        }
    }
    assert!(losses > 100 && torn > 100, "{losses} {torn}");
    // A segment that another follows was complete.
    let before =
        STORY.files().into_iter().rfind(|other| other.to_str().unwrap().contains("log-") && *other < name);
    let copy = STORY.copy();
    let segment = copy.0.join(before.unwrap());
    let bytes = std::fs::read(&segment).unwrap();
    std::fs::write(&segment, &bytes[..bytes.len() - 30]).unwrap();
    std::fs::remove_dir_all(copy.0.join("generation-00000002")).unwrap();
    let error = World::open(&copy.0).err().unwrap();
    assert!(error.message.contains("is truncated"), "{error}");
    // Zeros after the end: written ahead, or left by the file system.
    let copy = STORY.copy();
    std::fs::write(copy.0.join(&name), [&whole[..], &[0; 4096]].concat()).unwrap();
    let world = World::open(&copy.0).unwrap();
    assert!(STORY.check(&world) && world.report.notes.is_empty());
}

/// The byte ranges of the push frames in a segment.
fn pushes_in(bytes: &[u8]) -> Vec<std::ops::Range<usize>> {
    let (mut at, mut found) = (0, Vec::new());
    while bytes[at..].starts_with(b"fpsR") {
        let length = u32::from_le_bytes(bytes[at + 4..at + 8].try_into().unwrap()) as usize;
        let end = at + 12 + length;
        if bytes[at + 12] == 2 {
            found.push(at..end);
        }
        at = end;
    }
    found
}

#[test]
fn damage_of_the_last_batch_is_not_a_torn_end() {
    let folder = Folder::new();
    let world = World::open(&folder.0).unwrap();
    world.session(1);
    world.register(1, "w", 4, Apply::Exact, sgd());
    world.sync();
    for sequence in 1..3 {
        world.push(1, 1, sequence, 1.0, None);
        world.sync();
    }
    // The file as a kill at this moment would leave it.
    let bytes = std::fs::read(folder.0.join("log-00000001")).unwrap();
    let last = pushes_in(&bytes).pop().unwrap();
    let with = |bytes: &[u8]| {
        let killed = Folder::new();
        std::fs::write(killed.0.join("log-00000001"), bytes).unwrap();
        World::open(&killed.0)
    };
    assert_eq!(with(&bytes).unwrap().state(), world.state());
    for at in last.clone() {
        let mut damaged = bytes.clone();
        damaged[at] ^= 1;
        let error = with(&damaged).err().unwrap_or_else(|| panic!("byte {at} is no damage"));
        assert!(error.kind == Kind::Config && error.message.contains("is damaged at byte"), "{error}");
    }
    // Both the end and the record of its sync are missing: the report says only what is known.
    let world = with(&bytes[..last.end - 1]).unwrap();
    let notes = &world.report.notes;
    assert_eq!((world.report.repeated, notes.len()), (1, 1));
    let known = format!("The first {} bytes are known to have been durable", pushes_in(&bytes)[0].end);
    for part in ["that are not a whole record", &known, "is unknown"] {
        assert!(notes[0].contains(part), "{part}: {notes:?}");
    }
}

#[test]
fn an_idle_log_records_the_sync_of_a_long_batch() {
    let folder = Folder::new();
    let world = World::open(&folder.0).unwrap();
    world.session(1);
    world.register(1, "w", SLICE, Apply::Exact, sgd());
    world.push(1, 1, 1, 1.0, None);
    world.sync();
    let path = folder.0.join("log-00000001");
    // The record of the sync is written only when the log thread is idle.
    let end = |bytes: &[u8]| pushes_in(bytes).pop().unwrap().end;
    let is_reported = |bytes: &[u8]| bytes[end(bytes)..].starts_with(b"fpsR");
    let late = std::time::Instant::now() + Duration::from_mins(1);
    while !is_reported(&std::fs::read(&path).unwrap()) {
        assert!(std::time::Instant::now() < late, "the sync is not recorded");
        std::thread::yield_now();
    }
    let mut bytes = std::fs::read(&path).unwrap();
    let last = pushes_in(&bytes).pop().unwrap();
    bytes[last.end - 1] ^= 1;
    drop(world);
    std::fs::write(&path, &bytes).unwrap();
    let error = World::open(&folder.0).err().unwrap();
    assert!(error.message.contains("is damaged at byte"), "{error}");
}

#[test]
fn a_snapshot_records_how_much_of_the_log_was_durable() {
    let folder = Folder::new();
    let world = World::open(&folder.0).unwrap();
    world.session(1);
    world.register(1, "w", 4, Apply::Exact, sgd());
    world.push(1, 1, 1, 1.0, None);
    let push = || {
        world.push(1, 1, 2, 1.0, None);
        Ok(())
    };
    // In the log after the cut, but not in the snapshot.
    let cut = Cut { id: 1, group: "default".into() };
    world.journal.snapshot_of_cut(&world.shard, cut, &push).unwrap();
    drop(world);
    let path = folder.0.join("log-00000002");
    let bytes = std::fs::read(&path).unwrap();
    let first = pushes_in(&bytes)[0].start;
    std::fs::write(&path, &bytes[..first]).unwrap();
    let error = World::open(&folder.0).err().unwrap();
    assert!(error.message.contains("were durable according to a snapshot"), "{error}");
    let world = World::with(Settings { accept_loss: true, ..settings(&folder.0) }).unwrap();
    assert_eq!((world.whole(1).0.version, world.report.lost.len()), (1, 1));
}
