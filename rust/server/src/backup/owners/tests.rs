//! Claims against a store in memory, which can be made to ignore conditions or to be away.

use super::keeper::{Claiming, Owners};
use super::list::owners;
use crate::backup::bucket::{Bucket, block};
use crate::owner::Ownership;
use fastps_core::error::{Error, Kind, Result};
use fastps_durable::copy;
use fastps_durable::owner::{LockedFile, Stage};
use futures_util::stream::BoxStream;
use object_store::memory::InMemory;
use object_store::path::Path;
use object_store::{
    CopyOptions, GetOptions, GetResult, ListResult, MultipartUpload, ObjectMeta, ObjectStore, PutMode,
    PutMultipartOptions, PutOptions, PutPayload, PutResult,
};
use std::fmt;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

const LEASE: Duration = Duration::from_secs(5);

/// A store with faults.
#[derive(Debug, Default)]
struct Faulty {
    store: Arc<InMemory>,
    /// Writes whatever the condition.
    ignores_conditions: AtomicBool,
    /// Has no answer.
    is_away: AtomicBool,
    /// Has no answer to a write, which it takes.
    loses_answers: AtomicBool,
}

impl fmt::Display for Faulty {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Faulty")
    }
}

impl Faulty {
    fn check(&self) -> object_store::Result<()> {
        if self.is_away.load(Ordering::Relaxed) {
            return Err(object_store::Error::Generic { store: "faulty", source: "it is away".into() });
        }
        Ok(())
    }
}

#[tonic::async_trait]
impl ObjectStore for Faulty {
    async fn put_opts(
        &self,
        place: &Path,
        payload: PutPayload,
        mut options: PutOptions,
    ) -> object_store::Result<PutResult> {
        self.check()?;
        if self.ignores_conditions.load(Ordering::Relaxed) {
            options.mode = PutMode::Overwrite;
        }
        let put = self.store.put_opts(place, payload, options).await;
        if self.loses_answers.load(Ordering::Relaxed) {
            return Err(object_store::Error::Generic { store: "faulty", source: "no answer".into() });
        }
        put
    }

    async fn put_multipart_opts(
        &self,
        place: &Path,
        options: PutMultipartOptions,
    ) -> object_store::Result<Box<dyn MultipartUpload>> {
        self.store.put_multipart_opts(place, options).await
    }

    async fn get_opts(&self, place: &Path, options: GetOptions) -> object_store::Result<GetResult> {
        self.check()?;
        self.store.get_opts(place, options).await
    }

    fn delete_stream(
        &self,
        places: BoxStream<'static, object_store::Result<Path>>,
    ) -> BoxStream<'static, object_store::Result<Path>> {
        self.store.delete_stream(places)
    }

    fn list(&self, prefix: Option<&Path>) -> BoxStream<'static, object_store::Result<ObjectMeta>> {
        self.store.list(prefix)
    }

    async fn list_with_delimiter(&self, prefix: Option<&Path>) -> object_store::Result<ListResult> {
        self.store.list_with_delimiter(prefix).await
    }

    async fn copy_opts(&self, from: &Path, to: &Path, options: CopyOptions) -> object_store::Result<()> {
        self.store.copy_opts(from, to, options).await
    }
}

/// Folder of one candidate, removed at the end.
struct Folder(PathBuf);

impl Folder {
    fn new(name: &str) -> Self {
        let path = std::env::temp_dir().join(format!("fastps owners {} {name}", std::process::id()));
        let _ = std::fs::remove_dir_all(&path);
        std::fs::create_dir_all(&path).unwrap();
        Self(path)
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// A server with a number, its folder and the inode of its lock.
fn claiming(folder: &Folder, incarnation: u64, inode: u64) -> Claiming {
    Claiming {
        owner: Arc::new(Ownership::new()),
        shard: 0,
        directory: folder.0.clone(),
        cluster: Some(7),
        address: format!("host-{incarnation}:7070"),
        incarnation,
        locked: Some(LockedFile { boot: "boot".to_owned(), device: 1, inode }),
        journal: None,
        copies_log: false,
        takes_over: None,
    }
}

fn claim(bucket: &Bucket, claiming: Claiming) -> (Arc<Ownership>, Result<Owners>) {
    let owner = claiming.owner.clone();
    (owner, Owners::claim(bucket, LEASE, false, vec![claiming], &AtomicBool::new(false)))
}

fn until(what: &str, mut is_so: impl FnMut() -> bool) {
    let begin = Instant::now();
    while !is_so() {
        assert!(begin.elapsed() < Duration::from_mins(1), "{what}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

fn refused(result: Result<Owners>, words: &str) -> Error {
    let error = result.map(|_| ()).unwrap_err();
    assert!(error.to_string().contains(words), "{error}");
    error
}

#[test]
fn another_server_waits_for_the_lease_unless_the_lock_or_a_release_shows_the_end() {
    let bucket = Bucket::of(Arc::new(InMemory::new()));
    let folders = ["a", "b", "c"].map(Folder::new);
    let (first, owners_of_first) = claim(&bucket, claiming(&folders[0], 1, 1));
    let owners_of_first = owners_of_first.unwrap();
    assert!(first.holds() && first.term() == 1);
    // Killed, and started again with the same folder.
    drop(owners_of_first);
    let begin = Instant::now();
    let (again, owners_of_again) = claim(&bucket, claiming(&folders[0], 2, 1));
    assert!(begin.elapsed() < LEASE, "who holds the lock need not wait");
    assert_eq!(again.term(), 2);
    drop(owners_of_again);
    // Killed, and another server has a copy of the folder.
    let (other, owners_of_other) = claim(&bucket, claiming(&folders[1], 3, 2));
    assert!(other.holds() && !first.holds() && !again.holds(), "the lease ends before the next one begins");
    let [listed] = owners(&bucket).unwrap().try_into().ok().unwrap();
    let record = listed.record.unwrap();
    assert_eq!((record.term, record.stage, record.address.as_str()), (3, Stage::Open, "host-3:7070"));
    // Stopped.
    owners_of_other.unwrap().release(Instant::now());
    assert!(!other.holds());
    let begin = Instant::now();
    let (last, owners_of_last) = claim(&bucket, claiming(&folders[2], 4, 3));
    assert!(begin.elapsed() < LEASE && last.term() == 4);
    drop(owners_of_last.unwrap());
    // The first folder lacks what the later owners acknowledged.
    let error = refused(claim(&bucket, claiming(&folders[0], 5, 1)).1, "fastps checkpoint fetch");
    assert_eq!(
        (error.kind, error.expected.as_deref(), error.got.as_deref()),
        (Kind::Config, Some("term 4"), Some("term 2"))
    );
    assert_eq!(copy::served(&folders[0].0).unwrap(), Some(2));
}

#[test]
fn a_start_that_is_given_up_leaves_the_shard_to_others() {
    let bucket = Bucket::of(Arc::new(InMemory::new()));
    let folders = ["g", "h"].map(Folder::new);
    let (first, owners_of_first) = claim(&bucket, claiming(&folders[0], 1, 1));
    let (waits, given_up) = (claiming(&folders[1], 2, 2), AtomicBool::new(false));
    let waiting = waits.owner.clone();
    std::thread::scope(|scope| {
        let start = scope.spawn(|| Owners::claim(&bucket, LEASE, false, vec![waits], &given_up));
        until("it reads the record", || waiting.record().is_some());
        given_up.store(true, Ordering::Relaxed);
        let error = refused(start.join().unwrap(), "given up");
        assert_eq!(error.kind, Kind::Unavailable);
    });
    drop(owners_of_first.unwrap());
    std::thread::sleep(2 * LEASE);
    assert_eq!((first.term(), waiting.term()), (1, 0), "nobody has taken the shard");
    let [listed] = owners(&bucket).unwrap().try_into().ok().unwrap();
    assert_eq!(listed.record.unwrap().term, 1);
}

#[test]
fn an_owner_answers_nothing_while_its_record_is_out_of_reach_and_goes_on_after_that() {
    let store = Arc::new(Faulty::default());
    let bucket = Bucket::of(store.clone());
    let folder = Folder::new("away");
    let (owner, owners) = claim(&bucket, claiming(&folder, 1, 1));
    store.is_away.store(true, Ordering::Relaxed);
    until("the lease ends", || !owner.holds());
    let refusal = owner.refusal();
    assert!(refusal.kind == Kind::Unavailable && refusal.shard.is_none() && refusal.retry_after_ms.is_some());
    store.is_away.store(false, Ordering::Relaxed);
    until("the lease is renewed", || owner.holds());
    assert_eq!(owner.term(), 1);
    drop(owners);
}

#[test]
fn a_write_whose_answer_is_lost_is_read_back() {
    let store = Arc::new(Faulty::default());
    let bucket = Bucket::of(store.clone());
    let folders = ["i", "j"].map(Folder::new);
    let (owner, owners) = claim(&bucket, claiming(&folders[0], 1, 1));
    store.loses_answers.store(true, Ordering::Relaxed);
    let begin = Instant::now();
    while begin.elapsed() < 2 * LEASE {
        assert!(owner.holds(), "each renewal is there");
        std::thread::sleep(Duration::from_millis(20));
    }
    drop(owners);
    // The next one waits as long as after any other renewal.
    store.loses_answers.store(false, Ordering::Relaxed);
    let (next, owners) = claim(&bucket, claiming(&folders[1], 2, 2));
    assert_eq!(next.term(), 2);
    drop(owners);
}

#[test]
fn the_first_copy_of_an_earlier_owner_comes_too_late() {
    let bucket = Bucket::of(Arc::new(InMemory::new()));
    let folders = ["k", "l"].map(Folder::new);
    let (_, first) = claim(&bucket, claiming(&folders[0], 1, 1));
    let (fence, before) = block(bucket.latest_or_fence(0)).unwrap().unwrap();
    assert!(fence.is_fence() && fence.term == 1);
    assert!(block(bucket.latest(0)).unwrap().is_none(), "a fence is no copy");
    drop(first);
    drop(claim(&bucket, claiming(&folders[1], 2, 2)));
    let folder = copy::new_folder(1).unwrap();
    let late = copy::Latest { folder, generation: 1, ..fence };
    for before in [None, Some(before)] {
        assert!(!block(bucket.swap(&late, before)).unwrap());
    }
    assert_eq!(block(bucket.latest_or_fence(0)).unwrap().unwrap().0.term, 2);
}

#[test]
fn who_lost_its_shard_says_who_owns_it() {
    let store = Arc::new(Faulty::default());
    let bucket = Bucket::of(store.clone());
    let folders = ["d", "e"].map(Folder::new);
    let (owner, owners) = claim(&bucket, claiming(&folders[0], 1, 1));
    // It is away for this server only.
    store.is_away.store(true, Ordering::Relaxed);
    until("the lease ends", || !owner.holds());
    let copied = Faulty { store: store.store.clone(), ..Faulty::default() };
    let (_, others) = claim(&Bucket::of(Arc::new(copied)), claiming(&folders[1], 2, 2));
    store.is_away.store(false, Ordering::Relaxed);
    until("it learns that", || owner.term() == 0);
    let refusal = owner.refusal();
    assert!(refusal.to_string().contains("host-2:7070 (term 2)"), "{refusal}");
    drop((owners, others));
}

#[test]
fn a_store_that_ignores_conditions_and_another_cluster_are_refused() {
    let store = Arc::new(Faulty::default());
    let bucket = Bucket::of(store.clone());
    let folder = Folder::new("f");
    store.ignores_conditions.store(true, Ordering::Relaxed);
    let error = refused(claim(&bucket, claiming(&folder, 1, 1)).1, "creates an object that exists");
    assert_eq!(error.kind, Kind::Config);
    store.ignores_conditions.store(false, Ordering::Relaxed);
    drop(claim(&bucket, claiming(&folder, 2, 1)).1.unwrap());
    let other = Claiming { cluster: Some(8), ..claiming(&folder, 3, 1) };
    refused(claim(&bucket, other).1, "another cluster owns the shard");
    let trials = block(async { Ok(futures_util::StreamExt::count(store.store.list(None)).await) });
    assert_eq!(trials.unwrap(), 2, "a record and a fence: trial objects are removed");
}
