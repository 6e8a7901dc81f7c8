//! Snapshots and logs on real files: everything comes back bit for bit, and no damage to any file yields a
//! wrong value.
#![allow(missing_docs, clippy::unwrap_used, clippy::panic)]

use fastps_core::codec::CodecId;
use fastps_core::dtype::DType;
use fastps_core::error::Kind;
use fastps_core::frame::{Action, Identity, Push};
use fastps_core::isa::Isa;
use fastps_core::optim::{Adam, Optimizer, Sgd};
use fastps_core::rows::Indices;
use fastps_core::shard::{Shard, ShardConfig};
use fastps_core::slice::Standing;
use fastps_core::tensor::{Apply, SliceId, TensorSpec};
use fastps_durable::{
    Cut, Event, Generation, Holding, Journal, Reading, Report, Reservation, Settings, Stage, checkpoint,
    export, restore, shard_folder,
};
use std::collections::{BTreeMap, HashMap};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, LazyLock};
use std::time::Duration;

const SLICE: u64 = 258_048;

/// A folder that is removed on drop, in memory where possible.
struct Folder(PathBuf);

impl Folder {
    fn new() -> Self {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        let shm = Path::new("/dev/shm");
        let parent = if shm.is_dir() { shm.to_owned() } else { std::env::temp_dir() };
        let (process, next) = (std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed));
        let path = parent.join(format!("fastps-durable-{process}-{next}"));
        std::fs::create_dir_all(&path).unwrap();
        Self(path)
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// All files of a folder, by relative path.
fn collect(folder: &Path, prefix: &Path, into: &mut BTreeMap<PathBuf, Vec<u8>>) {
    for entry in std::fs::read_dir(folder).unwrap() {
        let entry = entry.unwrap();
        let name = prefix.join(entry.file_name());
        if entry.path().is_dir() {
            collect(&entry.path(), &name, into);
        } else {
            into.insert(name, std::fs::read(entry.path()).unwrap());
        }
    }
}

fn settings(path: &Path) -> Settings {
    Settings {
        path: path.to_owned(),
        shard: 0,
        shards: 1,
        keep: 2,
        keep_for: Duration::ZERO,
        accept_loss: false,
    }
}

/// A shard and its files.
struct World {
    journal: Arc<Journal>,
    shard: Shard,
    report: Report,
}

type Opened = fastps_core::error::Result<World>;

impl World {
    fn open(path: &Path) -> Opened {
        Self::with(settings(path))
    }

    fn with(settings: Settings) -> Opened {
        let journal = Journal::open(settings)?;
        let config = ShardConfig::new(0, 1 << 32, Isa::get()?);
        let shard = Shard::new(ShardConfig { sink: Some(journal.clone()), ..config });
        let report = journal.recover(&shard)?;
        Ok(Self { journal, shard, report })
    }

    fn register(&self, first: u64, name: &str, elements: u64, apply: Apply, optimizer: Optimizer) {
        let (dtype, group) = (DType::Float32, "default".into());
        let shape = vec![elements];
        let spec = TensorSpec { name: name.into(), shape, dtype, apply, group, optimizer };
        let slices: Vec<_> = (0..spec.slice_count() as u64).map(|k| (first + k, k)).collect();
        let ids: Vec<_> = slices.iter().map(|(id, k)| (SliceId(*id), *k as usize)).collect();
        self.shard.create(&Arc::new(spec.clone()), 1, &ids).unwrap();
        let (stage, ids) = (Stage::Open, slices.iter().map(|(id, _)| *id).collect::<Vec<_>>());
        let holding = Holding { spec: spec.clone(), group: 1, shards: vec![0; ids.len()], slices: ids };
        self.journal.note(&Event::Reserved(first, Reservation { spec, group: 1, slices, stage }));
        self.journal.note(&Event::Sealed(first));
        self.journal.note(&Event::Entered(first, holding));
    }

    fn session(&self, client: u64) {
        self.journal.note(&Event::SessionBegan(client));
    }

    /// Pushes a gradient with this value in every element, or in the first rows.
    fn push(&self, slice: u64, client: u64, sequence: u64, value: f32, rows: Option<u32>) {
        self.change(slice, client, sequence, value, rows, Action::Gradient);
    }

    fn change(&self, id: u64, client: u64, sequence: u64, value: f32, rows: Option<u32>, action: Action) {
        let slice = self.shard.slice(SliceId(id)).unwrap();
        let n = rows.map_or(slice.len(), |rows| rows as usize);
        let rows = rows.map(|rows| (0..rows).flat_map(u32::to_le_bytes).collect::<Vec<_>>());
        let body: Vec<u8> = (0..n).flat_map(|i| (value + i as f32 / 64.0).to_le_bytes()).collect();
        let push = Push {
            slice: SliceId(id),
            action,
            identity: Identity { client, sequence },
            base: None,
            lr: None,
            scale: None,
            momentum: None,
            correction: None,
            count: n as u64,
            indices: rows.as_deref().map(Indices::new),
            codec: CodecId::Float32,
            body: &body,
            trusted: false,
            once: false,
        };
        self.shard.push_to(&slice, &push, || panic!("nothing is held")).unwrap().unwrap();
    }

    /// All slices, as values.
    fn state(&self) -> BTreeMap<u64, Whole> {
        let catalog = self.journal.catalog();
        catalog.slices().map(|(id, ..)| (id, self.whole(id))).collect()
    }

    fn whole(&self, id: u64) -> Whole {
        let image = self.shard.slice(SliceId(id)).unwrap().image().unwrap();
        (image.standing, image.values.as_ref().to_vec(), image.state.as_ref().to_vec())
    }

    fn sync(&self) {
        self.journal.sync(self.journal.position()).unwrap();
    }
}

type Whole = (Standing, Vec<u8>, Vec<u8>);

fn sgd() -> Optimizer {
    Optimizer::Sgd(Sgd { lr: 1.0, ..Sgd::default() })
}

fn adam() -> Optimizer {
    Optimizer::Adam(Adam::default())
}

/// Two snapshots, each followed by a segment; the last segment is open.
struct Story {
    files: BTreeMap<PathBuf, Vec<u8>>,
    end: BTreeMap<u64, Whole>,
    /// Every version that each slice ever had.
    history: HashMap<(u64, u64), (Vec<u8>, Vec<u8>)>,
}

static STORY: LazyLock<Story> = LazyLock::new(|| {
    let folder = Folder::new();
    let world = World::open(&folder.0).unwrap();
    let mut history = HashMap::new();
    world.session(1);
    world.session(2);
    world.register(10, "a", 17, Apply::Exact, adam());
    world.register(20, "b", 5, Apply::Exact, sgd());
    let mut keep = |world: &World| {
        for (id, (standing, values, state)) in world.state() {
            history.insert((id, standing.version), (values, state));
        }
    };
    keep(&world);
    for round in 1..=60_u64 {
        world.push(10, 1 + round % 2, round, round as f32, None);
        keep(&world);
        world.push(20, 2 - round % 2, round, 1.0, (round % 3 == 0).then_some(3));
        keep(&world);
        if round % 7 == 0 {
            world.shard.resolve(SliceId(10), Identity { client: 1, sequence: 1000 + round }).unwrap();
        }
        if round % 4 == 0 {
            // A separate sync, so that the next frames record that it was durable.
            world.sync();
        }
        if round == 20 || round == 40 {
            world.journal.snapshot(&world.shard).unwrap();
        }
    }
    let end = world.state();
    world.journal.close();
    let mut files = BTreeMap::new();
    collect(&folder.0, Path::new(""), &mut files);
    files.remove(Path::new("lock"));
    Story { files, end, history }
});

impl Story {
    fn copy(&self) -> Folder {
        let folder = Folder::new();
        self.copy_to(&folder.0);
        folder
    }

    fn copy_to(&self, folder: &Path) {
        for (name, bytes) in &self.files {
            let path = folder.join(name);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, bytes).unwrap();
        }
    }

    /// A data directory with one shard.
    fn data_dir(&self) -> Folder {
        let folder = Folder::new();
        self.copy_to(&shard_folder(&folder.0, 0));
        folder
    }

    fn files(&self) -> Vec<PathBuf> {
        self.files.keys().cloned().collect()
    }

    /// The newest file whose name ends like this.
    fn newest(&self, ends: &str) -> PathBuf {
        self.files().into_iter().rfind(|name| name.to_str().unwrap().contains(ends)).unwrap()
    }

    /// Checks that the state is one that existed, and returns whether it is the final one.
    fn check(&self, world: &World) -> bool {
        let state = world.state();
        for (id, (standing, values, state)) in &state {
            let known = self.history.get(&(*id, standing.version));
            assert!(
                known.is_some_and(|known| known == &(values.clone(), state.clone())),
                "{:?}",
                world.report
            );
        }
        state == self.end
    }
}

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
    let is_told = |bytes: &[u8]| bytes[end(bytes)..].starts_with(b"fpsR");
    let late = std::time::Instant::now() + Duration::from_mins(1);
    while !is_told(&std::fs::read(&path).unwrap()) {
        assert!(std::time::Instant::now() < late, "nothing tells of it");
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

#[test]
fn snapshots_open_as_safetensors() {
    let folder = Folder::new();
    let world = World::open(&folder.0).unwrap();
    world.session(1);
    world.register(10, "layer.weight", SLICE + 3, Apply::Exact, adam());
    world.register(20, "small", 4, Apply::Exact, adam());
    world.register(30, "__metadata__", 2, Apply::Exact, sgd());
    // A part of a tensor, as on one shard of several.
    let spec = |n: u64| {
        let (dtype, apply, group) = (DType::Float32, Apply::Exact, "default".into());
        TensorSpec { name: "part".into(), shape: vec![n], dtype, apply, group, optimizer: sgd() }
    };
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

fn all_files(folder: &Path) -> BTreeMap<PathBuf, Vec<u8>> {
    let mut files = BTreeMap::new();
    collect(folder, Path::new(""), &mut files);
    files
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
        // What the log lacks was in the snapshot.
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
                assert_eq!(export(&dir.0, &file, true, Reading::All).unwrap_err().message, error.message);
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
        let exported = export(source, &file, true, Reading::All).unwrap();
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
        assert_eq!(export(source, &file, false, Reading::All).unwrap_err().kind, Kind::Config);
    }
    let file = parent.0.join("parameters.safetensors");
    export(&four, &file, false, Reading::All).unwrap();
    let bytes = std::fs::read(&file).unwrap();
    assert_eq!(safetensors::SafeTensors::deserialize(&bytes).unwrap().names().len(), 2);
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
    let exported = export(&dir.0, &file("cut"), false, Reading::Cut).unwrap();
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
    export(&parent.0.join("two"), &file("restored"), false, Reading::All).unwrap();
    let bytes = std::fs::read(file("restored")).unwrap();
    let tensors = safetensors::SafeTensors::deserialize(&bytes).unwrap();
    assert!(tensors.tensor("a").unwrap().data() == values(&before));
    let error = export(&parent.0.join("two"), &file("none"), false, Reading::Cut).unwrap_err();
    assert!(error.message.contains("no cut over all shards"), "{error}");
    // A start includes all later changes.
    let world = World::open(&path).unwrap();
    let exact = |state: BTreeMap<u64, Whole>| [state[&10].clone(), state[&11].clone()];
    assert!(exact(world.state()) == exact(end));
    world.journal.snapshot_of_cut(&world.shard, cut(9), &|| Ok(())).unwrap();
}
