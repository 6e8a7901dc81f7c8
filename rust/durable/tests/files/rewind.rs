//! A directory as it was at a moment: by version, time and push, on one shard and on two.

use crate::world::{Folder, World, adam, all_files, settings, sgd};
use fastps_core::codec::CodecId;
use fastps_core::error::Kind;
use fastps_core::frame::{Action, Identity, Push};
use fastps_core::tensor::{Apply, SliceId, TensorSpec};
use fastps_durable::{
    Event, Holding, Moment, Reading, Reservation, Settings, Stage, past, restore, shard_folder,
};
use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

type Values = (u64, Vec<u8>, Vec<u8>);

/// All slices of some shards: version, values and state.
fn state<'w>(worlds: impl IntoIterator<Item = &'w World>) -> BTreeMap<u64, Values> {
    let all = worlds.into_iter().flat_map(World::state);
    all.map(|(id, (standing, values, state))| (id, (standing.version, values, state))).collect()
}

fn kept(path: &Path, shard: u32, shards: u32) -> Settings {
    Settings { shard, shards, history: 1 << 30, ..settings(&shard_folder(path, shard)) }
}

/// The state at a moment, on a cluster of some other size.
fn rewound(from: &Path, moment: &Moment) -> fastps_core::error::Result<BTreeMap<u64, Values>> {
    let parent = Folder::new();
    let to = parent.0.join("to");
    restore(from, &to, 3, Reading::At(moment.clone()))?;
    let worlds = (0..3).map(|shard| World::with(kept(&to, shard, 3)));
    let worlds: Vec<_> = worlds.collect::<Result<_, _>>()?;
    for world in &worlds {
        let catalog = world.journal.catalog();
        assert!(catalog.sessions.is_empty() && catalog.names.is_empty() && catalog.members.is_empty());
        assert!(world.state().values().all(|(standing, ..)| standing.clients.is_empty()));
    }
    Ok(state(&worlds))
}

fn push_of(client: u64, sequence: u64) -> Moment {
    Moment::Pushes([(client, sequence)].into())
}

fn now() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_millis() as u64
}

#[test]
fn every_version_time_and_push_comes_back() {
    let dir = Folder::new();
    let world = World::with(kept(&dir.0, 0, 1)).unwrap();
    (1..=2).for_each(|client| world.session(client));
    world.register(10, "a", 17, Apply::Exact, adam());
    world.register(20, "b", 5, Apply::Exact, sgd());
    world.register(30, "racing", 3, Apply::Hogwild, sgd());
    let mut had: BTreeMap<(u64, u64), Values> = BTreeMap::new();
    let (mut times, mut pushes) = (Vec::new(), Vec::new());
    for round in 1..=90_u64 {
        world.push(10, 1 + round % 2, round, round as f32, None);
        if round % 3 > 0 {
            world.push(20, 1 + round % 2, round, 1.0, (round % 5 == 0).then_some(3));
        }
        pushes.push((push_of(1 + round % 2, round), state([&world])));
        if round % 11 == 0 {
            world.change(20, 2, 1000 + round, round as f32, None, Action::Assign);
            world.push(30, 1, round, 1.0, None);
        }
        for (id, values) in state([&world]) {
            had.insert((id, values.0), values);
        }
        if round % 20 == 0 {
            world.journal.snapshot(&world.shard).unwrap();
        }
        if round % 30 == 0 {
            std::thread::sleep(Duration::from_millis(150));
            times.push((now(), state([&world])));
            std::thread::sleep(Duration::from_millis(150));
        }
    }
    world.sync();
    let before = all_files(&dir.0);
    let exact = |mut state: BTreeMap<u64, Values>| {
        state.remove(&30);
        state
    };
    let last =
        |id: u64| had.keys().filter(|(slice, _)| *slice == id).map(|(_, version)| *version).max().unwrap();
    for version in (0..=last(10)).step_by(7).chain([last(10)]) {
        let all = exact(rewound(&dir.0, &Moment::Version(version)).unwrap());
        let expected = [10, 20].map(|id| (id, had.get(&(id, version.min(last(id)))).cloned()));
        for (id, expected) in expected {
            assert!(version == 0 || all.get(&id) == expected.as_ref(), "version {version} of {id}");
        }
        if version == 0 {
            continue;
        }
        let named = exact(rewound(&dir.0, &Moment::Tensor("a".into(), version)).unwrap());
        assert_eq!(named[&10], all[&10], "version {version}");
    }
    for (push, expected) in pushes.iter().step_by(9) {
        assert_eq!(exact(rewound(&dir.0, push).unwrap()), exact(expected.clone()), "{push:?}");
    }
    for (time, expected) in &times {
        assert_eq!(exact(rewound(&dir.0, &Moment::Time(*time)).unwrap()), exact(expected.clone()));
    }
    for (moment, why) in [
        (Moment::Version(last(10) + 1), "after the last change"),
        (Moment::Tensor("a".into(), last(10) + 1), "never had version"),
        (Moment::Tensor("none".into(), 1), "no tensor is called \"none\""),
        (push_of(7, 1), "no push 1"),
        (Moment::Time(1000), "before the first time"),
    ] {
        let error = rewound(&dir.0, &moment).unwrap_err();
        assert!(error.kind == Kind::Config && error.message.contains(why), "{error}");
    }
    // The server was running, and nothing of its files has changed.
    assert_eq!(all_files(&dir.0), before);
}

#[test]
fn removed_and_late_tensors_are_there_at_their_time() {
    let dir = Folder::new();
    let world = World::with(kept(&dir.0, 0, 1)).unwrap();
    world.session(1);
    world.register(10, "a", 2, Apply::Exact, sgd());
    world.register(20, "b", 2, Apply::Exact, sgd());
    for round in 1..=9 {
        world.push(10, 1, round, 1.0, None);
        if round <= 3 {
            world.push(20, 1, round, 1.0, None);
        }
        if round == 3 {
            world.journal.note(&Event::Removed("b".into()));
            world.shard.remove(&[SliceId(20)]);
            world.journal.note(&Event::Dropped(vec![20]));
        }
        if round == 6 {
            world.register(40, "c", 2, Apply::Exact, sgd());
        }
    }
    world.sync();
    let there = |version| rewound(&dir.0, &Moment::Version(version)).unwrap().into_keys().collect::<Vec<_>>();
    assert_eq!([2, 4, 8].map(there), [vec![10, 20], vec![10], vec![10, 40]]);
}

/// Registers a tensor of one slice a shard.
fn register_across(worlds: &[World], name: &str, elements: u64) {
    let group: Arc<str> = "default".into();
    let dtype = fastps_core::dtype::DType::Float32;
    let (shape, optimizer, average) = (vec![elements], sgd(), None);
    let spec = TensorSpec { dtype, group, average, ..TensorSpec::new(name, shape, optimizer) };
    let slices: Vec<u64> = (0..worlds.len() as u64).map(|k| 50 + k).collect();
    for (k, world) in worlds.iter().enumerate() {
        let held = vec![(slices[k], k as u64)];
        world.shard.create(&Arc::new(spec.clone()), 1, &[(SliceId(slices[k]), k)]).unwrap();
        let reservation = Reservation { spec: spec.clone(), group: 1, slices: held, stage: Stage::Open };
        world.journal.note(&Event::Reserved(50, reservation));
        world.journal.note(&Event::Sealed(50));
    }
    let shards = (0..worlds.len() as u32).collect();
    worlds[0].journal.note(&Event::Entered(50, Holding { spec, group: 1, slices, shards }));
}

#[test]
fn shards_agree_on_a_moment() {
    let dir = Folder::new();
    let worlds = [0, 1].map(|shard| World::with(kept(&dir.0, shard, 2)).unwrap());
    for world in &worlds {
        world.session(1);
    }
    worlds[0].register(10, "a", 3, Apply::Exact, sgd());
    register_across(&worlds, "wide", 258_048 + 5);
    let mut had = Vec::new();
    for round in 1..=6 {
        worlds[0].push(50, 1, round, 1.0, None);
        worlds[1].push(51, 1, round, 1.0, Some(4));
        worlds[0].push(10, 1, round, 1.0, None);
        had.push(state(&worlds));
        std::thread::sleep(Duration::from_millis(220));
        if round == 3 {
            for world in &worlds {
                world.journal.snapshot(&world.shard).unwrap();
            }
        }
    }
    worlds.iter().for_each(World::sync);
    for (version, expected) in (1..).zip(&had) {
        // Shard 1 has no slice of "a": it is as of the time.
        for moment in [Moment::Version(version), Moment::Tensor("a".into(), version), push_of(1, version)] {
            let all = rewound(&dir.0, &moment).unwrap();
            let versions =
                |of: &BTreeMap<u64, Values>| of.values().map(|values| values.0).collect::<Vec<_>>();
            assert_eq!(versions(&all), versions(expected), "{moment:?}");
            assert!(&all == expected, "{moment:?}");
        }
    }
}

#[test]
fn a_snapshot_says_the_time_of_what_it_contains() {
    for history in [1 << 30, 0] {
        let dir = Folder::new();
        let world = World::with(Settings { history, ..kept(&dir.0, 0, 1) }).unwrap();
        world.session(1);
        world.register(10, "a", 2, Apply::Exact, sgd());
        (1..=3).for_each(|round| world.push(10, 1, round, 1.0, None));
        world.journal.snapshot(&world.shard).unwrap();
        let expected = state([&world]);
        // A manifest has whole seconds.
        std::thread::sleep(Duration::from_millis(1100));
        let between = Moment::Time(now());
        let unchanged = rewound(&dir.0, &between).unwrap();
        std::thread::sleep(Duration::from_millis(5));
        world.push(10, 1, 4, 1.0, None);
        world.sync();
        let found = rewound(&dir.0, &between);
        assert!(unchanged == expected, "before the next change");
        if history > 0 {
            assert!(found.unwrap() == expected, "after it");
        } else {
            assert!(found.unwrap_err().message.contains("before the first time"));
        }
    }
}

#[test]
fn history_is_bounded_and_thinned() {
    let dir = Folder::new();
    let settings = Settings { history: 300_000, ..kept(&dir.0, 0, 1) };
    let world = World::with(settings).unwrap();
    world.session(1);
    world.register(10, "a", 1000, Apply::Exact, sgd());
    let sizes = || {
        let files = all_files(&dir.0);
        let of = |what: &str| {
            let named = files.iter().filter(|(name, _)| name.to_str().unwrap().contains(what));
            named.map(|(_, bytes)| bytes.len()).sum::<usize>()
        };
        (of("/log-"), of("/generation-"))
    };
    for round in 1..=200 {
        world.push(10, 1, round, 1.0, None);
        if round % 5 == 0 {
            world.journal.snapshot(&world.shard).unwrap();
        }
    }
    let (log, snapshots) = sizes();
    assert!(log + snapshots < 330_000 && log > 200_000, "{log} bytes of log, {snapshots} of snapshots");
    // Two recent snapshots are kept whatever they weigh.
    assert!(snapshots < log / 10 + 3 * 9000, "{log} bytes of log, {snapshots} of snapshots");
    let error = rewound(&dir.0, &Moment::Version(3)).unwrap_err();
    assert!(error.message.contains("before the history"), "{error}");
    let (first, got) = (error.expected.clone().unwrap(), error.got.clone().unwrap());
    assert_eq!(got, "version 3");
    let first: u64 =
        first.strip_prefix("version ").and_then(|rest| rest.split(' ').next()).unwrap().parse().unwrap();
    assert_eq!(rewound(&dir.0, &Moment::Version(first)).unwrap()[&10].0, first);
    assert_eq!(rewound(&dir.0, &Moment::Version(190)).unwrap()[&10].0, 190);
    drop(world);
    // Without the option, the next snapshot lets it go.
    let world = World::with(Settings { history: 0, ..kept(&dir.0, 0, 1) }).unwrap();
    (0..2).for_each(|_| drop(world.journal.snapshot(&world.shard).unwrap()));
    assert!(sizes().0 < 1000);
}

#[test]
fn a_mark_is_one_moment_of_all_shards() {
    let dir = Folder::new();
    let worlds = [0, 1].map(|shard| World::with(kept(&dir.0, shard, 2)).unwrap());
    register_across(&worlds, "wide", 258_048 + 5);
    let push = |shard: usize, round| worlds[shard].push(50 + shard as u64, 1, round, 1.0, Some(4));
    let mut had = Vec::new();
    for round in 1..=6 {
        let id = 100 + round;
        (0..2).for_each(|shard| push(shard, 3 * round));
        worlds[0].journal.mark(id, "epoch").unwrap();
        let first = state(&worlds[..1]);
        // A change of the first shard that the mark lacks, and one of the second that it contains.
        (0..2).for_each(|shard| push(shard, 3 * round + 1));
        let second = state(&worlds[1..]);
        worlds[1].journal.mark(id, "epoch").unwrap();
        push(1, 3 * round + 2);
        had.push((id, first.into_iter().chain(second).collect::<BTreeMap<_, _>>()));
        if round % 2 == 0 {
            for world in &worlds {
                world.journal.snapshot(&world.shard).unwrap();
            }
        }
    }
    worlds[0].journal.mark(7, "half").unwrap();
    worlds.iter().for_each(World::sync);
    for (id, expected) in &had {
        assert!(&rewound(&dir.0, &Moment::Mark(*id)).unwrap() == expected, "{id}");
    }
    let marks = past(&dir.0, |_| ()).unwrap().marks;
    let listed: Vec<_> = marks.iter().map(|mark| (mark.id, &*mark.name)).collect();
    assert_eq!(listed, had.iter().map(|(id, _)| (*id, "epoch")).collect::<Vec<_>>());
    assert!(marks.iter().all(|mark| mark.time > 0) && marks.is_sorted_by(|a, b| a.version < b.version));
    let error = rewound(&dir.0, &Moment::Mark(7)).unwrap_err();
    assert!(error.kind == Kind::Config && error.message.contains("shard 1"), "{error}");
}

#[test]
fn notes_are_kept_with_history_only() {
    for (history, kept_notes) in [(1 << 30, ["batch 8131", "", "é"]), (0, [""; 3])] {
        let dir = Folder::new();
        let world = World::with(Settings { history, ..kept(&dir.0, 0, 1) }).unwrap();
        world.session(1);
        world.register(10, "a", 2, Apply::Exact, sgd());
        let slice = world.shard.slice(SliceId(10)).unwrap();
        for (sequence, note) in (1..).zip(["batch 8131", "", "é"]) {
            let gradient =
                Push::gradient(SliceId(10), Identity { client: 1, sequence }, 2, CodecId::Float32, &[0; 8]);
            let push = Push { note, ..gradient };
            world.shard.push_to(&slice, &push, || panic!("nothing is held")).unwrap().unwrap();
        }
        for wrong in ["x".repeat(65), "a\nb".to_owned()] {
            let gradient = Push::gradient(
                SliceId(10),
                Identity { client: 1, sequence: 9 },
                2,
                CodecId::Float32,
                &[0; 8],
            );
            let push = Push { note: &wrong, ..gradient };
            let refused =
                world.shard.push_to(&slice, &push, || panic!("nothing is held")).unwrap().unwrap_err();
            assert!(refused.kind == Kind::Config && refused.message.contains("note"), "{refused}");
        }
        world.sync();
        let mut notes = Vec::new();
        past(&dir.0, |change| notes.push(change.note.to_owned())).unwrap();
        assert_eq!(notes, kept_notes);
        let last = state([&world]);
        drop((slice, world));
        assert_eq!(state([&World::with(Settings { history, ..kept(&dir.0, 0, 1) }).unwrap()]), last);
    }
}
