//! A shard and its files, and the story that the tests damage: two snapshots, each followed by a segment.

use fastps_core::codec::CodecId;
use fastps_core::dtype::DType;
use fastps_core::frame::{Action, Identity, Push};
use fastps_core::isa::Isa;
use fastps_core::optim::{Adam, Optimizer, Sgd};
use fastps_core::rows::Indices;
use fastps_core::shard::{Shard, ShardConfig};
use fastps_core::slice::Standing;
use fastps_core::tensor::{Apply, SliceId, TensorSpec};
use fastps_durable::{Event, Holding, Journal, Report, Reservation, Settings, Stage, shard_folder};
use std::collections::{BTreeMap, HashMap};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, LazyLock};
use std::time::Duration;

pub(crate) const SLICE: u64 = 258_048;

/// A folder that is removed on drop, in memory where possible.
pub(crate) struct Folder(pub(crate) PathBuf);

impl Folder {
    pub(crate) fn new() -> Self {
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
pub(crate) fn collect(folder: &Path, prefix: &Path, into: &mut BTreeMap<PathBuf, Vec<u8>>) {
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

pub(crate) fn settings(path: &Path) -> Settings {
    Settings {
        path: path.to_owned(),
        shard: 0,
        shards: 1,
        keep: 2,
        keep_for: Duration::ZERO,
        history: 0,
        accept_loss: false,
    }
}

/// A shard and its files.
pub(crate) struct World {
    pub(crate) journal: Arc<Journal>,
    pub(crate) shard: Shard,
    pub(crate) report: Report,
}

impl World {
    pub(crate) fn open(path: &Path) -> Opened {
        Self::with(settings(path))
    }

    pub(crate) fn with(settings: Settings) -> Opened {
        let journal = Journal::open(settings)?;
        let config = ShardConfig::new(0, 1 << 32, Isa::get()?);
        let shard = Shard::new(ShardConfig { sink: Some(journal.clone()), ..config });
        let report = journal.recover(&shard)?;
        Ok(Self { journal, shard, report })
    }

    pub(crate) fn register(&self, first: u64, name: &str, elements: u64, apply: Apply, optimizer: Optimizer) {
        self.register_as(first, name, elements, apply, optimizer, DType::Float32);
    }

    pub(crate) fn register_as(
        &self,
        first: u64,
        name: &str,
        elements: u64,
        apply: Apply,
        optimizer: Optimizer,
        dtype: DType,
    ) {
        let group = "default".into();
        let shape = vec![elements];
        let spec = TensorSpec { dtype, apply, group, ..TensorSpec::new(name, shape, optimizer) };
        let slices: Vec<_> = (0..spec.slice_count() as u64).map(|k| (first + k, k)).collect();
        let ids: Vec<_> = slices.iter().map(|(id, k)| (SliceId(*id), *k as usize)).collect();
        self.shard.create(&Arc::new(spec.clone()), 1, &ids).unwrap();
        let (stage, ids) = (Stage::Open, slices.iter().map(|(id, _)| *id).collect::<Vec<_>>());
        let holding = Holding { spec: spec.clone(), group: 1, shards: vec![0; ids.len()], slices: ids };
        self.journal.note(&Event::Reserved(first, Reservation { spec, group: 1, slices, stage }));
        self.journal.note(&Event::Sealed(first));
        self.journal.note(&Event::Entered(first, holding));
    }

    pub(crate) fn session(&self, client: u64) {
        self.journal.note(&Event::SessionBegan(client));
    }

    /// Pushes a gradient with this value in every element, or in the first rows.
    pub(crate) fn push(&self, slice: u64, client: u64, sequence: u64, value: f32, rows: Option<u32>) {
        self.change(slice, client, sequence, value, rows, Action::Gradient);
    }

    pub(crate) fn change(
        &self,
        id: u64,
        client: u64,
        sequence: u64,
        value: f32,
        rows: Option<u32>,
        action: Action,
    ) {
        let slice = self.shard.slice(SliceId(id)).unwrap();
        let n = rows.map_or(slice.len(), |rows| rows as usize);
        let rows = rows.map(|rows| (0..rows).flat_map(u32::to_le_bytes).collect::<Vec<_>>());
        let body: Vec<u8> = (0..n).flat_map(|i| (value + i as f32 / 64.0).to_le_bytes()).collect();
        let push = Push {
            action,
            indices: rows.as_deref().map(Indices::new),
            ..Push::gradient(SliceId(id), Identity { client, sequence }, n as u64, CodecId::Float32, &body)
        };
        self.shard.push_to(&slice, &push, || panic!("nothing is held")).unwrap().unwrap();
    }

    /// All slices, as values.
    pub(crate) fn state(&self) -> BTreeMap<u64, Whole> {
        let catalog = self.journal.catalog();
        catalog.slices().map(|(id, ..)| (id, self.whole(id))).collect()
    }

    pub(crate) fn whole(&self, id: u64) -> Whole {
        let image = self.shard.slice(SliceId(id)).unwrap().image().unwrap();
        (image.standing, image.values.as_ref().to_vec(), image.state.as_ref().to_vec())
    }

    pub(crate) fn sync(&self) {
        self.journal.sync(self.journal.position()).unwrap();
    }
}

pub(crate) type Opened = fastps_core::error::Result<World>;

pub(crate) type Whole = (Standing, Vec<u8>, Vec<u8>);

pub(crate) fn sgd() -> Optimizer {
    Optimizer::Sgd(Sgd { lr: 1.0, ..Sgd::default() })
}

pub(crate) fn adam() -> Optimizer {
    Optimizer::Adam(Adam::default())
}

/// Two snapshots, each followed by a segment; the last segment is open.
pub(crate) struct Story {
    pub(crate) files: BTreeMap<PathBuf, Vec<u8>>,
    pub(crate) end: BTreeMap<u64, Whole>,
    /// Every version that each slice ever had.
    pub(crate) history: HashMap<(u64, u64), (Vec<u8>, Vec<u8>)>,
}

impl Story {
    pub(crate) fn copy(&self) -> Folder {
        let folder = Folder::new();
        self.copy_to(&folder.0);
        folder
    }

    pub(crate) fn copy_to(&self, folder: &Path) {
        for (name, bytes) in &self.files {
            let path = folder.join(name);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, bytes).unwrap();
        }
    }

    /// A data directory with one shard.
    pub(crate) fn data_dir(&self) -> Folder {
        let folder = Folder::new();
        self.copy_to(&shard_folder(&folder.0, 0));
        folder
    }

    pub(crate) fn files(&self) -> Vec<PathBuf> {
        self.files.keys().cloned().collect()
    }

    /// The newest file whose name ends like this.
    pub(crate) fn newest(&self, ends: &str) -> PathBuf {
        self.files().into_iter().rfind(|name| name.to_str().unwrap().contains(ends)).unwrap()
    }

    /// Checks that the state is one that existed, and returns whether it is the final one.
    pub(crate) fn check(&self, world: &World) -> bool {
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

pub(crate) static STORY: LazyLock<Story> = LazyLock::new(|| {
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

pub(crate) fn all_files(folder: &Path) -> BTreeMap<PathBuf, Vec<u8>> {
    let mut files = BTreeMap::new();
    collect(folder, Path::new(""), &mut files);
    files
}
