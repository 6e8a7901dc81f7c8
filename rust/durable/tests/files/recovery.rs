//! A start restores everything.

use crate::world::{Folder, SLICE, STORY, World, adam, settings, sgd};
use fastps_core::error::Kind;
use fastps_core::frame::Action;
use fastps_core::tensor::{Apply, SliceId};
use fastps_durable::{Event, Settings};

#[test]
fn everything_comes_back_bit_for_bit() {
    let copy = STORY.copy();
    let world = World::open(&copy.0).unwrap();
    assert!(STORY.check(&world));
    assert_eq!((world.report.generation, &world.report.notes), (Some(2), &Vec::new()));
    assert_eq!(world.report.repeated, 40);
    // The shard continues from there, over further starts.
    world.push(20, 1, 500, 1.0, None);
    let end = world.state();
    drop(world);
    for _ in 0..3 {
        let world = World::open(&copy.0).unwrap();
        assert_eq!((world.state(), &world.report.notes), (end.clone(), &Vec::new()));
    }
    let world = World::open(&copy.0).unwrap();
    world.journal.note(&Event::SessionEnded(1));
    world.shard.forget_client(1);
    let end = world.state();
    drop(world);
    let world = World::open(&copy.0).unwrap();
    assert_eq!(world.state(), end);
    assert!(end.values().all(|(standing, ..)| standing.clients.iter().all(|client| client.client == 2)));
}

#[test]
fn without_any_snapshot_the_log_is_enough() {
    let folder = Folder::new();
    let world = World::open(&folder.0).unwrap();
    world.session(1);
    world.register(10, "a", 2 * SLICE + 3, Apply::Exact, adam());
    world.register(20, "racing", 9, Apply::Hogwild, sgd());
    world.register(30, "dropped", 9, Apply::Exact, sgd());
    world.change(20, 1, 1, 5.0, None, Action::Assign);
    for round in 1..6 {
        for slice in 10..13 {
            world.push(slice, 1, round, 0.5, None);
        }
    }
    world.journal.note(&Event::Dropped(vec![30]));
    world.shard.remove(&[SliceId(30)]);
    let end = world.state();
    drop(world);
    let world = World::open(&folder.0).unwrap();
    assert_eq!(world.state(), end);
    assert_eq!((world.report.generation, world.report.repeated), (None, 16));
    // Racing gradients are only in snapshots.
    world.push(20, 1, 2, 1.0, None);
    world.journal.snapshot(&world.shard).unwrap();
    let end = world.state();
    drop(world);
    assert_eq!(World::open(&folder.0).unwrap().state(), end);
}

#[test]
fn a_directory_has_one_owner_and_one_place() {
    let copy = STORY.copy();
    let world = World::open(&copy.0).unwrap();
    let error = World::open(&copy.0).err().unwrap();
    assert!(error.message.contains(&format!("process {}", std::process::id())), "{error}");
    drop(world);
    let elsewhere = Settings { shard: 1, shards: 2, ..settings(&copy.0) };
    let error = World::with(elsewhere).err().unwrap();
    assert_eq!((error.kind, error.got.as_deref()), (Kind::Config, Some("shard 0 of 1")));
    assert!(STORY.check(&World::open(&copy.0).unwrap()));
}
