//! Servers killed at named places (`fastps_core::failpoint`), and all processes killed at random moments:
//! every push with a receipt survives, and no push counts twice.

use crate::durable::{Folder, Served, connect, options, pull, push_on, register, sgd};
use crate::ledger::{AtTheEnd, PATIENT, gradient, until};
use fastps_client::{Ack, Client};
use fastps_core::isa::Isa;
use fastps_core::shard::{Shard, ShardConfig};
use fastps_core::tensor::{Apply, SliceId};
use fastps_core::verbs::prelude::*;
use fastps_core::verbs::{Gradient, PushError, SparseValues};
use fastps_durable::{Journal, Moment, Reading, Settings, past, restore};
use std::io::Read;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant, SystemTime};

const SLICE: usize = 258_048;
const BIG: usize = 2 * SLICE + 5;
const KILL: i32 = 9;

/// Failpoints on the path of a push, in order, and how often each is passed before the server is killed
/// there.
const PUSH: [&str; 15] = [
    "header_read:30",
    "half_frame:10",
    "decoded:30",
    "validated:30",
    "identity_checked:30",
    "applied:30",
    "log_write:40",
    "log_blocks:1",
    "log_blocks:45",
    "log_written:40",
    "log_cut:40",
    "log_sync:30",
    "log_synced:30",
    "before_ack:30",
    "after_ack:30",
];

/// Failpoints on the path of a snapshot.
const SNAPSHOT: [&str; 17] = [
    "segment_create:3",
    "segment_created:3",
    "segment_renamed:3",
    "segment_begun:3",
    "snapshot_create:1",
    "snapshot_write:1",
    "snapshot_write:6",
    "segment_end:3",
    "snapshot_sync:1",
    "snapshot_sync:3",
    "snapshot_manifest:1",
    "snapshot_sync:4",
    "snapshot_rename:1",
    "snapshot_renamed:1",
    "snapshot_complete:1",
    "snapshot_delete:2",
    "segment_delete:3",
];

/// Failpoints on the path of a start.
const START: [&str; 10] = [
    "recovery_loaded:1",
    "recovery_replayed:1",
    "segment_create:1",
    "segment_created:1",
    "log_cut:1",
    "log_sync:1",
    "segment_renamed:1",
    "segment_begun:1",
    "segment_end:1",
    "recovery_loaded:2",
];

/// Failpoints where history is thinned and shortened.
const HISTORY: [&str; 9] = [
    "history_thinned:1",
    "history_thinned:3",
    "snapshot_delete:1",
    "snapshot_delete:3",
    "history_shortened:1",
    "history_shortened:4",
    "segment_delete:1",
    "segment_delete:2",
    "snapshot_complete:3",
];

const WITH_HISTORY: [&str; 4] = ["--snapshot-every", "0.1", "--keep-history", "40MB"];

const SNAPSHOTS: [&str; 2] = ["--snapshot-every", "0.1"];

impl Served {
    /// Starts it, and waits until it has been killed at a failpoint.
    fn dies_at(&mut self, place: &str) {
        self.dies_with(place, &SNAPSHOTS);
    }

    fn dies_with(&mut self, place: &str, options: &[&str]) {
        let (shell, begin) = (format!("export FASTPS_FAILPOINT={place};"), Instant::now());
        loop {
            self.child = Some(self.command(&shell, options).spawn().unwrap());
            let child = self.child.as_mut().unwrap();
            let status = loop {
                if let Some(status) = child.try_wait().unwrap() {
                    break status;
                }
                assert!(begin.elapsed() < PATIENT, "{place} is never reached");
                std::thread::sleep(Duration::from_millis(1));
            };
            self.child = None;
            if status.signal() == Some(KILL) {
                return;
            }
            // Another test may have held the port for a moment.
            assert!(begin.elapsed() < PATIENT, "{place}: {status}");
        }
    }
}

/// Clients with `Ack::Logged`, each with its own tensor.
struct Load {
    clients: Vec<Arc<Client>>,
    /// The expected value of each tensor's slices.
    counts: Vec<Vec<u64>>,
}

const SIZES: [usize; 3] = [BIG, 1000, 10];

fn name(k: usize) -> String {
    format!("w{k}")
}

impl Load {
    fn new(served: &Served) -> Self {
        let clients: Vec<_> = SIZES.iter().map(|_| served.connect(Ack::Logged)).collect();
        for (k, (client, size)) in clients.iter().zip(SIZES).enumerate() {
            register(client, &name(k), size, Apply::Exact, sgd(), 0.0);
        }
        Self { clients, counts: SIZES.iter().map(|size| vec![0; size.div_ceil(SLICE)]).collect() }
    }

    /// Pushes until `during` is done.
    fn run(&mut self, during: impl FnOnce()) {
        let stop = AtomicBool::new(false);
        std::thread::scope(|scope| {
            let stop = &stop;
            let pushers: Vec<_> = self
                .clients
                .iter()
                .enumerate()
                .map(|(k, client)| scope.spawn(move || push_on(client, &name(k), SIZES[k], PATIENT, stop)))
                .collect();
            let end = AtTheEnd(stop);
            during();
            drop(end);
            for (counts, pusher) in self.counts.iter_mut().zip(pushers) {
                for (count, more) in counts.iter_mut().zip(pusher.join().unwrap()) {
                    *count += more;
                }
            }
        });
    }

    /// The server holds exactly the applied pushes.
    fn check(&self, what: &str) {
        for (k, (client, counts)) in self.clients.iter().zip(&self.counts).enumerate() {
            for (values, count) in pull(client, &name(k)).chunks(SLICE).zip(counts) {
                let wrong = values.iter().find(|x| **x != *count as f32);
                assert_eq!(wrong, None, "{what}: {}, not {count}", name(k));
            }
        }
    }
}

/// How long a restarted server receives pushes.
const A_WHILE: Duration = Duration::from_millis(30);

/// Kills a server under load at each failpoint in turn, and restarts it.
fn kill_at(places: &[&str]) {
    let (mut served, mut load) = loaded();
    for place in places {
        load.run(|| {
            served.dies_at(place);
            served.start_after("", &SNAPSHOTS);
            std::thread::sleep(A_WHILE);
        });
        load.check(place);
        served.kill();
    }
    assert!(load.counts.iter().flatten().all(|count| *count > 0), "{:?}", load.counts);
}

/// Every moment that the history names comes back: each push adds 1 to the version and to the values.
fn check_history(folder: &Path, what: &str) {
    let past = past(folder, |_| ()).unwrap();
    let first = past.shards.iter().map(|span| span.versions.0).max().unwrap();
    let last = past.shards.iter().map(|span| span.versions.1).max().unwrap();
    assert!(first < last, "{what}: versions {first} to {last}");
    for version in [first, first.midpoint(last), last] {
        let to = Folder::new();
        restore(folder, &to.0, 1, Reading::At(Moment::Version(version)))
            .unwrap_or_else(|error| panic!("{what}: version {version} of {first} to {last}: {error}"));
        let path = to.0.join("shard-0");
        let (keep_for, keep, history) = (Duration::ZERO, 2, 0);
        let settings = Settings { path, shard: 0, shards: 1, keep, keep_for, history, accept_loss: false };
        let journal = Journal::open(settings).unwrap();
        let held = Shard::new(ShardConfig::new(0, 1 << 30, Isa::get().unwrap()));
        journal.recover(&held).unwrap();
        let mut newest = 0;
        for (id, ..) in journal.catalog().slices() {
            let values = held.pull(1, SliceId(id)).unwrap();
            let own = held.slice(SliceId(id)).unwrap().version(0).0;
            let (floats, _) = values.as_ref().as_chunks::<4>();
            let wrong = floats.iter().map(|x| f32::from_le_bytes(*x)).find(|x| *x != (own - 1) as f32);
            assert!(wrong.is_none() && own <= version, "{what}: slice {id} at {own} of {version}: {wrong:?}");
            newest = newest.max(own);
        }
        assert_eq!(newest, version, "{what}");
    }
}

/// A server that is not running, and its clients.
fn loaded() -> (Served, Load) {
    let mut served = Served::new(2);
    served.start();
    let load = Load::new(&served);
    served.kill();
    (served, load)
}

#[test]
fn logged_pushes_survive_a_kill_at_every_step_of_a_push() {
    kill_at(&PUSH);
}

#[test]
fn logged_pushes_survive_a_kill_at_every_step_of_a_snapshot() {
    kill_at(&SNAPSHOT);
}

#[test]
fn history_survives_a_kill_while_it_is_thinned() {
    let (mut served, mut load) = loaded();
    for place in HISTORY {
        load.run(|| {
            served.dies_with(place, &WITH_HISTORY);
            served.start_after("", &WITH_HISTORY);
            std::thread::sleep(A_WHILE);
        });
        load.check(place);
        served.kill();
        check_history(&served.folder.0, place);
    }
}

/// Without space, the oldest history goes, and pushes go on.
#[test]
fn a_full_disk_ends_history_before_training() {
    let (mut served, mut load) = loaded();
    for error in ["log_write:60:ENOSPC", "log_blocks:60:ENOSPC", "snapshot_write:40:ENOSPC"] {
        let errors = served.folder.0.join("errors");
        let shell = format!("export FASTPS_FAILPOINT={error} FASTPS_LOG=error; exec 2>{};", errors.display());
        load.run(|| {
            served.start_after(&shell, &WITH_HISTORY);
            until(error, || std::fs::read_to_string(&errors).unwrap().contains("os error"));
            let client = served.connect(Ack::Logged);
            let one = || client.push(&[gradient("w1", vec![0.0; SIZES[1]])], &options(PATIENT)).is_ok();
            until("pushes work again", one);
            std::thread::sleep(Duration::from_millis(300));
        });
        served.kill();
        let last = past(&served.folder.0, |_| ()).unwrap().shards.iter().map(|span| span.versions.1).max();
        let to = Folder::new();
        restore(&served.folder.0, &to.0, 2, Reading::At(Moment::Version(last.unwrap()))).unwrap();
        served.start_after("", &WITH_HISTORY);
        load.check(error);
        served.kill();
    }
}

#[test]
fn logged_pushes_survive_a_kill_while_the_log_has_a_hole() {
    kill_at(&[
        "log_sync:12:EIO,snapshot_create:1",
        "log_write:14:ENOSPC,segment_renamed:3",
        "log_sync:12:EIO,snapshot_rename:1",
        "log_write:14:EIO,snapshot_renamed:1",
        "log_blocks:45:ENOSPC,snapshot_rename:1",
        "log_sync:12:EIO,snapshot_complete:1",
    ]);
}

#[test]
fn kills_during_recovery_cost_nothing() {
    let (mut served, mut load) = loaded();
    for place in START {
        load.run(|| {
            served.dies_at("log_cut:20");
            // Twice in a row.
            served.dies_at(place);
            served.dies_at(place);
            served.start_after("", &SNAPSHOTS);
            std::thread::sleep(A_WHILE);
        });
        load.check(place);
        served.kill();
    }
}

/// After a failed write, the next snapshot has what the log lacks.
#[test]
fn a_call_of_the_system_that_fails_once_is_reported_and_survived() {
    let (mut served, mut load) = loaded();
    let errors = [
        "log_write:12:ENOSPC",
        "log_blocks:1:EIO",
        "log_blocks:45:ENOSPC",
        "log_sync:12:EIO",
        "segment_create:3:ENOSPC",
        "snapshot_write:2:ENOSPC",
        "snapshot_sync:2:EIO",
        "snapshot_rename:1:EIO",
        "directory_sync:4:EIO",
    ];
    for error in errors {
        let errors = served.folder.0.join("errors");
        let shell = format!("export FASTPS_FAILPOINT={error} FASTPS_LOG=error; exec 2>{};", errors.display());
        load.run(|| {
            served.start_after(&shell, &SNAPSHOTS);
            let says = || std::fs::read_to_string(&errors).unwrap().contains("os error");
            until(error, says);
            // From here on all is as before: this push waits for the disk.
            let client = served.connect(Ack::Logged);
            let one = || client.push(&[gradient("w1", vec![0.0; SIZES[1]])], &options(PATIENT)).is_ok();
            until("pushes work again", one);
        });
        load.check(error);
        served.kill();
        served.start();
        load.check(error);
        served.kill();
    }
}

/// The rows of a tensor. Each row is pushed once or twice, so a lost push differs from one that counted
/// twice.
const ROWS: usize = 1 << 16;

/// Pushes -1 to one row, optionally together with another gradient.
fn push_row(client: &Client, name: &str, row: usize, more: Option<Gradient>) -> Result<u64, PushError> {
    let values = SparseValues { indices: vec![row as i64], values: vec![-1.0_f32] };
    let row = Gradient { name: name.into(), shape: vec![1], values: Arc::new(values) };
    let all: Vec<_> = std::iter::once(row).chain(more).collect();
    client.push(&all, &options(PATIENT)).map(|receipts| receipts[0].version)
}

/// For each pushed row, the version after it, and whether the receipt came before the end.
type Pushes = Vec<(u64, bool)>;

/// Pushes row by row. Stops at the first push that fails, which may or may not have been applied.
fn push_rows(address: &str, ack: Ack, first: usize, stop: &AtomicBool) -> Pushes {
    let (client, mut acknowledged) = (connect(address, ack), Vec::new());
    while !stop.load(Ordering::SeqCst) && acknowledged.len() < ROWS / 2 {
        let Ok(version) = push_row(&client, "rows", first + acknowledged.len(), None) else { break };
        acknowledged.push((version, !stop.load(Ordering::SeqCst)));
    }
    acknowledged
}

#[test]
fn applied_pushes_come_back_as_far_as_a_sync_had_covered() {
    let places = ["applied:300", "log_written:60", "log_cut:60", "log_synced:60", "snapshot_renamed:2"];
    let mut kept = 0;
    for place in places {
        let mut served = Served::new(1);
        served.start();
        register(&served.connect(Ack::Applied), "rows", ROWS, Apply::Exact, sgd(), 0.0);
        served.kill();
        let (stop, address) = (AtomicBool::new(false), served.address());
        let (applied, logged) = std::thread::scope(|scope| {
            let (stop, address) = (&stop, &*address);
            let applied = scope.spawn(move || push_rows(address, Ack::Applied, 0, stop));
            let logged = scope.spawn(move || push_rows(address, Ack::Logged, ROWS / 2, stop));
            let end = AtTheEnd(stop);
            served.dies_at(place);
            drop(end);
            served.start();
            (applied.join().unwrap(), logged.join().unwrap())
        });
        let rows = pull(&served.connect(Ack::Applied), "rows");
        assert!(rows.iter().all(|x| *x == 0.0 || *x == 1.0), "{place}: something counts twice");
        let there = |rows: &[f32], acknowledged: &Pushes| {
            let acknowledged = acknowledged.iter().take_while(|(_, before)| *before).count();
            let there = rows.iter().take_while(|x| **x == 1.0).count();
            // After the first lost push, no other may be there except the one under way.
            assert!(there >= acknowledged || rows[there..acknowledged].iter().all(|x| *x == 0.0), "{place}");
            (acknowledged, there)
        };
        let (acknowledged, there_logged) = there(&rows[ROWS / 2..], &logged);
        assert!(there_logged >= acknowledged, "{place}: {there_logged} of {acknowledged}");
        let synced = logged[..acknowledged].last().map_or(0, |(version, _)| *version);
        let (acknowledged, there_applied) = there(&rows, &applied);
        let covered = applied[..acknowledged].iter().filter(|(version, _)| *version <= synced).count();
        assert!(there_applied >= covered, "{place}: {there_applied}, not {covered}");
        kept += covered;
    }
    assert!(kept > 0);
}

/// A client in its own process, for the next test. Prints which row it is about to push and which one was
/// acknowledged.
#[test]
fn a_client_that_will_be_killed() {
    let Ok(task) = std::env::var("FASTPS_KILLED_CLIENT") else { return };
    let [address, k, first] = *task.split(' ').collect::<Vec<_>>() else { panic!("{task}") };
    let (k, first): (usize, usize) = (k.parse().unwrap(), first.parse().unwrap());
    let client = connect(address, if k == 2 { Ack::Applied } else { Ack::Logged });
    for i in first.. {
        println!("\nsent {i}");
        let more = (k == 0).then(|| gradient("shared", vec![-1.0; SHARED]));
        push_row(&client, &name(k), i % ROWS, more).unwrap();
        println!("\ndone {i}");
    }
}

const SHARED: usize = SLICE + 5;

/// The least and the most that a value may be.
type Bounds = (f32, f32);

/// A server with two shards, three clients, and their expected values over any number of kills.
struct Everything {
    served: Served,
    rows: Vec<Vec<Bounds>>,
    shared: [Bounds; 2],
    /// The next row of each client.
    next: [usize; 3],
}

/// All processes of a round, killed on drop.
struct Group(i32);

impl Group {
    fn kill(&self) {
        let group = rustix::process::Pid::from_raw(self.0).unwrap();
        let _ = rustix::process::kill_process_group(group, rustix::process::Signal::KILL);
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        self.kill();
    }
}

impl Everything {
    fn new() -> Self {
        let mut served = Served::new(2);
        served.start();
        let client = served.connect(Ack::Applied);
        for k in 0..3 {
            register(&client, &name(k), ROWS, Apply::Exact, sgd(), 0.0);
        }
        register(&client, "shared", SHARED, Apply::Exact, sgd(), 0.0);
        served.kill();
        let rows = vec![vec![(0.0, 0.0); ROWS]; 3];
        Self { served, rows, shared: [(0.0, 0.0); 2], next: [0; 3] }
    }

    /// Starts all processes, and kills them after a while.
    fn round(&mut self, time: Duration) {
        let mut server = self.served.command("", &SNAPSHOTS).process_group(0).spawn().unwrap();
        let group = Group(server.id() as i32);
        let this = std::env::current_exe().unwrap();
        let mut clients: Vec<_> = (0..3)
            .map(|k| {
                let mut client = Command::new(&this);
                client.args(["kills::a_client_that_will_be_killed", "--exact", "--nocapture"]);
                client.env("FASTPS_KILLED_CLIENT", format!("{} {k} {}", self.served.address(), self.next[k]));
                client.stdout(Stdio::piped()).stderr(Stdio::null()).process_group(group.0).spawn().unwrap()
            })
            .collect();
        std::thread::sleep(time);
        group.kill();
        server.wait().unwrap();
        for (k, client) in clients.iter_mut().enumerate() {
            let mut said = String::new();
            client.stdout.take().unwrap().read_to_string(&mut said).unwrap();
            client.wait().unwrap();
            for line in said.lines() {
                if let Some(row) = line.strip_prefix("sent ") {
                    let row: usize = row.parse().unwrap();
                    self.next[k] = row + 1;
                    self.sent(k, row % ROWS);
                } else if let Some(row) = line.strip_prefix("done ") {
                    self.done(k, row.parse::<usize>().unwrap() % ROWS);
                }
            }
        }
    }

    fn sent(&mut self, k: usize, row: usize) {
        self.rows[k][row].1 += 1.0;
        if k == 0 {
            self.shared.iter_mut().for_each(|(_, most)| *most += 1.0);
        }
    }

    fn done(&mut self, k: usize, row: usize) {
        if k < 2 {
            self.rows[k][row].0 += 1.0;
        }
        if k == 0 {
            self.shared.iter_mut().for_each(|(least, _)| *least += 1.0);
        }
    }

    /// Checks that the state on disk is whole and within bounds; from here on, exactly this state must be
    /// there.
    fn check(&mut self) {
        for shard in 0..2 {
            let path = self.served.folder.0.join(format!("shard-{shard}"));
            let (path, keep_for) = (path.clone(), Duration::ZERO);
            let settings = Settings {
                path: path.clone(),
                shard,
                shards: 2,
                keep: 2,
                keep_for,
                history: 0,
                accept_loss: false,
            };
            // No process holds the lock any more.
            let journal = Journal::open(settings).unwrap();
            let held = Shard::new(ShardConfig::new(shard, 1 << 30, Isa::get().unwrap()));
            let report = journal.recover(&held).unwrap();
            let torn = |note: &String| note.contains("are not a whole record");
            assert!(report.notes.iter().all(torn), "{report:?}");
            let names = std::fs::read_dir(&path).unwrap().map(|entry| entry.unwrap().file_name());
            let odd = |name: &str| name.starts_with("damaged-") || name.contains(".tmp");
            let odd: Vec<_> = names.filter(|name| odd(name.to_str().unwrap())).collect();
            assert!(odd.is_empty(), "{odd:?}");
            for (id, index, reservation) in journal.catalog().slices() {
                let values = held.pull(1, SliceId(id)).unwrap();
                let (values, _) = values.as_ref().as_chunks::<4>();
                let values = values.iter().map(|x| f32::from_le_bytes(*x));
                let name = &*reservation.spec.name;
                if name == "shared" {
                    let bounds = &mut self.shared[index];
                    values.for_each(|x| enter(bounds, x, name, index));
                } else {
                    let k: usize = name[1..].parse().unwrap();
                    let rows = self.rows[k].iter_mut().enumerate().zip(values);
                    rows.for_each(|((row, bounds), x)| enter(bounds, x, name, row));
                }
            }
        }
    }
}

/// Checks that a value is within its bounds, and narrows them to it.
fn enter(bounds: &mut Bounds, x: f32, name: &str, row: usize) {
    assert!(bounds.0 <= x && x <= bounds.1, "{name}, row {row}: {x}, not {bounds:?}");
    *bounds = (x, x);
}

#[test]
fn everything_is_killed_at_once_at_random_moments() {
    let kills: u64 = std::env::var("FASTPS_KILLS").map_or(12, |kills| kills.parse().unwrap());
    let seed = std::env::var("FASTPS_SEED").map_or_else(
        |_| SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap().as_nanos() as u64,
        |seed| seed.parse().unwrap(),
    );
    println!("FASTPS_SEED={seed}");
    let mut random = seed | 1;
    let mut everything = Everything::new();
    let mut round = 0;
    // If the machine is so slow that a client could not push, there are more and longer rounds.
    while round < kills || everything.next.contains(&0) {
        assert!(round < 4 * kills, "{round} kills, {:?} pushes", everything.next);
        random ^= random << 13;
        random ^= random >> 7;
        random ^= random << 17;
        // During the start or during work.
        let most = if random.is_multiple_of(4) { 60 } else { 500 << (round / kills) };
        everything.round(Duration::from_millis((random >> 8) % most));
        everything.check();
        round += 1;
    }
    println!("{round} kills, {:?} pushes", everything.next);
    everything.served.start();
    let client = everything.served.connect(Ack::Applied);
    for k in 0..3 {
        let expected: Vec<_> = everything.rows[k].iter().map(|(least, _)| *least).collect();
        assert!(pull(&client, &name(k)) == expected);
    }
}

/// The servers of these tests have failpoints; `tests/repository/test_wheel.py` looks for the same word in
/// released binaries.
#[test]
fn the_server_of_these_tests_has_failpoints() {
    let program = std::fs::read(env!("CARGO_BIN_EXE_fastps-server")).unwrap();
    let word = b"FASTPS_FAILPOINT";
    assert!(program.windows(word.len()).any(|bytes| bytes == word));
}
