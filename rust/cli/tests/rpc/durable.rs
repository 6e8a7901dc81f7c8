//! Servers with a data directory, killed at any moment and restarted while clients continue.

use crate::ledger::{AtTheEnd, PATIENT, floats, gradient, until};
use fastps_client::{Ack, Client, ConnectOptions};
use fastps_core::dtype::View;
use fastps_core::error::{Kind, Lost};
use fastps_core::isa::Isa;
use fastps_core::optim::{Adam, Optimizer, Sgd};
use fastps_core::shard::{Shard, ShardConfig};
use fastps_core::tensor::{Apply, SliceId, TensorSpec};
use fastps_core::verbs::prelude::*;
use fastps_core::verbs::{Fate, InDoubt, PushError, PushOptions};
use fastps_durable::{Catalog, Generation, Journal, Settings};
use rustix::process::Signal;
use std::io::{BufRead, BufReader};
use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};
use tonic_health::pb::HealthCheckRequest;
use tonic_health::pb::health_check_response::ServingStatus;
use tonic_health::pb::health_client::HealthClient;

const SLICE: usize = 258_048;

/// A folder that is removed on drop.
pub(crate) struct Folder(pub(crate) PathBuf);

impl Folder {
    pub(crate) fn new() -> Self {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        let (process, next) = (std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed));
        let path = std::env::temp_dir().join(format!("fastps-served-{process}-{next}"));
        let _ = std::fs::remove_dir_all(&path);
        Self(path)
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// A server in its own process, with the same addresses after every start.
pub(crate) struct Served {
    pub(crate) folder: Folder,
    pub(crate) port: u16,
    pub(crate) shards: u16,
    pub(crate) child: Option<Child>,
}

impl Served {
    pub(crate) fn new(shards: u16) -> Self {
        let free = |port: u16| TcpListener::bind(("127.0.0.1", port)).is_ok();
        let port = (0..100).find_map(|_| {
            let port = TcpListener::bind("127.0.0.1:0").ok()?.local_addr().ok()?.port();
            (1..shards).all(|k| free(port.saturating_add(k))).then_some(port)
        });
        Self { folder: Folder::new(), port: port.unwrap(), shards, child: None }
    }

    pub(crate) fn address(&self) -> String {
        format!("127.0.0.1:{}", self.port)
    }

    /// The command that starts it after `shell`.
    pub(crate) fn command(&self, shell: &str, more: &[&str]) -> Command {
        let mut command = Command::new("sh");
        command.arg("-c").arg(format!("{shell} exec \"$0\" \"$@\""));
        command.arg(env!("CARGO_BIN_EXE_fastps-server"));
        command.args(["--listen", &self.address(), "--shards", &self.shards.to_string()]);
        command.arg("--data-dir").arg(&self.folder.0).args(more);
        command.stdout(Stdio::piped()).env("FASTPS_LOG", "off");
        command
    }

    /// Runs `shell`, starts the server and waits until it reports that it is ready.
    pub(crate) fn start_after(&mut self, shell: &str, more: &[&str]) {
        let begin = Instant::now();
        loop {
            let mut child = self.command(shell, more).spawn().unwrap();
            let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
            let ready = (0..self.shards).all(|_| lines.next().is_some_and(|line| line.is_ok()));
            self.child = Some(child);
            if ready {
                return;
            }
            // Another test may have held the port for a moment.
            assert!(begin.elapsed() < PATIENT, "the server does not start");
            self.wait();
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    pub(crate) fn start(&mut self) {
        self.start_after("", &[]);
    }

    pub(crate) fn kill(&mut self) {
        self.child.as_mut().unwrap().kill().unwrap();
        self.wait();
    }

    /// Kills it once the log has this many changes.
    fn kill_when_logged(&mut self, changes: usize) {
        let folder = self.folder.0.join("shard-0");
        until("all is in the log", || changes_in_log(&folder).2.len() == changes);
        self.kill();
    }

    /// Terminates it and returns its exit status.
    pub(crate) fn terminate(&mut self) -> Option<i32> {
        self.signal(Signal::TERM);
        self.wait()
    }

    fn signal(&self, signal: Signal) {
        let id = self.child.as_ref().unwrap().id() as i32;
        let pid = rustix::process::Pid::from_raw(id).unwrap();
        rustix::process::kill_process(pid, signal).unwrap();
    }

    pub(crate) fn wait(&mut self) -> Option<i32> {
        self.child.take().and_then(|mut child| child.wait().unwrap().code())
    }

    pub(crate) fn connect(&self, ack: Ack) -> Arc<Client> {
        connect(&self.address(), ack)
    }
}

pub(crate) fn connect(address: &str, ack: Ack) -> Arc<Client> {
    let options = ConnectOptions { timeout: PATIENT, ack, ..ConnectOptions::default() };
    Client::connect(&[address.to_owned()], options).unwrap()
}

impl Drop for Served {
    fn drop(&mut self) {
        if let Some(child) = &mut self.child {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

pub(crate) fn register(
    ps: &Client,
    name: &str,
    elements: usize,
    apply: Apply,
    optimizer: Optimizer,
    value: f32,
) {
    let spec = TensorSpec { apply, ..TensorSpec::new(name, [elements as u64], optimizer) };
    ps.register(spec, View::Float32(&vec![value; elements]), PATIENT).unwrap();
}

pub(crate) fn sgd() -> Optimizer {
    Optimizer::Sgd(Sgd { lr: 1.0, ..Sgd::default() })
}

pub(crate) fn options(timeout: Duration) -> PushOptions {
    PushOptions { timeout, ..PushOptions::default() }
}

pub(crate) fn pull(ps: &Client, name: &str) -> Vec<f32> {
    let ticket = ps.pull_async(vec![name.into()], PATIENT).unwrap();
    floats(ticket.wait(2 * PATIENT).unwrap().unwrap().values.remove(0))
}

/// Pushes -1 until `stop` is set. Counts the applied pushes per slice, including those that were in doubt for
/// a while.
pub(crate) fn push_on(
    ps: &Client,
    name: &str,
    elements: usize,
    timeout: Duration,
    stop: &AtomicBool,
) -> Vec<u64> {
    let slices = elements.div_ceil(SLICE);
    let mut counts = vec![0; slices];
    let mut doubts: Vec<Arc<dyn InDoubt>> = Vec::new();
    while !stop.load(Ordering::Relaxed) {
        match ps.push(&[gradient(name, vec![-1.0; elements])], &options(timeout)) {
            Ok(_) => counts.iter_mut().for_each(|count| *count += 1),
            Err(PushError::Refused(error)) => {
                assert!(
                    matches!(error.kind, Kind::Deadline | Kind::Connection | Kind::Unavailable),
                    "{error}"
                );
            }
            Err(PushError::Partial(partial)) => {
                for (_, elements, _) in &partial.applied {
                    counts[elements.start / SLICE] += 1;
                }
                assert!(partial.receipts.is_empty(), "one tensor, and not whole");
                doubts.extend(partial.in_doubt);
            }
        }
    }
    for doubt in doubts {
        match doubt.result(PATIENT).unwrap() {
            Fate::Applied { .. } => counts[doubt.elements().start / SLICE] += 1,
            Fate::Fenced => {}
            Fate::Unknown => panic!("a server that remembers can tell"),
        }
    }
    counts
}

#[test]
fn logged_pushes_survive_kills_to_the_last_one() {
    let mut served = Served::new(2);
    served.start_after("", &["--snapshot-every", "1"]);
    let first = served.connect(Ack::Logged);
    let (big, small) = (2 * SLICE + 5, 10);
    register(&first, "big", big, Apply::Exact, sgd(), 0.0);
    register(&first, "small", small, Apply::Exact, sgd(), 0.0);
    let clients: Vec<_> = (0..3).map(|_| served.connect(Ack::Logged)).collect();
    let stop = AtomicBool::new(false);
    let (big_counts, small_counts) = std::thread::scope(|scope| {
        let stop = &stop;
        let end = AtTheEnd(stop);
        let pushers: Vec<_> = clients
            .iter()
            .enumerate()
            .map(|(k, client)| {
                // One of them times out soon, and asks for the outcome later.
                let (name, n) = if k == 0 { ("big", big) } else { ("small", small) };
                let timeout = if k == 2 { Duration::from_millis(30) } else { PATIENT };
                scope.spawn(move || push_on(client, name, n, timeout, stop))
            })
            .collect();
        for pause in [230, 90, 410, 20, 640] {
            std::thread::sleep(Duration::from_millis(pause));
            served.kill();
            served.start_after("", &["--snapshot-every", "1"]);
        }
        std::thread::sleep(Duration::from_millis(100));
        drop(end);
        let mut counts = pushers.into_iter().map(|pusher| pusher.join().unwrap());
        let big = counts.next().unwrap();
        (big, counts.map(|counts| counts[0]).sum::<u64>())
    });
    for _ in 0..2 {
        let pulled = pull(&first, "big");
        for (slice, count) in pulled.chunks(SLICE).zip(&big_counts) {
            assert!(slice.iter().all(|x| *x == *count as f32), "{} {count}", slice[0]);
        }
        assert_eq!(pull(&first, "small"), vec![small_counts as f32; small]);
        assert!(big_counts[0] > 0 && small_counts > 0, "{big_counts:?} {small_counts}");
        served.kill();
        served.start();
    }
}

/// The catalog that a start would read from a shard's files.
pub(crate) fn catalog_on_disk(path: &Path) -> Catalog {
    recovered(path).0.catalog()
}

/// The first value in a shard's files.
fn value_on_disk(path: &Path) -> f32 {
    let (journal, shard) = recovered(path);
    let slice = journal.catalog().slices().next().unwrap().0;
    let values = shard.pull(1, SliceId(slice)).unwrap();
    f32::from_le_bytes(values.as_ref()[..4].try_into().unwrap())
}

fn recovered(path: &Path) -> (Arc<Journal>, Shard) {
    let (path, keep_for) = (path.to_owned(), Duration::ZERO);
    let settings = Settings { path, shard: 0, shards: 1, keep: 2, keep_for, history: 0, accept_loss: false };
    let journal = Journal::open(settings).unwrap();
    let shard = Shard::new(ShardConfig::new(0, 1 << 30, Isa::get().unwrap()));
    journal.recover(&shard).unwrap();
    (journal, shard)
}

#[test]
fn applied_pushes_come_back_as_far_as_the_log_has_them() {
    let mut served = Served::new(1);
    served.start();
    let mut pushed = 0.0;
    for round in 0..3 {
        // A separate client, which has no push under way when the server is killed.
        let client = served.connect(Ack::Applied);
        if round == 0 {
            register(&client, "w", 100, Apply::Exact, sgd(), 0.0);
        }
        let before = pull(&client, "w")[0];
        for _ in 0..300 {
            client.push(&[gradient("w", vec![-1.0; 100])], &options(PATIENT)).unwrap();
        }
        drop(client);
        pushed += 300.0;
        served.kill();
        let kept = value_on_disk(&served.folder.0.join("shard-0"));
        assert!(before <= kept && kept <= pushed, "{before} {kept} {pushed}");
        served.start();
        assert_eq!(pull(&served.connect(Ack::Applied), "w"), vec![kept; 100]);
    }
}

#[test]
fn what_a_stopped_server_had_is_there_again() {
    let mut served = Served::new(2);
    served.start();
    let client = served.connect(Ack::Applied);
    let n = SLICE + 9;
    register(&client, "adam", n, Apply::Exact, Optimizer::Adam(Adam::default()), 0.5);
    register(&client, "racing", n, Apply::Hogwild, sgd(), 0.25);
    register(&client, "gone", 5, Apply::Exact, sgd(), 1.0);
    client.unregister("gone", PATIENT).unwrap();
    // After a kill, a racing tensor has the values that were last assigned.
    served.kill();
    served.start();
    assert_eq!(pull(&client, "racing"), vec![0.25; n]);
    for name in ["adam", "racing"] {
        client.push(&[gradient(name, vec![-1.0; n])], &options(PATIENT)).unwrap();
    }
    let before =
        (pull(&client, "adam"), client.state("adam", PATIENT).unwrap(), client.names(PATIENT).unwrap());
    served.terminate();
    for shard in 0..2 {
        let path = served.folder.0.join(format!("shard-{shard}"));
        Generation::list(&path).unwrap()[0].as_ref().unwrap().verify().unwrap();
    }
    served.start();
    // The client reconnects and continues under the same identities.
    let after =
        (pull(&client, "adam"), client.state("adam", PATIENT).unwrap(), client.names(PATIENT).unwrap());
    assert_eq!(before, after);
    assert_eq!(pull(&client, "racing"), vec![1.25; n]);
    let receipts = client.push(&[gradient("adam", vec![-1.0; n])], &options(PATIENT)).unwrap();
    assert!(!receipts[0].duplicate);
    // It is the same tensor; another one of its name is refused.
    register(&client, "adam", n, Apply::Exact, Optimizer::Adam(Adam::default()), 0.0);
    register(&client, "gone", 7, Apply::Exact, sgd(), 2.0);
    assert_eq!(pull(&client, "gone"), [2.0; 7]);
}

/// The newest snapshot of a shard, if there is one.
fn newest_snapshot(folder: &Folder) -> Option<u64> {
    let listed = Journal::generations(&folder.0.join("shard-0")).unwrap();
    listed.into_iter().flatten().next().map(|generation| generation.summary().generation)
}

/// Segments of a shard's log.
fn segments(folder: &Folder) -> usize {
    let names = std::fs::read_dir(folder.0.join("shard-0")).unwrap();
    names.filter(|name| name.as_ref().unwrap().file_name().to_str().unwrap().starts_with("log-")).count()
}

#[test]
fn a_server_that_always_dies_before_its_next_snapshot_does_not_collect_files() {
    let mut served = Served::new(1);
    for kills in 1..=40 {
        served.start_after("", &["--keep", "1"]);
        if kills == 1 {
            register(&served.connect(Ack::Logged), "w", 10, Apply::Exact, sgd(), 0.0);
        }
        if kills % 20 == 0 {
            // A start that is slow enough may have taken one before: then there are fewer than 20.
            until("a snapshot replaces the log", || segments(&served.folder) < 20);
        }
        served.kill();
    }
    assert!(newest_snapshot(&served.folder).is_some());
    served.start();
    assert_eq!(pull(&served.connect(Ack::Logged), "w"), [0.0; 10]);
}

#[test]
fn a_log_that_outgrows_the_state_gets_a_snapshot() {
    let n = 1 << 17;
    for (times, snapshots) in [("4", true), ("0", false)] {
        let mut served = Served::new(1);
        served.start_after("", &["--snapshot-after", times]);
        let client = served.connect(Ack::Logged);
        register(&client, "w", n, Apply::Exact, sgd(), 0.0);
        for _ in 0..9 {
            push_one(&client, "w", n);
        }
        if snapshots {
            until("the log is long enough", || newest_snapshot(&served.folder).is_some());
        }
        served.kill();
        // Log that a start replays counts too.
        served.start_after("", &["--snapshot-after", times]);
        let newest = newest_snapshot(&served.folder);
        assert_eq!(newest.is_some(), snapshots);
        assert!(pull(&served.connect(Ack::Logged), "w").iter().all(|x| *x == 9.0));
        served.kill();
    }
}

#[test]
fn a_start_that_repeated_much_is_followed_by_a_snapshot() {
    let n = 1 << 17;
    let mut served = Served::new(1);
    served.start_after("", &["--snapshot-after", "0"]);
    let client = served.connect(Ack::Logged);
    register(&client, "w", n, Apply::Exact, sgd(), 0.0);
    for _ in 0..9 {
        push_one(&client, "w", n);
    }
    served.kill();
    served.start();
    until("the log was long", || newest_snapshot(&served.folder).is_some());
}

#[test]
fn a_server_that_is_to_outlive_its_terminal_does() {
    let mut served = Served::new(1);
    served.start_after("trap '' HUP;", &[]);
    let status = format!("/proc/{}/status", served.child.as_ref().unwrap().id());
    if let Ok(status) = std::fs::read_to_string(status) {
        let ignored = status.lines().find_map(|line| line.strip_prefix("SigIgn:")).unwrap();
        assert_eq!(u64::from_str_radix(ignored.trim(), 16).unwrap() & 1, 1, "{ignored}");
        served.signal(Signal::HUP);
    }
    register(&served.connect(Ack::Logged), "w", 10, Apply::Exact, sgd(), 0.0);
    assert_eq!(served.terminate(), Some(0));
}

#[test]
fn a_snapshot_that_was_asked_for_is_what_a_start_finds() {
    let mut served = Served::new(2);
    served.start_after("", &["--keep", "1"]);
    let client = served.connect(Ack::Applied);
    // Only snapshots have the pushes of a racing tensor.
    register(&client, "racing", 3 * SLICE, Apply::Hogwild, sgd(), 0.0);
    for _ in 0..2 {
        client.push(&[gradient("racing", vec![-1.0; 3 * SLICE])], &options(PATIENT)).unwrap();
        let taken = client.checkpoint(PATIENT).unwrap();
        assert_eq!(taken.iter().map(|snapshot| snapshot.slices).sum::<u64>(), 3);
        for (shard, snapshot) in taken.iter().enumerate() {
            let folder = served.folder.0.join(format!("shard-{shard}"));
            let found: Vec<_> = Generation::list(&folder).unwrap().into_iter().map(Result::unwrap).collect();
            let [only] = &found[..] else { panic!("{found:?}") };
            only.verify().unwrap();
            assert_eq!(only.summary().path, Path::new(&snapshot.path));
            assert_eq!((only.summary().bytes, only.summary().generation), (snapshot.bytes, snapshot.number));
        }
    }
    client.push(&[gradient("racing", vec![-1.0; 3 * SLICE])], &options(PATIENT)).unwrap();
    served.kill();
    served.start();
    assert_eq!(pull(&served.connect(Ack::Applied), "racing"), vec![2.0; 3 * SLICE]);
}

#[test]
fn a_snapshot_that_fails_is_reported_to_its_caller() {
    let mut served = Served::new(1);
    served.start_after("export FASTPS_FAILPOINT=snapshot_rename:1:EIO;", &[]);
    let client = served.connect(Ack::Logged);
    register(&client, "w", 10, Apply::Exact, sgd(), 0.0);
    let error = client.checkpoint(PATIENT).unwrap_err();
    assert!(error.shard == Some(0) && error.message.contains("rename"), "{error}");
    client.push(&[gradient("w", vec![-1.0; 10])], &options(PATIENT)).unwrap();
    assert_eq!(client.checkpoint(PATIENT).unwrap()[0].slices, 1);
}

#[test]
fn a_file_that_cannot_grow_is_reported_and_survived() {
    let mut served = Served::new(1);
    // 512 KiB a file: the log breaks, and a snapshot replaces it.
    served.start_after("trap '' XFSZ; ulimit -f 1024;", &[]);
    let client = served.connect(Ack::Logged);
    register(&client, "w", 1000, Apply::Exact, sgd(), 0.0);
    let push = |client: &Client| client.push(&[gradient("w", vec![-1.0; 1000])], &options(PATIENT));
    let (stop, count) = (AtomicBool::new(false), AtomicU64::new(0));
    std::thread::scope(|scope| {
        let (logged, applied) = (served.connect(Ack::Logged), served.connect(Ack::Applied));
        let (stop, count) = (&stop, &count);
        let end = AtTheEnd(stop);
        // This thread fills the log; the push that finds it full waits for the snapshot.
        scope.spawn(move || {
            while !stop.load(Ordering::Relaxed) {
                count.fetch_add(u64::from(push(&logged).is_ok()), Ordering::Relaxed);
            }
        });
        let (mut refused, mut after) = (0, 0);
        let begin = Instant::now();
        while after < 20 && begin.elapsed() < PATIENT {
            match push(&client) {
                Ok(_) => {
                    count.fetch_add(1, Ordering::Relaxed);
                    after += u32::from(refused > 0);
                }
                Err(PushError::Refused(error)) => {
                    assert!(error.kind == Kind::Unavailable && error.message.contains("log"), "{error}");
                    refused += 1;
                    // A client that does not wait for the log continues.
                    push(&applied).unwrap();
                    count.fetch_add(1, Ordering::Relaxed);
                }
                Err(other) => panic!("{other:?}"),
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        drop(end);
        assert!(refused > 0 && after == 20, "{refused} {after}");
    });
    let count = count.load(Ordering::Relaxed) as f32;
    assert_eq!(pull(&client, "w"), vec![count; 1000]);
    served.kill();
    served.start();
    assert_eq!(pull(&client, "w"), vec![count; 1000]);
}

#[test]
fn a_tensor_that_a_restart_would_not_know_is_not_registered() {
    let mut served = Served::new(1);
    // 512 KiB a file: while the large tensor exists, neither the log nor a snapshot fits.
    served.start_after("trap '' XFSZ; ulimit -f 1024;", &[]);
    let client = served.connect(Ack::Applied);
    register(&client, "w", 100, Apply::Exact, sgd(), 0.0);
    let add = |client: &Client, name: &str, n: usize, timeout| {
        let spec = TensorSpec::new(name, [n as u64], sgd());
        client.register(spec, View::Float32(&vec![0.0; n]), timeout)
    };
    let other = served.connect(Ack::Applied);
    std::thread::scope(|scope| {
        let large = scope.spawn(|| add(&other, "large", 1 << 18, PATIENT).unwrap_err());
        until("the log is broken", || {
            let shards = client.stats(PATIENT).unwrap().shards;
            shards[0].1.iter().any(|(name, value)| name == "log_broken" && *value == 1)
        });
        let error = add(&client, "small", 10, Duration::from_secs(3)).unwrap_err();
        assert!(error.message.contains("the log cannot be written"), "{error}");
        // Everything else continues.
        push_one(&client, "w", 100);
        assert_eq!(client.names(PATIENT).unwrap(), ["w".into()]);
        assert_eq!(pull(&client, "w"), vec![1.0; 100]);
        assert_eq!(served.terminate(), Some(1), "its end says that what it holds is not on its disk");
        other.close(PATIENT);
        assert_eq!(large.join().unwrap().tensor.as_deref(), Some("large"));
    });
    served.start();
    let client = served.connect(Ack::Applied);
    assert_eq!(client.names(PATIENT).unwrap(), ["w".into()]);
    register(&client, "small", 10, Apply::Exact, sgd(), 0.0);
}

#[test]
fn what_cannot_be_promised_is_refused() {
    let cluster = crate::cluster::Cluster::start(1);
    let options = ConnectOptions { timeout: PATIENT, ack: Ack::Logged, ..ConnectOptions::default() };
    let error = Client::connect(&cluster.addresses(), options).unwrap_err();
    assert!(error.kind == Kind::Precondition && error.message.contains("log"), "{error}");
    let mut served = Served::new(1);
    served.start();
    let mut second = Command::new(env!("CARGO_BIN_EXE_fastps-server"));
    second.args(["--listen", "127.0.0.1:0", "--data-dir"]).arg(&served.folder.0);
    let output = second.output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(!output.status.success() && said.contains("another server (process"), "{said}");
    // Without its files it is another server: it does not know the client, which gets an error.
    let client = served.connect(Ack::Applied);
    register(&client, "w", 3, Apply::Exact, sgd(), 1.0);
    served.kill();
    std::fs::remove_dir_all(&served.folder.0).unwrap();
    served.start();
    until("the client learns that the tensor is gone", || {
        client
            .push(&[gradient("w", vec![-1.0; 3])], &crate::durable::options(Duration::from_secs(5)))
            .is_err()
    });
}

/// The newest segment of the log, and the offsets of slice changes in it.
fn changes_in_log(folder: &Path) -> (PathBuf, Vec<u8>, Vec<usize>) {
    let mut segments: Vec<_> =
        std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()).collect();
    segments.retain(|path| path.file_name().unwrap().to_str().unwrap().starts_with("log-"));
    segments.sort();
    let path = segments.pop().unwrap();
    let bytes = std::fs::read(&path).unwrap();
    // A mark, a length, a checksum, and the kind of frame: 2 is a push.
    let (mut at, mut found) = (0, Vec::new());
    while at + 12 < bytes.len() {
        let length = u32::from_le_bytes(bytes[at + 4..at + 8].try_into().unwrap()) as usize;
        if bytes[at + 12] == 2 {
            found.push(at);
        }
        at += 12 + length;
    }
    (path, bytes, found)
}

/// Cuts the last changes off, as if the machine had lost power before they were written, and with them the
/// durable mark that follows.
fn forget_last_pushes(folder: &Path, pushes: usize) {
    let (path, bytes, changes) = changes_in_log(folder);
    std::fs::write(path, &bytes[..changes[changes.len() - pushes]]).unwrap();
}

fn push_one(client: &Client, name: &str, n: usize) {
    client.push(&[gradient(name, vec![-1.0; n])], &options(PATIENT)).unwrap();
}

/// Repeats a call until the client has reached the restarted server. Returns the losses that the call
/// reports.
fn losses_of(client: &Client, name: &str) -> Vec<Lost> {
    let begin = Instant::now();
    loop {
        match client.versions(&[name.into()], PATIENT) {
            Err(error) => {
                assert_eq!(error.kind, Kind::VersionsLost, "{error}");
                return error.lost.clone();
            }
            Ok(_) => assert!(begin.elapsed() < PATIENT, "no loss is reported"),
        }
    }
}

#[test]
fn each_client_learns_once_which_of_its_pushes_are_gone() {
    let mut served = Served::new(1);
    served.start();
    let (one, two, idle) =
        (served.connect(Ack::Applied), served.connect(Ack::Applied), served.connect(Ack::Applied));
    register(&one, "w", 10, Apply::Exact, sgd(), 0.0);
    // Version 1 is the registration. Then 5 of the first, 4 of the second, 3 of the first.
    (0..5).for_each(|_| push_one(&one, "w", 10));
    (0..4).for_each(|_| push_one(&two, "w", 10));
    assert_eq!(pull(&idle, "w"), [9.0; 10]);
    (0..3).for_each(|_| push_one(&one, "w", 10));
    served.kill_when_logged(13);
    forget_last_pushes(&served.folder.0.join("shard-0"), 5);
    served.start();
    let lost = |own, seen| vec![Lost { tensor: "w".into(), shard: 0, own: Some(own), seen, now: 8 }];
    assert_eq!(losses_of(&one, "w"), lost(3, 13));
    assert_eq!(losses_of(&two, "w"), lost(2, 10));
    assert_eq!(losses_of(&idle, "w"), lost(0, 10));
    for client in [&one, &two, &idle] {
        // Reported once; from there everything continues.
        assert_eq!(pull(client, "w"), [7.0; 10]);
        assert!(client.lost().is_empty());
    }
    push_one(&one, "w", 10);
    push_one(&two, "w", 10);
    assert_eq!(pull(&idle, "w"), [9.0; 10]);
    let counter = |client: &Client| {
        let stats = client.stats(PATIENT).unwrap();
        stats.client.into_iter().find(|(name, _)| name == "pushes_lost").unwrap().1
    };
    assert_eq!([counter(&one), counter(&two), counter(&idle)], [3, 2, 0]);
    // Nothing is lost, and nothing is reported.
    let before = pull(&one, "w");
    served.terminate();
    served.start();
    for client in [&one, &two, &idle] {
        until("the client is back", || {
            client.stats(PATIENT).is_ok_and(|stats| {
                stats.client.iter().any(|(name, count)| name == "reconnects" && *count >= 2)
            })
        });
        assert_eq!(pull(client, "w"), before);
        assert!(client.lost().is_empty());
    }
}

#[test]
fn what_was_under_way_hides_nothing_that_was_lost() {
    let mut served = Served::new(1);
    served.start();
    let client = served.connect(Ack::Applied);
    register(&client, "w", 10, Apply::Exact, sgd(), 0.0);
    register(&client, "racing", 10, Apply::Hogwild, sgd(), 0.0);
    (0..6).for_each(|_| push_one(&client, "w", 10));
    (0..2).for_each(|_| push_one(&client, "racing", 10));
    served.kill_when_logged(8);
    // Queued while no server runs: sent when it is back, after it has reported its state.
    let tickets: Vec<_> = (0..4)
        .map(|_| client.push_async(vec![gradient("w", vec![-1.0; 10])], options(PATIENT)).unwrap())
        .collect();
    forget_last_pushes(&served.folder.0.join("shard-0"), 2);
    served.start();
    for (k, ticket) in tickets.into_iter().enumerate() {
        // These are applied and get receipts.
        assert_eq!(ticket.wait(PATIENT).unwrap().unwrap()[0].version, 6 + k as u64);
    }
    let mut lost = losses_of(&client, "w");
    lost.sort_by(|a, b| b.tensor.cmp(&a.tensor));
    let expected =
        |name: &str, own, seen, now| Lost { tensor: name.into(), shard: 0, own: Some(own), seen, now };
    assert_eq!(lost, [expected("w", 2, 7, 5), expected("racing", 2, 3, 1)]);
    assert_eq!(pull(&client, "w"), [8.0; 10]);
}

#[test]
fn losses_of_two_restarts_add_up() {
    let mut served = Served::new(1);
    served.start();
    let client = served.connect(Ack::Applied);
    register(&client, "w", 10, Apply::Exact, sgd(), 0.0);
    (0..6).for_each(|_| push_one(&client, "w", 10));
    served.kill_when_logged(7);
    // Queued before the client reaches another server: a later call would report the first loss.
    let push = |_| client.push_async(vec![gradient("w", vec![-1.0; 10])], options(PATIENT)).unwrap();
    let tickets: Vec<_> = (0..4).map(push).collect();
    forget_last_pushes(&served.folder.0.join("shard-0"), 3);
    served.start();
    for (k, ticket) in tickets.into_iter().enumerate() {
        assert_eq!(ticket.wait(PATIENT).unwrap().unwrap()[0].version, 5 + k as u64);
    }
    served.kill_when_logged(4);
    forget_last_pushes(&served.folder.0.join("shard-0"), 2);
    served.start();
    let counter = || {
        let stats = client.stats(PATIENT).unwrap();
        stats.client.into_iter().find(|(name, _)| name == "pushes_lost").unwrap().1
    };
    until("both losses are found", || counter() == 5);
    let lost = |own, seen, now| Lost { tensor: "w".into(), shard: 0, own: Some(own), seen, now };
    assert_eq!(losses_of(&client, "w"), [lost(3, 7, 4), lost(2, 8, 6)]);
    assert_eq!(pull(&client, "w"), [5.0; 10]);
}

#[test]
fn logged_pushes_are_never_reported_as_lost() {
    let mut served = Served::new(1);
    served.start();
    let (client, other) = (served.connect(Ack::Logged), served.connect(Ack::Logged));
    register(&client, "w", 10, Apply::Exact, sgd(), 0.0);
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let (stop, end) = (&stop, AtTheEnd(&stop));
        for client in [&client, &other] {
            scope.spawn(move || {
                while !stop.load(Ordering::Relaxed) {
                    push_one(client, "w", 10);
                    pull(client, "w");
                }
            });
        }
        for _ in 0..3 {
            std::thread::sleep(Duration::from_millis(100));
            served.kill();
            served.start();
        }
        drop(end);
    });
    assert!(client.lost().is_empty() && other.lost().is_empty());
}

/// Releases a reader that waits for a pipe to be written.
struct Release(PathBuf);

impl Drop for Release {
    fn drop(&mut self) {
        let _ = std::fs::OpenOptions::new().read(true).write(true).open(&self.0);
    }
}

async fn health(address: &str) -> Option<ServingStatus> {
    let channel = tonic::transport::Endpoint::from_shared(format!("http://{address}")).unwrap();
    let mut health = HealthClient::new(channel.connect().await.ok()?);
    let answer = health.check(HealthCheckRequest { service: String::new() }).await.ok()?;
    Some(answer.into_inner().status())
}

#[tokio::test]
async fn a_client_of_a_recovering_server_sees_its_progress() {
    let mut served = Served::new(1);
    served.start();
    let client = served.connect(Ack::Logged);
    let n = SLICE + 9;
    register(&client, "w", n, Apply::Exact, sgd(), 0.0);
    push_one(&client, "w", n);
    served.terminate();
    // An older snapshot: the server reads its manifest after the newest one, and blocks until the pipe is
    // written.
    let older = served.folder.0.join("shard-0/generation-00000000");
    std::fs::create_dir(&older).unwrap();
    let manifest = older.join("MANIFEST");
    rustix::fs::mkfifoat(rustix::fs::CWD, &manifest, rustix::fs::Mode::RUSR | rustix::fs::Mode::WUSR)
        .unwrap();
    let address = served.address();
    let starting = tokio::task::spawn_blocking(move || {
        served.start();
        served
    });
    let release = Release(manifest);
    let recovering = " % of 1008.";
    let begin = Instant::now();
    while health(&address).await != Some(ServingStatus::NotServing) {
        assert!(begin.elapsed() < PATIENT, "health is not answered");
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    // Enough time to connect on a busy machine; each of three calls uses all of it.
    let brief = Duration::from_secs(6);
    let (asked, at) = (client.clone(), address.clone());
    let waiting = tokio::task::spawn_blocking(move || {
        let soon = ConnectOptions { timeout: brief, ..ConnectOptions::default() };
        let refused = Client::connect(&[at], soon).unwrap_err();
        assert!(refused.kind == Kind::Unavailable && refused.message.contains(recovering), "{refused}");
        let error = asked.names(brief).unwrap_err();
        assert!(error.message.contains(recovering), "{error}");
        let error = asked.versions(&["w".into()], brief).unwrap_err();
        assert!(error.message.contains(recovering), "{error}");
        // A call with a longer deadline waits.
        asked.push_async(vec![gradient("w", vec![-1.0; n])], options(PATIENT)).unwrap()
    });
    let waiting = waiting.await.unwrap();
    assert!(!waiting.is_done());
    drop(release);
    let served = starting.await.unwrap();
    assert_eq!(health(&address).await, Some(ServingStatus::Serving));
    tokio::task::spawn_blocking(move || {
        assert_eq!(waiting.wait(PATIENT).unwrap().unwrap()[0].version, 3);
        assert_eq!(pull(&client, "w"), vec![2.0; n]);
        drop((client, served));
    })
    .await
    .unwrap();
}
