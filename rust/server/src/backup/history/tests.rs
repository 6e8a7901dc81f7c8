//! Histories of a real journal, copied to stores in memory and rewound from there.

use super::copy::copy_kept;
use super::fetch::fetch_past;
use crate::backup::bucket::{Bucket, block};
use crate::backup::upload::{Keep, upload};
use fastps_core::codec::CodecId;
use fastps_core::error::{Error, Kind, Result};
use fastps_core::frame::{Identity, Push};
use fastps_core::isa::Isa;
use fastps_core::optim::{Optimizer, Sgd};
use fastps_core::shard::{Shard, ShardConfig};
use fastps_core::tensor::{SliceId, TensorSpec};
use fastps_durable::copy::{CopiedSnapshot, Held, Sealed};
use fastps_durable::{
    Event, Holding, Journal, Moment, Reading, Reservation, Settings, Stage, past, restore, shard_folder,
};
use futures_util::TryStreamExt;
use object_store::memory::InMemory;
use object_store::path::Path;
use object_store::{ObjectStore, ObjectStoreExt, PutPayload};
use std::path::{Path as FilePath, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

const ID: SliceId = SliceId(7);
const KEEP: Keep = Keep { count: 2, younger: Duration::ZERO };

struct Folder(PathBuf);

impl Folder {
    fn new() -> Self {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        let (process, next) = (std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed));
        let path = std::env::temp_dir().join(format!("fastps history {process}-{next}"));
        let _ = std::fs::remove_dir_all(&path);
        std::fs::create_dir_all(&path).unwrap();
        Self(path)
    }

    fn data(&self) -> PathBuf {
        self.0.join("data")
    }

    /// An empty folder.
    fn empty(&self, name: &str) -> PathBuf {
        let path = self.0.join(name);
        let _ = std::fs::remove_dir_all(&path);
        std::fs::create_dir(&path).unwrap();
        path
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

fn in_memory() -> Bucket {
    Bucket::of(Arc::new(InMemory::new()))
}

/// A shard with one tensor of one number. Push k subtracts k.
struct Server {
    journal: Arc<Journal>,
    shard: Shard,
    directory: PathBuf,
    pushed: u64,
}

impl Server {
    fn start(data: &FilePath, history: u64) -> Self {
        let (directory, keep_for) = (shard_folder(data, 0), Duration::ZERO);
        let path = directory.clone();
        let settings = Settings { path, shard: 0, shards: 1, keep: 2, keep_for, history, accept_loss: false };
        let journal = Journal::open(settings).unwrap();
        let config = ShardConfig::new(0, 1 << 30, Isa::get().unwrap());
        let shard = Shard::new(ShardConfig { sink: Some(journal.clone()), ..config });
        journal.recover(&shard).unwrap();
        let pushed = shard.slice(ID).map_or(0, |slice| slice.version(0).0);
        let server = Self { journal, shard, directory, pushed };
        if server.pushed == 0 {
            server.register();
        }
        server
    }

    fn register(&self) {
        let optimizer = Optimizer::Sgd(Sgd { lr: 1.0, ..Sgd::default() });
        let spec = TensorSpec::new("w", [1], optimizer);
        self.shard.create(&Arc::new(spec.clone()), 1, &[(ID, 0)]).unwrap();
        let (group, stage, slices) = (1, Stage::Open, vec![(ID.0, 0)]);
        self.journal.note(&Event::Reserved(1, Reservation { spec: spec.clone(), group, slices, stage }));
        self.journal.note(&Event::Sealed(1));
        self.journal.note(&Event::SessionBegan(1));
        let holding = Holding { spec, group, slices: vec![ID.0], shards: vec![0] };
        self.journal.note(&Event::Entered(1, holding));
    }

    fn push(&mut self, times: u64) {
        for _ in 0..times {
            self.pushed += 1;
            let body = (self.pushed as f32).to_le_bytes();
            let identity = Identity { client: 1, sequence: self.pushed };
            let slice = self.shard.slice(ID).unwrap();
            let push = Push::gradient(ID, identity, 1, CodecId::Float32, &body);
            self.shard.push_to(&slice, &push, || panic!("nothing is held")).unwrap().unwrap();
        }
    }

    /// Takes a snapshot and copies it.
    fn snapshot(&self, bucket: &Bucket) {
        self.journal.snapshot(&self.shard).unwrap();
        let held = Held::newest(&self.directory).unwrap().unwrap();
        block(upload(bucket, &self.directory, held, KEEP, 0)).unwrap();
    }

    fn copy(&self, bucket: &Bucket) -> Result<()> {
        let kept = self.journal.kept_history()?.unwrap();
        block(copy_kept(bucket, 0, &kept, &self.directory)).map(drop)
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.journal.close();
    }
}

/// The value after this many pushes.
fn value(version: u64) -> f32 {
    -((1..=version).sum::<u64>() as f32)
}

fn value_at(dir: &FilePath, moment: Moment) -> Result<f32> {
    let out = Folder::new();
    restore(dir, &out.data(), 1, Reading::At(moment))?;
    let server = Server::start(&out.data(), 0);
    let image = server.shard.slice(ID)?.image()?;
    Ok(f32::from_le_bytes(image.values.as_ref().try_into().unwrap()))
}

fn value_in(dir: &FilePath, version: u64) -> Result<f32> {
    value_at(dir, Moment::Version(version))
}

/// The value of a version, from the bucket alone.
fn rewound(bucket: &Bucket, folder: &Folder, version: u64) -> Result<f32> {
    let past = folder.empty("past");
    fetch_past(bucket, &past, Some(&Moment::Version(version)))?;
    value_in(&past, version)
}

fn objects(bucket: &Bucket) -> Vec<(Path, Vec<u8>)> {
    block(async {
        let mut found = Vec::new();
        let listed: Vec<_> = bucket.store.list(Some(&bucket.prefix)).try_collect().await.unwrap();
        for object in listed {
            let bytes = bucket.store.get(&object.location).await.unwrap().bytes().await.unwrap();
            found.push((object.location, bytes.to_vec()));
        }
        found.sort();
        Ok(found)
    })
    .unwrap()
}

fn put(bucket: &Bucket, place: &Path, bytes: &[u8]) {
    block(async { Ok(bucket.store.put(place, PutPayload::from(bytes.to_vec())).await.unwrap()) }).unwrap();
}

fn delete(bucket: &Bucket, place: &Path) {
    block(async {
        bucket.store.delete(place).await.unwrap();
        Ok(())
    })
    .unwrap();
}

fn of_history(objects: &[(Path, Vec<u8>)]) -> Vec<&(Path, Vec<u8>)> {
    objects.iter().filter(|(place, _)| place.as_ref().contains("/history-0/")).collect()
}

/// A server whose history has several snapshots and segments, all of them copied.
fn copied(folder: &Folder, bucket: &Bucket) -> Server {
    let mut server = Server::start(&folder.data(), 1 << 30);
    for _ in 0..6 {
        // Enough log for a snapshot that thinning leaves.
        server.push(400);
        server.snapshot(bucket);
        server.copy(bucket).unwrap();
    }
    server
}

#[test]
fn a_bucket_rewinds_as_its_directory_does() {
    let (folder, bucket) = (Folder::new(), in_memory());
    let mut server = copied(&folder, &bucket);
    let names: Vec<_> = objects(&bucket).into_iter().map(|(place, _)| place).collect();
    let name = |place: &Path| place.filename().map(str::to_owned).unwrap();
    let segments = names.iter().filter(|place| Sealed::parse(&name(place)).is_some()).count();
    assert_eq!(segments, 6, "{names:?}");
    let manifests = names.iter().filter(|place| {
        let parts: Vec<_> = place.parts().collect();
        CopiedSnapshot::parse(parts[parts.len() - 2].as_ref()).is_some() && name(place) == "MANIFEST"
    });
    assert!((1..5).contains(&manifests.count()), "{names:?}");
    for version in [1, 2, 399, 400, 401, 1000, 1999, 2399, 2400] {
        assert_eq!(rewound(&bucket, &folder, version).unwrap(), value(version), "{version}");
        assert_eq!(value_in(&folder.data(), version).unwrap(), value(version), "{version}");
    }
    // The log since the newest snapshot is not there.
    server.push(3);
    let error = rewound(&bucket, &folder, 2401).unwrap_err();
    assert!(error.kind == Kind::Config && error.message.contains("after the last change"), "{error}");
    assert_eq!(value_in(&folder.data(), 2401).unwrap(), value(2401));
    // All changes, with the lists of the snapshots alone.
    let all = folder.empty("all");
    fetch_past(&bucket, &all, None).unwrap();
    let mut versions = Vec::new();
    past(&all, |change| versions.push(change.version)).unwrap();
    assert_eq!(versions, (1..=2400).collect::<Vec<_>>());
    // Such a folder is completed for one version after the other.
    for version in [2400, 3, 1300] {
        fetch_past(&bucket, &all, Some(&Moment::Version(version))).unwrap();
        assert_eq!(value_in(&all, version).unwrap(), value(version));
    }
    let (push, past) = (Moment::Pushes([(1, 700)].into()), folder.empty("past"));
    fetch_past(&bucket, &past, Some(&push)).unwrap();
    assert_eq!(value_at(&past, push).unwrap(), value(700));
}

#[test]
fn a_rewind_reads_one_snapshot_and_the_log_after_it() {
    let (folder, bucket) = (Folder::new(), in_memory());
    let _server = copied(&folder, &bucket);
    let past = folder.empty("past");
    fetch_past(&bucket, &past, Some(&Moment::Version(2399))).unwrap();
    let mut logs = Vec::new();
    let mut whole = 0;
    for entry in std::fs::read_dir(shard_folder(&past, 0)).unwrap() {
        let entry = entry.unwrap();
        let name = entry.file_name().into_string().unwrap();
        logs.extend(name.strip_prefix("log-").map(|number| number.parse::<u64>().unwrap()));
        whole += u64::from(entry.path().join("whole").exists());
    }
    logs.sort_unstable();
    assert!(whole == 1 && logs[0] > 1, "{logs:?}");
}

#[test]
fn copying_goes_on_where_it_was_killed() {
    let (folder, bucket) = (Folder::new(), in_memory());
    let server = copied(&folder, &bucket);
    let all = objects(&bucket);
    let mut order = of_history(&all);
    // In the order in which they are written: segments, and the files of a snapshot with its manifest last.
    order.sort_by_key(|(place, _)| {
        let is_file = place.parts().count() > Path::from("some/prefix/history-0/id/log").parts().count();
        (is_file, place.filename() == Some("MANIFEST"), place.to_string())
    });
    for written in 0..=order.len() {
        let left = in_memory();
        let others = all.iter().filter(|one| !order.contains(one));
        for (place, bytes) in others.chain(order[..written].iter().copied()) {
            put(&left, place, bytes);
        }
        // What is there is read, or nothing is.
        match rewound(&left, &folder, 300) {
            Ok(found) => assert_eq!(found, value(300), "{written}"),
            Err(error) => assert!(error.message.contains("has no history yet"), "{written}: {error}"),
        }
        server.copy(&left).unwrap();
        assert_eq!(objects(&left), all, "{written}");
    }
}

#[test]
fn damaged_missing_and_mixed_objects_are_refused_by_name() {
    let (folder, bucket) = (Folder::new(), in_memory());
    let server = copied(&folder, &bucket);
    let all = objects(&bucket);
    let other = in_memory();
    let other_folder = Folder::new();
    let _other = copied(&other_folder, &other);
    let everything = |bucket: &Bucket| -> Result<()> {
        let past = folder.empty("past");
        fetch_past(bucket, &past, None)?;
        fetch_past(bucket, &past, Some(&Moment::Version(2399)))
    };
    everything(&bucket).unwrap();
    let refused = |error: &Error, name: &str| {
        assert!(error.to_string().contains(name), "{name}: {error}");
    };
    let mut last_segment = String::new();
    for (place, _) in of_history(&all) {
        let name = place.filename().unwrap();
        if name.starts_with("log-") {
            last_segment = last_segment.max(name.to_owned());
        }
    }
    for (place, bytes) in of_history(&all) {
        let name = place.filename().unwrap();
        let mut damaged = bytes.clone();
        let middle = damaged.len() / 2;
        if middle == 0 {
            continue;
        }
        damaged[middle] ^= 1;
        put(&bucket, place, &damaged);
        let found = everything(&bucket);
        // The values of the other snapshots are not read.
        let is_values = name.ends_with(".safetensors");
        match found {
            Err(error) => refused(&error, if name == "MANIFEST" { "MANIFEST" } else { name }),
            Ok(()) => assert!(is_values, "{name}"),
        }
        put(&bucket, place, bytes);
        delete(&bucket, place);
        match everything(&bucket) {
            // Nothing tells that the log went on.
            Err(error) if name == last_segment => refused(&error, "after the last change"),
            Err(error) if name.starts_with("log-") => refused(&error, &name["log-".len()..][..8]),
            Err(error) => refused(&error, name),
            // Without its manifest a snapshot is none, and without its first segments a log begins later.
            Ok(()) => {
                assert!(is_values || name == "MANIFEST" || name.starts_with("log-00000001-"), "{name}");
            }
        }
        put(&bucket, place, bytes);
    }
    everything(&bucket).unwrap();
    // A segment of another cluster under a name of this one.
    let theirs = objects(&other);
    let segment = |objects: &[(Path, Vec<u8>)], number: &str| {
        let one = objects.iter().find(|(place, _)| place.filename().unwrap().starts_with(number));
        one.cloned().unwrap()
    };
    let (place, own) = segment(&all, "log-00000002");
    let (other_place, bytes) = segment(&theirs, "log-00000002");
    delete(&bucket, &place);
    let home = place.prefix_match(&bucket.prefix).unwrap().collect::<Vec<_>>();
    let home = home[..home.len() - 1].iter().fold(bucket.prefix.clone(), |at, part| at.join(part.as_ref()));
    let foreign = home.clone().join(other_place.filename().unwrap());
    put(&bucket, &foreign, &bytes);
    let error = everything(&bucket).unwrap_err();
    assert!(error.message.contains("is misplaced"), "{error}");
    refused(&error, other_place.filename().unwrap());
    // Both: nobody knows which one is right.
    put(&bucket, &place, &own);
    let error = everything(&bucket).unwrap_err();
    assert!(error.message.contains("two different files of one number"), "{error}");
    refused(&error, place.filename().unwrap());
    refused(&server.copy(&bucket).unwrap_err(), "two different files");
    delete(&bucket, &foreign);
    everything(&bucket).unwrap();
}

#[test]
fn the_oldest_history_goes_and_nothing_else() {
    let (folder, bucket) = (Folder::new(), in_memory());
    let mut server = copied(&folder, &bucket);
    let others = |bucket: &Bucket| -> Vec<_> {
        let all = objects(bucket);
        let own: Vec<_> = of_history(&all).into_iter().cloned().collect();
        all.into_iter().filter(|one| !own.contains(one)).collect()
    };
    // A stranger's file, and a snapshot that a killed server has not completed.
    let home = bucket.history(0, &server.journal.kept_history().unwrap().unwrap().directory);
    let (stranger, abandoned) = (
        home.clone().join("notes.txt"),
        home.clone().join("generation-00000002-00000003-00000001").join("slices"),
    );
    put(&bucket, &stranger, b"mine");
    put(&bucket, &abandoned, b"half");
    let before = others(&bucket);
    let bytes = |bucket: &Bucket| -> u64 {
        of_history(&objects(bucket)).iter().map(|(_, bytes)| bytes.len() as u64).sum()
    };
    let whole = bytes(&bucket);
    let mut kept = server.journal.kept_history().unwrap().unwrap();
    // The directory keeps all: nothing goes, however little room there is.
    kept.most_bytes = 1;
    block(copy_kept(&bucket, 0, &kept, &server.directory)).unwrap();
    assert!(bytes(&bucket) >= whole - 8 && others(&bucket) == before);
    let names: Vec<_> = objects(&bucket).into_iter().map(|(place, _)| place).collect();
    assert!(names.contains(&stranger) && !names.contains(&abandoned), "{names:?}");
    // A directory that keeps only its newest snapshots, as after a take-over.
    kept.begin = 6;
    for (most_bytes, first) in [(u64::MAX, 1), (whole / 2, 2), (1, 2)] {
        kept.most_bytes = most_bytes;
        block(copy_kept(&bucket, 0, &kept, &server.directory)).unwrap();
        assert!(bytes(&bucket) <= most_bytes.max(whole), "{most_bytes}");
        assert_eq!(others(&bucket), before);
        let all = folder.empty("all");
        fetch_past(&bucket, &all, None).unwrap();
        let mut versions = Vec::new();
        let found = past(&all, |change| versions.push(change.version)).unwrap();
        assert_eq!((versions[0] == 1, *versions.last().unwrap()), (first == 1, 2400), "{most_bytes}");
        let oldest = found.shards[0].versions.0;
        assert_eq!(rewound(&bucket, &folder, 2399).unwrap(), value(2399));
        if oldest > 0 {
            assert_eq!(rewound(&bucket, &folder, oldest).unwrap(), value(oldest));
            let error = rewound(&bucket, &folder, oldest - 1).unwrap_err();
            assert!(error.message.contains("before the history"), "{error}");
        }
    }
    // It goes on from there.
    server.push(10);
    server.snapshot(&bucket);
    server.copy(&bucket).unwrap();
    assert_eq!(rewound(&bucket, &folder, 2405).unwrap(), value(2405));
}

#[test]
fn a_directory_that_is_gone_leaves_its_history() {
    let (folder, bucket) = (Folder::new(), in_memory());
    drop(copied(&folder, &bucket));
    std::fs::remove_dir_all(folder.data()).unwrap();
    for version in [1, 777, 2399] {
        assert_eq!(rewound(&bucket, &folder, version).unwrap(), value(version));
    }
    let empty = in_memory();
    let error = fetch_past(&empty, &folder.empty("past"), None).unwrap_err();
    assert!(error.kind == Kind::Config && error.message.contains("no complete copy"), "{error}");
}
