//! Spaces of vectors come back from the log, from snapshots, and in another number of shards.

use crate::world::{Folder, SLICE, World, settings, sgd};
use fastps_core::dtype::DType;
use fastps_core::program::{Command, Op, Program};
use fastps_core::slice::VectorsStanding;
use fastps_core::tensor::{Apply, SliceId, Space, SpaceId};
use fastps_durable::{Event, Reading, restore, shard_folder};
use std::sync::Arc;

const FIRST: SpaceId = SpaceId(7);
const SECOND: SpaceId = SpaceId(8);
const SLICES: [u64; 2] = [10, 11];

fn world(folder: &Folder) -> World {
    World::open(&shard_folder(&folder.0, 0)).unwrap()
}

fn register(world: &World) {
    world.session(1);
    world.register(10, "w", SLICE + 3, Apply::Exact, sgd());
}

fn space(id: SpaceId, vectors: &[&str]) -> Arc<Space> {
    let vectors = vectors.iter().map(|name| Arc::from(*name)).collect();
    Arc::new(Space { id, name: "mine".into(), vectors })
}

fn open(world: &World, space: &Arc<Space>) {
    for slice in SLICES {
        world.shard.slice(SliceId(slice)).unwrap().open_space(space).unwrap();
    }
}

fn close(world: &World, space: SpaceId) {
    for slice in SLICES {
        assert!(world.shard.slice(SliceId(slice)).unwrap().close_space(space));
    }
}

fn run(world: &World, space: SpaceId, number: u64, ops: Vec<Op>) {
    let (command, program) = (Command { space, term: 3, number }, Program::new(ops).unwrap());
    for slice in SLICES {
        world.shard.slice(SliceId(slice)).unwrap().run_program(command, &program).unwrap();
    }
}

/// One batch of two portions, whose sum goes to the first vector and from there to the tensor.
fn iterate(world: &World, space: SpaceId, batch: u64) {
    let number = 4 * batch;
    run(world, space, number, vec![Op::BeginSum { batch, portions: 2, largest: 100.0, coarser: 0 }]);
    for slice in SLICES {
        let slice = world.shard.slice(SliceId(slice)).unwrap();
        for portion in 0..2 {
            let value = |i: usize| ((i + 3 * portion as usize) % 97) as f32 * 0.37 - batch as f32;
            let body: Vec<u8> = (0..slice.len()).flat_map(|i| value(i).to_le_bytes()).collect();
            assert!(slice.push_portion(space, batch, portion, &body).unwrap());
        }
    }
    run(world, space, number + 1, vec![Op::EndSum { to: 1 }, Op::Dot { x: 1, y: 1 }]);
    run(world, space, number + 2, vec![Op::Axpy { to: 0, by: -0.01, x: 1 }, Op::MaxAbs { x: 0 }]);
}

/// Of each slice: its version, the tensor and the vectors, and what else it knows of its space.
type All = Vec<(u64, Vec<Vec<u8>>, Option<(Arc<Space>, VectorsStanding)>)>;

fn all(world: &World) -> All {
    let of = |id: &u64| {
        let slice = world.shard.slice(SliceId(*id)).unwrap();
        let (image, space) = (slice.image().unwrap(), slice.space());
        let mut arrays = vec![image.values.as_ref().to_vec()];
        let vectors = image.vectors.map_or_else(Vec::new, |vectors| vectors.vectors);
        arrays.extend(vectors.iter().map(|vector| vector.as_ref().to_vec()));
        assert_eq!(arrays.len(), 1 + space.as_ref().map_or(0, |(space, _)| space.vectors.len()));
        (image.standing.version, arrays, space)
    };
    SLICES.iter().map(of).collect()
}

#[test]
fn the_log_and_snapshots_restore_spaces() {
    let folder = Folder::new();
    let begun = world(&folder);
    register(&begun);
    let mut states = vec![(begun.journal.position(), all(&begun))];
    let mut expected = states.remove(0).1;
    let mut now = begun;
    for step in 0..9 {
        match step {
            0 => open(&now, &space(FIRST, &["g", "p"])),
            1..=3 => iterate(&now, FIRST, step),
            4 => close(&now, FIRST),
            5 => open(&now, &space(SECOND, &["g"])),
            _ => iterate(&now, SECOND, step),
        }
        // From the log only, from a snapshot only, and from a snapshot and the log after it.
        if matches!(step, 2 | 4 | 6) {
            now.journal.snapshot(&now.shard).unwrap();
        }
        assert!(all(&now) != expected);
        expected = all(&now);
        drop(now);
        now = world(&folder);
        assert_eq!(now.report.notes, Vec::<String>::new());
        assert!(all(&now) == expected, "after step {step}");
    }
    // A space continues after a start: a repeat of the last program is answered, an earlier one is refused.
    let slice = now.shard.slice(SliceId(10)).unwrap();
    let program = |number, ops| {
        slice.run_program(Command { space: SECOND, term: 3, number }, &Program::new(ops).unwrap())
    };
    assert_eq!(program(34, vec![]).unwrap(), expected[0].2.as_ref().unwrap().1.results);
    assert!(program(33, vec![]).is_err());
}

#[test]
fn a_sum_that_was_open_is_lost_and_said_to_be() {
    let folder = Folder::new();
    let before = world(&folder);
    register(&before);
    open(&before, &space(FIRST, &["g"]));
    run(&before, FIRST, 1, vec![Op::BeginSum { batch: 1, portions: 1, largest: 1.0, coarser: 0 }]);
    drop(before);
    let after = world(&folder);
    let slice = after.shard.slice(SliceId(11)).unwrap();
    let error = slice.push_portion(FIRST, 1, 0, &vec![0; slice.bytes()]).unwrap_err();
    assert_eq!(error.kind, fastps_core::error::Kind::UnknownOutcome);
}

#[test]
fn another_number_of_shards_keeps_them() {
    let folder = Folder::new();
    let before = world(&folder);
    register(&before);
    open(&before, &space(FIRST, &["g", "p"]));
    iterate(&before, FIRST, 1);
    let expected = all(&before);
    before.journal.note(&Event::SessionEnded(1));
    drop(before);
    let target = folder.0.join("two");
    restore(&folder.0, &target, 2, Reading::All).unwrap();
    let mut found = Vec::new();
    for shard in 0..2 {
        let settings =
            fastps_durable::Settings { shard, shards: 2, ..settings(&shard_folder(&target, shard)) };
        let world = World::with(settings).unwrap();
        for id in SLICES {
            let Ok(slice) = world.shard.slice(SliceId(id)) else { continue };
            let vectors = slice.image().unwrap().vectors.unwrap();
            found.push((id, vectors.vectors.iter().map(|v| v.as_ref().to_vec()).collect::<Vec<_>>()));
            assert_eq!(slice.space(), expected[id as usize - 10].2);
        }
    }
    found.sort();
    let vectors = |k: usize| expected[k].1[1..].to_vec();
    assert!(found == [(10, vectors(0)), (11, vectors(1))]);
}

#[test]
fn a_float64_tensor_has_them_too() {
    let folder = Folder::new();
    let before = world(&folder);
    before.register_as(10, "w", 5, Apply::Exact, sgd(), DType::Float64);
    let slice = before.shard.slice(SliceId(10)).unwrap();
    slice.open_space(&space(FIRST, &["g"])).unwrap();
    let command = |number| Command { space: FIRST, term: 1, number };
    let begin = Op::BeginSum { batch: 1, portions: 1, largest: 1.0, coarser: 0 };
    slice.run_program(command(1), &Program::new(vec![begin]).unwrap()).unwrap();
    let body: Vec<u8> = [0.1_f64; 5].iter().flat_map(|x| x.to_le_bytes()).collect();
    slice.push_portion(FIRST, 1, 0, &body).unwrap();
    let end = vec![Op::EndSum { to: 1 }, Op::Copy { to: 0, from: 1 }];
    slice.run_program(command(2), &Program::new(end).unwrap()).unwrap();
    drop((slice, before));
    for _ in 0..2 {
        let after = world(&folder);
        let image = after.shard.slice(SliceId(10)).unwrap().image().unwrap();
        assert_eq!(image.values.as_ref(), body);
        assert_eq!(image.vectors.unwrap().vectors[0].as_ref(), body);
        after.journal.snapshot(&after.shard).unwrap();
    }
}
