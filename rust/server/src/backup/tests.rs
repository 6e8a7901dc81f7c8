//! Real snapshots to and from stores in memory and in folders.

use super::bucket::{Bucket, LATEST, reason};
use super::fetch::{Which, fetch, list, verify};
use super::upload::{Keep, Uploaded, upload, upload_all};
use fastps_core::error::{Error, Kind, Result};
use fastps_core::isa::Isa;
use fastps_core::optim::{Optimizer, Sgd};
use fastps_core::shard::{Shard, ShardConfig};
use fastps_core::tensor::{SliceId, TensorSpec};
use fastps_durable::copy::{self, Held};
use fastps_durable::{Cut, Event, Holding, Journal, Reservation, Settings, Stage, checkpoint, shard_folder};
use futures_util::TryStreamExt;
use object_store::memory::InMemory;
use object_store::path::Path;
use object_store::throttle::{ThrottleConfig, ThrottledStore};
use object_store::{ObjectStore, ObjectStoreExt};
use std::path::{Path as FilePath, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

const SLICE: u64 = 258_048;
/// More than fit into one part of an upload.
const SLICES: u64 = 10;
const KEEP: Keep = Keep { count: 2, younger: Duration::ZERO };

/// A folder that is removed with its owner.
struct Folder(PathBuf);

impl Folder {
    fn new() -> Self {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        let (process, next) = (std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed));
        let path = std::env::temp_dir().join(format!("fastps bucket {process}-{next}"));
        let _ = std::fs::remove_dir_all(&path);
        std::fs::create_dir_all(&path).unwrap();
        Self(path)
    }

    fn url(&self) -> String {
        format!("file://{}", self.0.join("a bucket").display()).replace(' ', "%20")
    }

    fn data(&self) -> PathBuf {
        self.0.join("data")
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// A shard with one tensor of which it has the even or the odd slices, and its files.
struct Home {
    journal: Arc<Journal>,
    shard: Shard,
    path: PathBuf,
}

impl Home {
    fn open(data_dir: &FilePath, index: u32, shards: u32) -> Self {
        let path = shard_folder(data_dir, index);
        let (keep, keep_for, accept_loss) = (2, Duration::ZERO, false);
        let settings =
            Settings { path: path.clone(), shard: index, shards, keep, keep_for, history: 0, accept_loss };
        let journal = Journal::open(settings).unwrap();
        let config = ShardConfig::new(index, 1 << 30, Isa::get().unwrap());
        let shard = Shard::new(ShardConfig { sink: Some(journal.clone()), ..config });
        journal.recover(&shard).unwrap();
        Self { journal, shard, path }
    }

    fn new(data_dir: &FilePath, index: u32, shards: u32) -> Self {
        let home = Self::open(data_dir, index, shards);
        let optimizer = Optimizer::Sgd(Sgd { lr: 1.0, ..Sgd::default() });
        let spec = TensorSpec::new("w", [SLICES * SLICE], optimizer);
        let here = |k: &u64| k % u64::from(shards) == u64::from(index);
        let slices: Vec<_> = (0..SLICES).filter(here).map(|k| (k + 1, k)).collect();
        let ids: Vec<_> = slices.iter().map(|(id, k)| (SliceId(*id), *k as usize)).collect();
        home.shard.create(&Arc::new(spec.clone()), 1, &ids).unwrap();
        let (stage, group) = (Stage::Open, 1);
        home.journal.note(&Event::Reserved(1, Reservation { spec: spec.clone(), group, slices, stage }));
        home.journal.note(&Event::Sealed(1));
        if index == 0 {
            let (all, on) = (1..=SLICES, (0..SLICES).map(|k| (k % u64::from(shards)) as u32));
            let holding = Holding { spec, group, slices: all.collect(), shards: on.collect() };
            home.journal.note(&Event::Entered(1, holding));
        }
        home
    }

    fn snapshot(&self) -> u64 {
        self.journal.snapshot(&self.shard).unwrap().generation
    }

    fn snapshot_of_cut(&self, id: u64) -> u64 {
        let cut = Cut { id, group: "default".to_owned() };
        self.journal.snapshot_of_cut(&self.shard, cut, &|| Ok(())).unwrap().generation
    }

    fn close(self) {
        self.journal.close();
    }
}

fn block<T>(work: impl Future<Output = T>) -> T {
    tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap().block_on(work)
}

fn send(bucket: &Bucket, directory: &FilePath) -> Result<Uploaded> {
    block(upload(bucket, directory, Held::newest(directory)?.unwrap(), KEEP, 0))
}

fn names(bucket: &Bucket) -> Vec<String> {
    let mut names: Vec<String> = block(bucket.store.list(Some(&bucket.prefix)).try_collect::<Vec<_>>())
        .unwrap()
        .into_iter()
        .map(|object| bucket.name(&object.location))
        .filter(|name| !name.ends_with("latest.lock"))
        .collect();
    names.sort();
    names
}

fn numbers(bucket: &Bucket) -> Vec<(u64, bool)> {
    list(bucket).unwrap().iter().map(|stored| (stored.number, stored.latest)).collect()
}

fn refused(result: Result<impl std::fmt::Debug>, words: &str) -> Error {
    let error = result.unwrap_err();
    assert!(error.to_string().contains(words), "{error}");
    error
}

fn copy_folder(from: &FilePath, to: &FilePath) {
    std::fs::create_dir_all(to).unwrap();
    for entry in std::fs::read_dir(from).unwrap() {
        let (path, to) = {
            let entry = entry.unwrap();
            (entry.path(), to.join(entry.file_name()))
        };
        if path.is_dir() {
            copy_folder(&path, &to);
        } else {
            std::fs::copy(&path, &to).unwrap();
        }
    }
}

fn in_memory() -> Bucket {
    Bucket::of(Arc::new(InMemory::new()))
}

/// Uploads, prunes and fetches: same bytes, and a directory that starts.
fn there_and_back(bucket: &Bucket, folder: &Folder) {
    let homes = [0, 1].map(|index| Home::new(&folder.data(), index, 2));
    for round in 1..=3 {
        for home in &homes {
            assert_eq!(home.snapshot(), round);
            let done = send(bucket, &home.path).unwrap();
            assert_eq!((done.number, done.was_there, done.left.clone()), (round, false, None));
            assert!(send(bucket, &home.path).unwrap().was_there);
        }
    }
    assert_eq!(numbers(bucket), [(3, true), (2, false), (3, true), (2, false)]);
    assert_eq!(names(bucket).len(), 2 * (1 + 2 * 4), "{:?}", names(bucket));
    assert!(verify(bucket).unwrap().iter().all(|shard| shard.damages.is_empty() && shard.whole == [3, 2]));
    let target = folder.0.join("fetched");
    let got = fetch(bucket, Which::Newest, &target).unwrap();
    assert_eq!(got.iter().map(|got| (got.shard, got.number)).collect::<Vec<_>>(), [(0, 3), (1, 3)]);
    for home in homes {
        for file in ["parameters.safetensors", "state.safetensors", "slices"] {
            let read = |data: &FilePath| {
                let shard = data.join(home.path.file_name().unwrap());
                std::fs::read(shard.join("generation-00000003").join(file)).unwrap()
            };
            assert!(read(&folder.data()) == read(&target), "{file}");
        }
        home.close();
    }
    assert!(checkpoint::verify(&target).unwrap().iter().all(|shard| shard.damages.is_empty()));
    refused(fetch(bucket, Which::Newest, &target), "is not empty");
    // A separate directory continues in the same bucket: its former owner is refused.
    let next = Home::open(&target, 0, 2);
    assert_eq!(next.journal.catalog().slices().count() as u64, SLICES / 2);
    assert_eq!(next.snapshot(), 4);
    send(bucket, &next.path).unwrap();
    let before = Home::open(&folder.data(), 0, 2);
    for number in [4, 5] {
        assert_eq!(before.snapshot(), number);
        let error = refused(send(bucket, &before.path), "has snapshots of another server");
        assert_eq!((error.kind, error.shard), (Kind::Config, Some(0)));
    }
    assert_eq!(numbers(bucket)[..2], [(4, true), (3, false)]);
    assert_eq!(next.snapshot(), 5);
    send(bucket, &next.path).unwrap();
}

#[test]
fn there_and_back_in_memory() {
    there_and_back(&in_memory(), &Folder::new());
}

#[test]
fn there_and_back_in_a_folder() {
    let folder = Folder::new();
    there_and_back(&Bucket::open(&folder.url()).unwrap(), &folder);
}

#[test]
fn a_copy_of_a_directory_does_not_write_over_what_continues() {
    for in_a_folder in [false, true] {
        let folder = Folder::new();
        let bucket = if in_a_folder { Bucket::open(&folder.url()).unwrap() } else { in_memory() };
        let home = Home::new(&folder.data(), 0, 1);
        home.snapshot();
        send(&bucket, &home.path).unwrap();
        home.close();
        let copied = folder.0.join("copied");
        copy_folder(&folder.data(), &copied);
        let (home, twin) = (Home::open(&folder.data(), 0, 1), Home::open(&copied, 0, 1));
        home.snapshot();
        send(&bucket, &home.path).unwrap();
        twin.snapshot();
        refused(send(&bucket, &twin.path), "has a later snapshot of this directory");
        twin.snapshot();
        refused(send(&bucket, &twin.path), "has snapshots of another server");
        assert_eq!(numbers(&bucket), [(2, true), (1, false)]);
        home.close();
        // An unrelated directory.
        let other = Home::new(&folder.0.join("other"), 0, 1);
        other.snapshot();
        refused(send(&bucket, &other.path), "has snapshots of another server");
    }
}

#[test]
fn who_comes_second_to_swap_loses_and_leaves_nothing() {
    for in_a_folder in [false, true] {
        let folder = Folder::new();
        let bucket = if in_a_folder { Bucket::open(&folder.url()).unwrap() } else { in_memory() };
        let homes = ["one", "two"].map(|name| Home::new(&folder.0.join(name), 0, 1));
        for home in &homes {
            home.snapshot();
        }
        // Both have seen an empty bucket.
        let [first, second] = homes
            .each_ref()
            .map(|home| upload(&bucket, &home.path, Held::newest(&home.path).unwrap().unwrap(), KEEP, 0));
        let (first, second) = block(async { tokio::join!(first, second) });
        let lost: Vec<_> = [first, second].into_iter().filter_map(Result::err).collect();
        assert_eq!(lost.len(), 1, "{lost:?}");
        assert_eq!(lost[0].kind, Kind::Config);
        assert_eq!(names(&bucket).len(), 1 + 4, "{:?}", names(&bucket));
        assert_eq!(numbers(&bucket), [(1, true)]);
        // And by the version of the unused read.
        let (latest, version) = block(bucket.latest(0)).unwrap().unwrap();
        let newer = copy::Latest { folder: copy::new_folder(1).unwrap(), ..latest.clone() };
        assert!(block(bucket.swap(&newer, Some(version.clone()))).unwrap());
        assert!(!block(bucket.swap(&latest, Some(version.clone()))).unwrap());
        assert!(block(bucket.swap(&newer, Some(version))).unwrap(), "a repeat succeeds");
        assert!(!block(bucket.swap(&latest, None)).unwrap());
    }
}

#[test]
fn a_copy_of_a_newer_term_is_never_replaced_by_an_older_one() {
    let folder = Folder::new();
    let bucket = Bucket::of(Arc::new(InMemory::new()));
    let homes = ["a", "b"].map(|name| Home::new(&folder.0.join(name), 0, 1));
    let send_in = |home: &Home, term| {
        home.snapshot();
        block(upload(&bucket, &home.path, Held::newest(&home.path)?.unwrap(), KEEP, term))
    };
    let term = || block(bucket.latest(0)).unwrap().unwrap().0.term;
    send_in(&homes[0], 0).unwrap();
    assert_eq!(term(), 0);
    // The owner need not have copied what is there.
    for (home, newer) in [(0, 2), (1, 3), (1, 3)] {
        send_in(&homes[home], newer).unwrap();
        assert_eq!(term(), newer);
    }
    for older in [0, 2] {
        refused(send_in(&homes[0], older), "a later owner of the shard");
    }
    assert_eq!(term(), 3);
    // Versions of fastps that know no terms refuse the format.
    let (latest, _) = block(bucket.latest(0)).unwrap().unwrap();
    assert_eq!(latest.format, 3);
    assert_eq!(
        fetch(&bucket, Which::Newest, &folder.0.join("fetched")).unwrap()[0].number,
        latest.generation
    );
}

#[test]
fn an_upload_that_ends_half_way_changes_nothing() {
    let store = Arc::new(InMemory::new());
    let folder = Folder::new();
    let bucket = Bucket::of(store.clone());
    let home = Home::new(&folder.data(), 0, 1);
    home.snapshot();
    send(&bucket, &home.path).unwrap();
    home.snapshot();
    let pause = Duration::from_millis(40);
    let config = ThrottleConfig { wait_put_per_call: pause, ..ThrottleConfig::default() };
    let slow = Bucket::of(Arc::new(ThrottledStore::new(store, config)));
    for steps in 1..5 {
        let held = Held::newest(&home.path).unwrap().unwrap();
        let cut = block(async {
            tokio::time::timeout(pause * steps, upload(&slow, &home.path, held, KEEP, 0)).await
        });
        if cut.is_ok() {
            break;
        }
        assert_eq!(
            fetch(&bucket, Which::Newest, &folder.0.join(format!("fetched-{steps}"))).unwrap()[0].number,
            1
        );
        assert!(verify(&bucket).unwrap()[0].damages.is_empty());
    }
    send(&bucket, &home.path).unwrap();
    home.snapshot();
    send(&bucket, &home.path).unwrap();
    // Remains of the failed copy are gone.
    assert_eq!(names(&bucket).len(), 1 + 2 * 4, "{:?}", names(&bucket));
}

#[test]
fn damage_is_reported_and_nothing_is_restored() {
    let (folder, bucket) = (Folder::new(), in_memory());
    let home = Home::new(&folder.data(), 0, 1);
    home.snapshot();
    send(&bucket, &home.path).unwrap();
    let target = folder.0.join("fetched");
    for name in names(&bucket) {
        let place = Path::from(format!("{}{}", bucket.prefix, name.strip_prefix(&bucket.url).unwrap()));
        let whole = block(async { bucket.store.get(&place).await.unwrap().bytes().await.unwrap() });
        let mut spoilt = whole.to_vec();
        let middle = spoilt.len() / 2;
        spoilt[middle] ^= 1;
        for damaged in [spoilt, whole[..whole.len() - 1].to_vec(), Vec::new()] {
            block(bucket.store.put(&place, damaged.into())).unwrap();
            let error = fetch(&bucket, Which::Newest, &target).unwrap_err();
            assert!(error.kind == Kind::Internal && error.to_string().contains("shard-0/"), "{error}");
            let found = verify(&bucket).map_or(true, |shards| !shards[0].damages.is_empty());
            assert!(found, "{place}");
        }
        block(bucket.store.delete(&place)).unwrap();
        fetch(&bucket, Which::Newest, &target).unwrap_err();
        assert!(verify(&bucket).map_or(true, |shards| !shards[0].damages.is_empty()), "{place}");
        block(bucket.store.put(&place, whole.into())).unwrap();
    }
    assert_eq!(std::fs::read_dir(&folder.0).unwrap().count(), 1, "nothing is left but the data");
    fetch(&bucket, Which::Newest, &target).unwrap();
}

#[test]
fn a_snapshot_that_is_damaged_on_disk_is_not_copied() {
    let (folder, bucket) = (Folder::new(), in_memory());
    let home = Home::new(&folder.data(), 0, 1);
    home.snapshot();
    send(&bucket, &home.path).unwrap();
    home.snapshot();
    for file in ["parameters.safetensors", "state.safetensors"] {
        let path = home.path.join("generation-00000002").join(file);
        let whole = std::fs::read(&path).unwrap();
        let mut spoilt = whole.clone();
        *spoilt.last_mut().unwrap() ^= 1;
        std::fs::write(&path, &spoilt).unwrap();
        refused(send(&bucket, &home.path), "It is not copied");
        std::fs::write(&path, &whole).unwrap();
    }
    assert!(numbers(&bucket).contains(&(1, true)));
    send(&bucket, &home.path).unwrap();
}

#[test]
fn shards_that_do_not_go_together_are_not_made_a_directory() {
    let (folder, bucket) = (Folder::new(), in_memory());
    let home = Home::new(&folder.data(), 0, 2);
    home.snapshot();
    send(&bucket, &home.path).unwrap();
    let target = folder.0.join("fetched");
    refused(fetch(&bucket, Which::Newest, &target), "no complete copy of shard 1");
    let empty = Home::open(&folder.data(), 1, 2);
    empty.snapshot();
    send(&bucket, &empty.path).unwrap();
    let error = refused(fetch(&bucket, Which::Newest, &target), "from different times");
    assert_eq!(error.tensor.as_deref(), Some("w"));
    assert!(!target.exists());
}

#[test]
fn a_cut_is_fetched_that_all_shards_have() {
    let (folder, bucket) = (Folder::new(), in_memory());
    let homes = [0, 1].map(|index| Home::new(&folder.data(), index, 2));
    let all = Keep { count: 9, ..KEEP };
    let copy = |home: &Home| {
        let held = Held::newest(&home.path).unwrap().unwrap();
        block(upload(&bucket, &home.path, held, all, 0)).unwrap();
    };
    let target = folder.0.join("fetched");
    for home in &homes {
        home.snapshot();
        copy(home);
    }
    refused(fetch(&bucket, Which::Cut, &target), "no cut over all shards");
    // Number 2 of shard 0 and number 3 of shard 1 are of one cut; only one shard is of a later cut.
    homes[1].snapshot();
    for (home, number) in homes.iter().zip([2, 3]) {
        assert_eq!(home.snapshot_of_cut(7), number);
        copy(home);
    }
    homes[0].snapshot_of_cut(8);
    copy(&homes[0]);
    homes[1].snapshot();
    copy(&homes[1]);
    let cuts: Vec<_> = list(&bucket).unwrap().into_iter().filter_map(|stored| stored.cut).collect();
    assert_eq!(cuts, ["default"; 3]);
    let numbers = |got: Vec<super::fetch::Got>| got.iter().map(|got| got.number).collect::<Vec<_>>();
    assert_eq!(numbers(fetch(&bucket, Which::Cut, &target).unwrap()), [2, 3]);
    assert_eq!(numbers(fetch(&bucket, Which::Newest, &folder.0.join("newest")).unwrap()), [3, 4]);
    // It starts; its source has moved on, and is not overwritten.
    let past = Home::open(&target, 0, 2);
    past.snapshot();
    refused(send(&bucket, &past.path), "has snapshots of another server");
    // A damaged copy belongs to no cut.
    let listed = list(&bucket).unwrap();
    let damaged = listed.iter().find(|stored| (stored.shard, stored.number) == (1, 3)).unwrap();
    let place = damaged.place.strip_prefix("memory://").unwrap();
    let manifest = Path::from(format!("{}{place}/MANIFEST", bucket.prefix));
    block(bucket.store.put(&manifest, b"{}".to_vec().into())).unwrap();
    refused(fetch(&bucket, Which::Cut, &folder.0.join("other")), "no cut over all shards");
}

#[test]
fn a_directory_is_copied_without_a_server() {
    let folder = Folder::new();
    let bucket = Bucket::open(&folder.url()).unwrap();
    let home = Home::new(&folder.data(), 0, 1);
    refused(upload_all(&folder.data(), &bucket, 1), "another server");
    home.snapshot();
    home.close();
    for was_there in [false, true] {
        assert_eq!(upload_all(&folder.data(), &bucket, 1).unwrap()[0].was_there, was_there);
    }
    assert_eq!(copy::copied(&shard_folder(&folder.data(), 0)).unwrap().len(), 1);
    assert!(folder.0.join("a bucket/shard-0").join(LATEST).is_file());
}

#[test]
fn urls() {
    for bad in [
        "nonsense",
        "http://host/x",
        "s3://",
        "s3:///x",
        "s3://b/a//b",
        "file://x",
        "file://",
        "file:///",
        "s3://key:secret@b/x",
        "s3://b?x=1",
        "file:///a/../b",
    ] {
        let error = Bucket::open(bad).unwrap_err();
        assert!(error.kind == Kind::Config && !error.to_string().contains("secret"), "{bad}: {error}");
    }
    for good in ["s3://bucket", "s3://bucket/", "s3://bucket/a/b", "file:///a/b/"] {
        assert!(format!("{:?}", Bucket::open(good).unwrap()).starts_with("Bucket(\""), "{good}");
    }
}

#[test]
fn the_repetition_of_a_request_by_a_server_is_not_shown() {
    let body = "GET https://sts.host/?WebIdentityToken=hidden status: <?xml?><Error><Code>SignatureDoesNotMatch</Code><Message>Check your key</Message>\
                <CanonicalRequest>x-amz-security-token:hidden</CanonicalRequest></Error>";
    let error = object_store::Error::Generic { store: "S3", source: body.into() };
    let text = reason(&error);
    assert!(text.ends_with("SignatureDoesNotMatch: Check your key") && !text.contains("hidden"), "{text}");
}
