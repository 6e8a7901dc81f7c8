//! Logs of real journals, copied to a store in memory.

use super::pieces::{Copier, LogCopies, Pace, snapshot_is_copied};
use crate::backup::bucket::{Bucket, block};
use crate::backup::owners::{Claiming, Owners};
use crate::backup::upload::{Keep, upload};
use crate::config::ServerConfig;
use crate::persistence::Files;
use fastps_core::error::{Kind, Result};
use fastps_core::isa::Isa;
use fastps_core::shard::{Shard, ShardConfig};
use fastps_durable::copy::{self, Held, Vacancy};
use fastps_durable::owner::{Claim, LogPosition, Piece, history};
use fastps_durable::{Event, shard_folder};
use object_store::memory::InMemory;
use std::path::{Path as FilePath, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};
use tokio::sync::watch;

const LEASE: Duration = Duration::from_secs(2);
const AGE: Duration = Duration::from_millis(50);

struct Folder(PathBuf);

impl Folder {
    fn new() -> Self {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        let (process, next) = (std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed));
        let path = std::env::temp_dir().join(format!("fastps pieces {process}-{next}"));
        let _ = std::fs::remove_dir_all(&path);
        std::fs::create_dir_all(&path).unwrap();
        Self(path)
    }

    fn data(&self, name: &str) -> PathBuf {
        self.0.join(name)
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

/// A server of one shard, as far as its log goes.
struct Server {
    bucket: Bucket,
    files: Files,
    shard: Shard,
    directory: PathBuf,
    _owners: Owners,
}

impl Server {
    /// Starts with a directory that has the shard's files, or none.
    fn start(bucket: &Bucket, data: &FilePath) -> Result<Self> {
        Self::begin(bucket, data, false)
    }

    /// Takes the shard over into an empty directory.
    fn take_over(bucket: &Bucket, data: &FilePath) -> Result<Self> {
        Self::begin(bucket, data, true)
    }

    fn begin(bucket: &Bucket, data: &FilePath, takes_over: bool) -> Result<Self> {
        let config = ServerConfig {
            data_dir: Some(data.to_owned()),
            copy_to: Some("s3://bucket".to_owned()),
            copy_log: Some(AGE),
            owner_lease: Some(LEASE),
            ..ServerConfig::default()
        };
        let files = Files::open(&config, 0, 1)?;
        let journal = files.journal().unwrap().clone();
        let shard = ShardConfig::new(0, 1 << 30, Isa::get()?);
        let shard = Shard::new(ShardConfig { sink: Some(journal.clone()), ..shard });
        if !takes_over {
            files.recover(&shard)?;
        }
        let directory = shard_folder(data, 0);
        let claiming = Claiming {
            owner: files.owner().unwrap().clone(),
            shard: 0,
            directory: directory.clone(),
            cluster: (!takes_over).then_some(7),
            address: "host-a:7070".to_owned(),
            incarnation: journal.incarnation(),
            locked: journal.locked_file(),
            journal: Some(journal),
            copies_log: true,
            takes_over: takes_over.then_some(1),
        };
        let owners = Owners::claim(bucket, LEASE, false, vec![claiming], &AtomicBool::new(false))?;
        if takes_over {
            files.recover(&shard)?;
        }
        Ok(Self { bucket: bucket.clone(), files, shard, directory, _owners: owners })
    }

    /// Logs events that are durable then.
    fn log(&self, count: u64) {
        let journal = self.files.journal().unwrap();
        for client in 0..count {
            journal.note(&Event::Named(client, "a name of some length".into()));
        }
        journal.sync(journal.position()).unwrap();
    }

    /// Copies all of the log that is synced.
    fn copy_all(&self) {
        let copier = Copier::new(&self.bucket, 0, &self.files, &self.directory, (AGE, Pace::default()))
            .unwrap()
            .unwrap();
        let (stop, stopped) = watch::channel(None);
        stop.send_replace(Some(Instant::now()));
        block(async {
            copier.run(stopped).await;
            Ok(())
        })
        .unwrap();
        self.renew();
    }

    /// Waits until the record says how far the log is copied.
    fn renew(&self) {
        let copied = self.files.log_copy().unwrap().add_snapshot(LogPosition::default());
        let (owner, begin) = (self.files.owner().unwrap(), Instant::now());
        owner.change(Claim::hurry);
        while owner.record().unwrap().tip.copied < copied {
            assert!(begin.elapsed() < Duration::from_mins(1), "the record is not renewed");
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    fn snapshot(&self) -> Held {
        self.files.snapshot(&self.shard, None).unwrap();
        Held::newest(&self.directory).unwrap().unwrap()
    }

    fn copy_snapshot(&self) -> LogPosition {
        self.copy(self.snapshot())
    }

    /// Copies a snapshot. Returns the place in the log from which it is replayed.
    fn copy(&self, held: Held) -> LogPosition {
        let (log, keep) = (held.described.log(), Keep { count: 2, younger: Duration::ZERO });
        block(async {
            upload(&self.bucket, &self.directory, held, keep, self.files.owner().unwrap().term()).await?;
            snapshot_is_copied(&self.bucket, 0, &self.files, log).await
        })
        .unwrap();
        self.renew();
        log
    }

    fn pieces(&self) -> Vec<Piece> {
        let mut pieces = block(self.bucket.pieces(0)).unwrap();
        pieces.sort_unstable();
        pieces
    }

    /// The bytes of the history from a place on, and where it ends.
    fn history(&self, from: LogPosition) -> (Vec<u8>, LogPosition) {
        let record = self.files.owner().unwrap().record().unwrap();
        let found = history(&self.pieces(), &record, from).unwrap();
        let mut bytes = Vec::new();
        for piece in found.pieces {
            bytes.extend(block(self.bucket.piece(0, piece)).unwrap());
        }
        (bytes, found.end)
    }

    /// The bytes of the log here up to a place.
    fn own_log(&self, from: LogPosition, to: LogPosition) -> Vec<u8> {
        let mut bytes = Vec::new();
        for number in from.segment..=to.segment {
            let path = self.directory.join(format!("log-{number:08}"));
            let Ok(mut segment) = std::fs::read(path) else { continue };
            if number == to.segment {
                segment.truncate(to.offset as usize);
            }
            bytes.extend(segment);
        }
        bytes
    }

    fn kill(self) {
        self.files.journal().unwrap().close();
    }
}

fn at(segment: u64, offset: u64) -> LogPosition {
    LogPosition { segment, offset }
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

#[test]
fn what_is_copied_is_the_log_over_restarts_and_snapshots() {
    let (folder, bucket) = (Folder::new(), in_memory());
    let data = folder.data("a");
    let mut copied = at(1, 0);
    for term in 1..=3 {
        let server = Server::start(&bucket, &data).unwrap();
        assert_eq!(server.files.owner().unwrap().term(), term);
        server.log(100);
        let synced = server.files.journal().unwrap().synced().1;
        server.copy_all();
        let (bytes, end) = server.history(at(1, 0));
        assert!(end == synced && end > copied, "term {term}: {end:?}, not {synced:?}");
        assert!(bytes == server.own_log(at(1, 0), end), "term {term}");
        copied = end;
        // What is logged after this is lost with the machine.
        server.log(10);
        assert_eq!(server.history(at(1, 0)).1, copied);
        server.kill();
    }
    let server = Server::start(&bucket, &data).unwrap();
    let first = server.copy_snapshot();
    server.copy_all();
    server.log(5);
    // A copier that is started anew begins at the newest copied snapshot: what precedes that is copied before.
    let held = server.snapshot();
    server.copy_all();
    let second = server.copy(held);
    assert!(second > first);
    server.copy_all();
    // The log before the oldest of the two that are kept is gone.
    assert_eq!(server.pieces()[0].begin, first);
    for from in [first, second] {
        let (bytes, end) = server.history(from);
        assert_eq!(end, server.files.journal().unwrap().synced().1);
        assert!(bytes == server.own_log(from, end), "{from:?}");
    }
    let counters = server.files.counters();
    let counter = |name| counters.iter().find(|(known, _)| *known == name).map(|(_, value)| *value);
    assert_eq!((counter("log_copy_behind_ms"), counter("log_copies_failed")), (Some(0), Some(0)));
}

#[test]
fn a_log_without_a_copied_snapshot_before_it_counts_from_the_next_one() {
    let (folder, bucket) = (Folder::new(), in_memory());
    let data = folder.data("a");
    // It has served without copies.
    let before = Server::start(&in_memory(), &data).unwrap();
    before.log(3);
    before.files.snapshot(&before.shard, None).unwrap();
    before.kill();
    let server = Server::start(&bucket, &data).unwrap();
    server.log(3);
    server.copy_all();
    let copied = || server.files.owner().unwrap().change(|claim| claim.record().unwrap().tip.copied);
    assert_eq!(copied(), Some(at(0, 0)));
    assert!(!server.pieces().is_empty());
    let log = server.copy_snapshot();
    assert_eq!(server.files.log_copy().unwrap().add_snapshot(log), log);
}

#[test]
fn a_directory_that_lacks_what_was_copied_is_refused() {
    let (folder, bucket) = (Folder::new(), in_memory());
    let (data, other) = (folder.data("a"), folder.data("b"));
    let server = Server::start(&bucket, &data).unwrap();
    server.log(10);
    server.copy_all();
    copy_folder(&data, &other);
    server.log(10);
    server.copy_all();
    server.kill();
    // A first start ends the copied log, and goes on from places that the other one has, too.
    for attempt in 0..3 {
        let error = Server::start(&bucket, &other).err().unwrap();
        assert!(
            error.kind == Kind::Config && error.message.contains("does not continue"),
            "{attempt}: {error}"
        );
    }
    let server = Server::start(&bucket, &data).unwrap();
    server.log(1);
    server.copy_all();
    assert!(server.history(at(1, 0)).1 > at(2, 0));
    server.kill();
    // One that has everything may be another folder.
    let same = folder.data("c");
    copy_folder(&data, &same);
    Server::start(&bucket, &same).unwrap().kill();
    // And one of a snapshot without pieces after it.
    let server = Server::start(&bucket, &same).unwrap();
    let log = server.copy_snapshot();
    copy_folder(&same, &folder.data("d"));
    server.kill();
    let server = Server::start(&bucket, &folder.data("d")).unwrap();
    assert_eq!(server.history(log).1, log);
}

#[test]
fn a_taker_has_what_was_copied_and_late_pieces_do_not_exist() {
    let (folder, bucket) = (Folder::new(), in_memory());
    let beginning = at(1, 0);
    let first = Server::start(&bucket, &folder.data("a")).unwrap();
    first.log(100);
    first.copy_all();
    let (copied, end) = first.history(beginning);
    first.log(10);
    // The machine is lost, and a put of it is still on its way.
    first.kill();
    let late = Piece { term: 1, begin: end, end: at(end.segment, end.offset + 50) };
    let second = Server::take_over(&bucket, &folder.data("b")).unwrap();
    let record = second.files.owner().unwrap().record().unwrap();
    assert_eq!((record.term, record.cluster, record.bases.len()), (2, 7, 1));
    assert_eq!((record.bases[0].end, record.bases[0].begin), (end, end));
    assert!(second.own_log(beginning, end) == copied);
    block(bucket.put_piece(0, late, vec![0; 50].into())).unwrap();
    second.log(5);
    second.copy_all();
    let (both, end) = second.history(beginning);
    assert!(both.starts_with(&copied) && both == second.own_log(beginning, end));
    second.kill();
    // One that was killed half way leaves what the next one removes.
    let half = shard_folder(&folder.data("c"), 0);
    std::fs::create_dir_all(half.join("generation-00000004")).unwrap();
    for name in ["taking-over", "log-00000001", "log-00000009", "term"] {
        std::fs::write(half.join(name), "1").unwrap();
    }
    let third = Server::take_over(&bucket, &folder.data("c")).unwrap();
    assert!(third.own_log(beginning, end) == both && !half.join("taking-over").exists());
    // Of a snapshot that no piece follows yet.
    let log = third.copy_snapshot();
    third.kill();
    let fourth = Server::take_over(&bucket, &folder.data("d")).unwrap();
    assert_eq!(fourth.files.owner().unwrap().record().unwrap().tip.copied, log);
    fourth.log(1);
    fourth.copy_all();
    assert!(fourth.history(log).0 == fourth.own_log(log, fourth.history(log).1));
    fourth.kill();
    // It is a server's directory like any other now.
    Server::start(&bucket, &folder.data("d")).unwrap().kill();
}

#[test]
fn what_cannot_be_taken_over_is_refused() {
    let (folder, bucket) = (Folder::new(), in_memory());
    let refused = |data: &str, words: &str| {
        let error = Server::take_over(&bucket, &folder.data(data)).err().unwrap();
        assert!(error.to_string().contains(words), "{error}");
    };
    refused("b", "has no shard-0");
    let first = Server::start(&bucket, &folder.data("a")).unwrap();
    first.log(10);
    first.kill();
    refused("b", "nothing of the shard has been copied");
    // A piece that is missing, and one that is damaged.
    let first = Server::start(&bucket, &folder.data("a")).unwrap();
    first.copy_all();
    let piece = first.pieces()[0];
    let mut bytes = block(bucket.piece(0, piece)).unwrap();
    bytes[20] ^= 1;
    block(bucket.put_piece(0, piece, bytes.into())).unwrap();
    first.kill();
    refused("c", "is damaged");
    assert_eq!(copy::vacancy(&shard_folder(&folder.data("c"), 0)).unwrap(), Vacancy::Empty);
}

#[test]
fn settings_that_do_not_fit_together_are_refused() {
    let copies = ServerConfig { copy_log: Some(Duration::from_secs(1)), ..ServerConfig::default() };
    let url = Some("s3://bucket".to_owned());
    for (config, next) in [
        (copies.clone(), "--copy-to URL"),
        (ServerConfig { copy_to: url.clone(), ..copies.clone() }, "--owner-lease SECONDS"),
        (
            ServerConfig {
                copy_to: url.clone(),
                owner_lease: Some(LEASE),
                copy_log: Some(Duration::ZERO),
                ..copies.clone()
            },
            "0.05 to 3600 s",
        ),
        (
            ServerConfig { copy_bytes_per_second: Some(5000), ..ServerConfig::default() },
            "--copy-bytes-per-second with --copy-log",
        ),
        (
            ServerConfig {
                copy_to: url.clone(),
                owner_lease: Some(LEASE),
                copy_bytes_per_second: Some(9),
                ..copies.clone()
            },
            "at least 1024",
        ),
    ] {
        let error = LogCopies::check(&config).unwrap_err();
        assert!(error.kind == Kind::Config && error.expected.as_ref().unwrap().contains(next), "{error}");
    }
    LogCopies::check(&ServerConfig { copy_to: url, owner_lease: Some(LEASE), ..copies }).unwrap();
    LogCopies::check(&ServerConfig::default()).unwrap();
}
