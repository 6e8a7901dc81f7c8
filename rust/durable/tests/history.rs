//! A directory has one server, even if the directory is removed and recreated under it; and the files of two
//! servers are never taken for those of one.
#![allow(missing_docs, clippy::unwrap_used, clippy::panic)]

use fastps_core::codec::CodecId;
use fastps_core::error::{Kind, Result};
use fastps_core::frame::{Identity, Push};
use fastps_core::isa::Isa;
use fastps_core::optim::{Optimizer, Sgd};
use fastps_core::shard::{Shard, ShardConfig};
use fastps_core::tensor::{SliceId, TensorSpec};
use fastps_durable::{Cut, Event, Journal, Report, Reservation, Settings, Stage, checkpoint, shard_folder};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

const ID: SliceId = SliceId(7);

/// A data directory that is removed on drop.
struct Folder(PathBuf);

impl Folder {
    fn new() -> Self {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        let (process, next) = (std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed));
        let path = std::env::temp_dir().join(format!("fastps-history-{process}-{next}"));
        std::fs::create_dir_all(&path).unwrap();
        Self(path)
    }

    fn shard(&self) -> PathBuf {
        shard_folder(&self.0, 0)
    }

    /// Recreates the directory, as an operator would.
    fn make_again(&self) {
        std::fs::remove_dir_all(self.shard()).unwrap();
        std::fs::create_dir(self.shard()).unwrap();
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// A shard with one slice. Each push adds 1.
struct World {
    journal: Arc<Journal>,
    shard: Shard,
    report: Report,
}

impl World {
    fn open(path: &Path) -> Result<Self> {
        Self::with(path, false)
    }

    fn with(path: &Path, accept_loss: bool) -> Result<Self> {
        let (path, keep_for) = (path.to_owned(), Duration::ZERO);
        let settings = Settings { path, shard: 0, shards: 1, keep: 2, keep_for, history: 0, accept_loss };
        let journal = Journal::open(settings)?;
        let config = ShardConfig::new(0, 1 << 30, Isa::get()?);
        let shard = Shard::new(ShardConfig { sink: Some(journal.clone()), ..config });
        let report = journal.recover(&shard)?;
        let world = Self { journal, shard, report };
        if world.shard.slice(ID).is_err() {
            world.register();
        }
        Ok(world)
    }

    fn register(&self) {
        let optimizer = Optimizer::Sgd(Sgd { lr: 1.0, ..Sgd::default() });
        let spec = TensorSpec::new("w", [1], optimizer);
        self.shard.create(&Arc::new(spec.clone()), 1, &[(ID, 0)]).unwrap();
        let slices = vec![(ID.0, 0)];
        self.journal.note(&Event::Reserved(1, Reservation { spec, group: 1, slices, stage: Stage::Open }));
        self.journal.note(&Event::Committed(1));
        self.journal.note(&Event::SessionBegan(1));
    }

    /// Pushes, and waits until the push is durable.
    fn push(&self) -> Result<()> {
        self.push_many(1)
    }

    fn push_many(&self, pushes: usize) -> Result<()> {
        (0..pushes).for_each(|_| self.apply());
        self.journal.sync(self.journal.position())
    }

    fn apply(&self) {
        let slice = self.shard.slice(ID).unwrap();
        let sequence = 1 + self.value() as u64;
        let (identity, body) = (Identity { client: 1, sequence }, (-1.0_f32).to_le_bytes());
        let push = Push::gradient(ID, identity, 1, CodecId::Float32, &body);
        self.shard.push_to(&slice, &push, || panic!("nothing is held")).unwrap().unwrap();
    }

    fn snapshot(&self) -> Result<()> {
        self.journal.snapshot(&self.shard).map(drop)
    }

    /// The number of pushes in the slice.
    fn value(&self) -> f32 {
        let image = self.shard.slice(ID).unwrap().image().unwrap();
        f32::from_le_bytes(image.values.as_ref().try_into().unwrap())
    }
}

/// The names of a shard's files.
fn names(path: &Path) -> Vec<String> {
    let entries = std::fs::read_dir(path).unwrap().map(|entry| entry.unwrap().file_name());
    let mut names: Vec<_> = entries.map(|name| name.into_string().unwrap()).collect();
    names.sort();
    names
}

#[test]
fn a_folder_recreated_under_a_server_still_belongs_to_it() {
    let folder = Folder::new();
    let world = World::open(&folder.shard()).unwrap();
    world.push().unwrap();
    folder.make_again();
    assert!(world.push().is_err(), "what has no folder is not durable");
    let error = world.journal.check().unwrap_err();
    assert!(error.kind == Kind::Unavailable && error.message.contains("was removed"), "{error}");
    world.snapshot().unwrap();
    world.journal.check().unwrap();
    let error = World::open(&folder.shard()).err().unwrap();
    assert!(error.message.contains("another server"), "{error}");
    world.push().unwrap();
    drop(world);
    let again = World::open(&folder.shard()).unwrap();
    assert_eq!((again.value(), again.report.notes), (3.0, Vec::new()));
}

#[test]
fn a_folder_moved_away_has_what_was_durable_and_nothing_later() {
    let folder = Folder::new();
    let moved = folder.0.join("moved");
    let world = World::open(&folder.shard()).unwrap();
    world.push().unwrap();
    std::fs::rename(folder.shard(), &moved).unwrap();
    assert!(world.push().is_err(), "a start would look for it elsewhere");
    std::fs::rename(&moved, folder.shard()).unwrap();
    world.snapshot().unwrap();
    world.push().unwrap();
    drop(world);
    assert_eq!(World::open(&folder.shard()).unwrap().value(), 3.0);
}

#[test]
fn in_a_recreated_folder_nothing_is_durable_before_the_snapshot() {
    let folder = Folder::new();
    let moved = folder.0.join("moved");
    let world = World::open(&folder.shard()).unwrap();
    world.push().unwrap();
    // The log is idle, so no write or sync notices the new directory.
    std::fs::rename(folder.shard(), &moved).unwrap();
    std::fs::create_dir(folder.shard()).unwrap();
    let begun = || {
        // The log is in its new segment, and the snapshot is not complete.
        let error = world.journal.sync(world.journal.position()).unwrap_err();
        assert!(error.message.contains("gap"), "{error}");
        Ok(())
    };
    let cut = Cut { id: 1, group: "default".into() };
    world.journal.snapshot_of_cut(&world.shard, cut, &begun).unwrap();
    world.push().unwrap();
    drop(world);
    let again = World::open(&folder.shard()).unwrap();
    assert_eq!((again.value(), again.report.notes), (2.0, Vec::new()));
    assert_eq!(World::open(&moved).unwrap().value(), 1.0);
}

#[test]
fn a_server_does_not_continue_beside_another_one() {
    let folder = Folder::new();
    let first = World::open(&folder.shard()).unwrap();
    first.push().unwrap();
    first.snapshot().unwrap();
    std::fs::remove_dir_all(folder.shard()).unwrap();
    let second = World::open(&folder.shard()).unwrap();
    for _ in 0..5 {
        second.push().unwrap();
    }
    // While the other server runs, and after it has left its files.
    let error = first.snapshot().unwrap_err();
    assert!(error.kind == Kind::Config && error.message.contains("another server"), "{error}");
    assert!(first.push().is_err());
    second.push().unwrap();
    drop(second);
    let before = names(&folder.shard());
    let error = first.snapshot().unwrap_err();
    assert!(error.message.contains("incarnation") && error.message.contains("log-00000001"), "{error}");
    let error = first.journal.check().unwrap_err();
    assert!(error.kind == Kind::Unavailable && error.message.contains("incarnation"), "{error}");
    // It locks no other server out, and removes nothing.
    let again = World::open(&folder.shard()).unwrap();
    assert_eq!((again.value(), again.report.notes.len(), again.report.lost.len()), (6.0, 0, 0));
    drop(again);
    assert!(before.iter().all(|name| names(&folder.shard()).contains(name)));
    // Once the foreign files are gone, everything it holds becomes durable.
    folder.make_again();
    first.snapshot().unwrap();
    first.push().unwrap();
    drop(first);
    assert_eq!(World::open(&folder.shard()).unwrap().value(), 3.0);
}

#[test]
fn a_server_that_lost_its_lock_leaves_the_log_to_the_new_owner() {
    let folder = Folder::new();
    let first = World::open(&folder.shard()).unwrap();
    // Enough that the file has zeros ahead, which a server truncates when it exits.
    for _ in 0..3 {
        first.push_many(400).unwrap();
    }
    std::fs::remove_file(folder.shard().join("lock")).unwrap();
    let second = World::open(&folder.shard()).unwrap();
    assert_eq!(second.value(), 1200.0);
    assert!(first.push().is_err() && first.snapshot().is_err());
    second.push().unwrap();
    drop((first, second));
    let third = World::open(&folder.shard()).unwrap();
    assert_eq!((third.value(), &third.report.notes), (1201.0, &Vec::new()));
}

/// Files of two servers that wrote at once: `old` in the removed directory, and `new` in the recreated one.
fn mixed() -> Folder {
    let (old, new) = (Folder::new(), Folder::new());
    for (folder, snapshots) in [(&old, 4), (&new, 0)] {
        let world = World::open(&folder.shard()).unwrap();
        for _ in 0..snapshots {
            world.snapshot().unwrap();
        }
        for _ in 0..10 * (1 + snapshots) {
            world.push().unwrap();
        }
    }
    let mixed = Folder::new();
    std::fs::create_dir(mixed.shard()).unwrap();
    for folder in [&old, &new] {
        for name in names(&folder.shard()) {
            std::fs::rename(folder.shard().join(&name), mixed.shard().join(&name)).unwrap();
        }
    }
    mixed
}

#[test]
fn two_histories_are_refused_without_accept_loss() {
    let folder = mixed();
    let before = names(&folder.shard());
    let error = World::open(&folder.shard()).err().unwrap();
    assert!(error.kind == Kind::Config && error.message.contains("two histories"), "{error}");
    for part in ["log-00000001", "log-00000004", "--accept-loss"] {
        assert!(error.message.contains(part), "{part}: {error}");
    }
    assert_eq!(names(&folder.shard()), before);
    let damages = checkpoint::verify(&folder.0).unwrap().remove(0).damages;
    assert!(damages.len() == 1 && damages[0].contains("two histories"), "{damages:?}");
    let world = World::with(&folder.shard(), true).unwrap();
    assert_eq!(world.value(), 50.0);
    let lost = &world.report.lost;
    assert!(lost.len() == 1 && lost[0].contains("log-00000001") && lost[0].contains("10 pushes"), "{lost:?}");
    assert!(names(&folder.shard()).contains(&"damaged-log-00000001".to_owned()));
    drop(world);
    let again = World::open(&folder.shard()).unwrap();
    assert_eq!((again.value(), again.report.lost.len()), (50.0, 0));
}

#[test]
fn servers_in_turn_form_one_history() {
    let folder = Folder::new();
    for k in 0..6 {
        let world = World::open(&folder.shard()).unwrap();
        assert_eq!((world.value(), &world.report.notes), (k as f32, &Vec::new()));
        world.push().unwrap();
        if k % 3 == 1 {
            world.snapshot().unwrap();
        }
    }
    assert_eq!(checkpoint::verify(&folder.0).unwrap().remove(0).damages, [""; 0]);
}

/// Files of three servers in turn, one segment with one push each; one segment's first frame is damaged.
fn with_damaged_beginning(segment: &str) -> Folder {
    let folder = Folder::new();
    for _ in 0..3 {
        World::open(&folder.shard()).unwrap().push().unwrap();
    }
    let path = folder.shard().join(segment);
    let mut bytes = std::fs::read(&path).unwrap();
    bytes[20] ^= 1;
    std::fs::write(&path, bytes).unwrap();
    folder
}

#[test]
fn a_segment_whose_first_frame_is_damaged_is_not_a_second_history() {
    for (left, segment) in ["log-00000001", "log-00000002", "log-00000003"].into_iter().enumerate() {
        let folder = with_damaged_beginning(segment);
        let is_reported = |why: &str| why.contains(&format!("{segment} is damaged: its first frame"));
        let error = World::open(&folder.shard()).err().unwrap();
        assert!(is_reported(&error.message) && !error.message.contains("two histories"), "{error}");
        let damages = checkpoint::verify(&folder.0).unwrap().remove(0).damages;
        assert!(damages.len() == 1 && is_reported(&damages[0]), "{damages:?}");
        let world = World::with(&folder.shard(), true).unwrap();
        let (lost, pushes) = (&world.report.lost, format!("including {} readable pushes", 3 - left));
        assert!(lost.len() == 1 && is_reported(&lost[0]) && lost[0].contains(&pushes), "{lost:?}");
        drop(world);
        let again = World::open(&folder.shard()).unwrap();
        assert_eq!((again.value(), again.report.lost.len()), (left as f32, 0));
    }
}

#[test]
fn an_inapplicable_push_is_counted_with_the_later_ones() {
    let folder = Folder::new();
    let world = World::open(&folder.shard()).unwrap();
    world.push().unwrap();
    // The log says that the slice was dropped, yet contains pushes to it.
    world.journal.note(&Event::Dropped(vec![ID.0]));
    for _ in 0..3 {
        world.push().unwrap();
    }
    drop(world);
    let error = World::open(&folder.shard()).err().unwrap();
    assert!(error.kind == Kind::Config && error.message.contains("cannot be applied"), "{error}");
    let lost = World::with(&folder.shard(), true).unwrap().report.lost;
    assert!(lost.len() == 1 && lost[0].contains("cannot be applied"), "{lost:?}");
    assert!(lost[0].contains("including 3 readable pushes"), "{lost:?}");
}

#[test]
fn snapshots_for_a_long_log_replace_only_each_other() {
    let folder = Folder::new();
    let numbers = |world: &World| -> Vec<u64> {
        let listed = Journal::generations(&folder.shard()).unwrap().into_iter();
        assert!(world.journal.check().is_ok());
        listed.map(|generation| generation.unwrap().summary().generation).collect()
    };
    let world = World::open(&folder.shard()).unwrap();
    world.snapshot().unwrap();
    for newest in 2..=5 {
        world.push().unwrap();
        world.journal.shorten(&world.shard).unwrap();
        assert_eq!(numbers(&world), [newest, 1]);
    }
    // Two other snapshots displace it, so the next one has none to replace.
    world.snapshot().unwrap();
    world.snapshot().unwrap();
    assert_eq!(numbers(&world), [7, 6]);
    world.push().unwrap();
    world.journal.shorten(&world.shard).unwrap();
    assert_eq!(numbers(&world), [8, 7]);
    drop(world);
    assert_eq!(World::open(&folder.shard()).unwrap().value(), 5.0);
}
