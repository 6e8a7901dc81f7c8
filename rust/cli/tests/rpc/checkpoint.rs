//! `checkpoint restore` between real servers: with fewer or more shards, all state is the same and training
//! continues exactly.

use crate::durable::{Served, options, pull, register, sgd};
use crate::ledger::{AtTheEnd, PATIENT, SLICE, gradient, until};
use crate::stubs::{CLIENT, Shard, push, spec};
use fastps_client::{Ack, Client};
use fastps_core::error::Kind;
use fastps_core::optim::{Adam, Optimizer};
use fastps_core::tensor::Apply;
use fastps_core::verbs::prelude::*;
use fastps_core::verbs::{OptimizerState, SliceVersion};
use fastps_transport::convert::{Answer, Route};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

const BIG: usize = 3 * SLICE + 5;

fn run(args: &[&str], paths: &[&Path], more: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_fastps-server"));
    command.args(args).args(paths).args(more).env("FASTPS_LOG", "off").output().unwrap()
}

fn said(output: &Output) -> String {
    String::from_utf8_lossy(&[&output.stdout[..], &output.stderr[..]].concat()).into_owned()
}

fn files(folder: &Path, into: &mut BTreeMap<PathBuf, Vec<u8>>) {
    for entry in std::fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            files(&path, into);
        } else {
            into.insert(path.clone(), std::fs::read(path).unwrap());
        }
    }
}

/// All state that a user can see.
#[derive(Debug, PartialEq)]
struct Seen {
    names: Vec<Arc<str>>,
    values: Vec<Vec<f32>>,
    state: OptimizerState,
    versions: Vec<Vec<u64>>,
}

const NAMES: [&str; 4] = ["adam", "big", "racing", "stub"];

fn of_slices(versions: &[SliceVersion]) -> Vec<u64> {
    versions.iter().map(|slice| slice.version).collect()
}

fn see(client: &Client) -> Seen {
    let versions = client.versions(&NAMES.map(Arc::from), PATIENT).unwrap();
    Seen {
        names: client.names(PATIENT).unwrap(),
        values: NAMES.map(|name| pull(client, name)).to_vec(),
        state: client.state("adam", PATIENT).unwrap(),
        versions: NAMES.iter().map(|name| of_slices(versions.tensor(name).unwrap())).collect(),
    }
}

fn block<T>(work: impl Future<Output = T>) -> T {
    tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap().block_on(work)
}

fn change(client: &Client, times: usize) {
    for _ in 0..times {
        let all = [gradient("big", vec![-1.0; BIG]), gradient("adam", vec![-1.0; SLICE + 9])];
        client.push(&all, &options(PATIENT)).unwrap();
    }
}

fn reshape(from: u16, to: u16) {
    let mut served = Served::new(from);
    served.start();
    // The first tensor, of a plain client, is on shard 0.
    let (route, slice) = block(async {
        let mut stub = Shard::connect(&served.address(), CLIENT).await;
        let mut stream = stub.exchange().await;
        let (route, slice) = stub.create(&mut stream, "stub", &[0.0; 3]).await;
        let answer = stream.ask(push(route, slice, 1, &[-1.0; 3])).await;
        assert!(matches!(answer, Answer::Receipt(applied) if !applied.duplicate));
        (route, slice)
    });
    let client = served.connect(Ack::Logged);
    register(&client, "big", BIG, Apply::Exact, sgd(), 0.0);
    register(&client, "adam", SLICE + 9, Apply::Exact, Optimizer::Adam(Adam::default()), 0.5);
    register(&client, "racing", 10, Apply::Hogwild, sgd(), 0.25);
    change(&client, 3);
    let before = see(&client);
    let mut fresh = Served::new(to);
    let (source, target) = (served.folder.0.clone(), fresh.folder.0.clone());
    let shards = to.to_string();
    let restore = || run(&["checkpoint", "restore"], &[&source, &target], &["--shards", &shards]);
    let refused = restore();
    assert!(
        !refused.status.success() && said(&refused).contains("another server (process"),
        "{}",
        said(&refused)
    );
    if from == 2 {
        served.terminate();
    } else {
        served.kill();
    }
    let refused = run(&["--listen", "127.0.0.1:0", "--shards", &shards, "--data-dir"], &[&source], &[]);
    let way_out = format!("fastps checkpoint restore {0} {0}-{to} --shards {to}", source.display());
    assert!(!refused.status.success() && said(&refused).contains(&way_out), "{}", said(&refused));
    let (mut old, mut kept) = (BTreeMap::new(), BTreeMap::new());
    files(&source, &mut old);
    let restored = restore();
    assert!(restored.status.success() && said(&restored).contains("4 tensors"), "{}", said(&restored));
    files(&source, &mut kept);
    assert!(old == kept, "the source was changed");
    assert!(run(&["checkpoint", "verify"], &[&target], &[]).status.success());
    if to == 1 {
        fresh.port = served.port;
    }
    fresh.start();
    if to == 1 {
        // A client of the old cluster gets an error as soon as it reaches the new one.
        let refusal = || client.versions(&["stub".into()], Duration::from_secs(2)).unwrap_err();
        until("it ends with the number of shards", || {
            let refusal = refusal();
            refusal.kind == Kind::Fenced && refusal.got.as_deref() == Some("1 shard")
        });
    }
    let client = fresh.connect(Ack::Logged);
    assert_eq!(see(&client), before);
    block(repeat(&fresh, route, slice));
    change(&client, 4);
    for _ in 0..2 {
        assert!(pull(&client, "big").iter().all(|x| *x == 7.0));
        assert_eq!(pull(&client, "stub"), [1.0; 3]);
        fresh.kill();
        fresh.start();
    }
}

/// Repeats the push that was answered before, wherever its slice is now.
async fn repeat(served: &Served, route: Route, slice: u64) {
    let mut first = Shard::connect(&served.address(), CLIENT).await;
    let place = first.register(&spec("stub", 3)).await.unwrap().placement.unwrap();
    assert_eq!(place.slices, [slice]);
    let address = format!("127.0.0.1:{}", u32::from(served.port) + place.shards[0]);
    let mut stream = Shard::connect(&address, CLIENT).await.exchange().await;
    let answer = stream.ask(push(route, slice, 1, &[-1.0; 3])).await;
    assert!(
        matches!(answer, Answer::Receipt(applied) if applied.duplicate && applied.version == 2),
        "{answer:?}"
    );
}

#[test]
fn more_shards_go_on_where_one_ended() {
    reshape(1, 3);
}

#[test]
fn one_shard_continues_where_more_ended() {
    reshape(3, 1);
}

#[test]
fn two_shards_become_five() {
    reshape(2, 5);
}

/// The smallest and largest value of a tensor that `checkpoint export --consistent` wrote.
fn exported(served: &Served, file: &Path, name: &str) -> (f32, f32) {
    let bytes = std::fs::read(file).unwrap();
    assert!(served.child.is_some(), "a server is at work there");
    let tensors = safetensors::SafeTensors::deserialize(&bytes).unwrap();
    let tensor = tensors.tensor(name).unwrap();
    let values = tensor.data().as_chunks().0.iter().map(|x| f32::from_le_bytes(*x));
    values.fold((f32::MAX, f32::MIN), |(low, high), x| (low.min(x), high.max(x)))
}

#[test]
fn a_cut_has_whatever_its_pushes_rely_on_over_all_shards() {
    const CLIENTS: usize = 3;
    let mut served = Served::new(2);
    served.start();
    let client = served.connect(Ack::Applied);
    for name in ["a", "b"] {
        register(&client, name, 3 * SLICE, Apply::Exact, sgd(), 0.0);
    }
    let unknown = client.checkpoint_of_cut("absent", PATIENT).unwrap_err();
    assert!(unknown.message.contains("group \"absent\""), "{unknown}");
    let none = |cut: &[&str]| run(&["checkpoint", "export"], &[&served.folder.0, Path::new("/no/file")], cut);
    let refused = said(&none(&["--consistent"]));
    assert!(refused.contains("no cut over all shards"), "{refused}");
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let end = AtTheEnd(&stop);
        for _ in 0..CLIENTS {
            let (client, stop) = (served.connect(Ack::Applied), &stop);
            scope.spawn(move || {
                // Each push is sent after the answer to the previous one.
                while !stop.load(Ordering::Relaxed) {
                    for name in ["a", "b"] {
                        client.push(&[gradient(name, vec![-1.0; 3 * SLICE])], &options(PATIENT)).unwrap();
                    }
                }
            });
        }
        until("they push", || pull(&client, "b")[0] > 0.0);
        for round in 0..5 {
            let file = served.folder.0.join(format!("cut-{round}"));
            if round == 4 {
                let args = ["checkpoint", "save", &served.address(), "--consistent"];
                let saved = run(&args, &[], &[]);
                assert!(saved.status.success(), "{}", said(&saved));
            } else {
                client.checkpoint_of_cut("default", PATIENT).unwrap();
            }
            let written = run(&["checkpoint", "export"], &[&served.folder.0, &file], &["--consistent"]);
            assert!(written.status.success(), "{}", said(&written));
            let (a, b) = (exported(&served, &file, "a"), exported(&served, &file, "b"));
            // Whole pushes of each client, except for its last one, which had no answer yet.
            assert!(b.1 <= a.0 && a.1 - b.0 <= CLIENTS as f32, "{a:?} {b:?}");
            assert!(b.0 > 0.0, "nothing was pushed");
        }
        drop(end);
    });
    let listed = run(&["checkpoint", "list"], &[&served.folder.0], &[]);
    assert!(said(&listed).contains("a cut over group \"default\""), "{}", said(&listed));
    let (before, values) = (pull(&client, "a"), pull(&client, "b"));
    served.terminate();
    served.start();
    let client = served.connect(Ack::Applied);
    assert!(pull(&client, "a") == before && pull(&client, "b") == values);
}

#[test]
fn a_cut_gets_its_turn_though_snapshots_follow_each_other() {
    let mut served = Served::new(2);
    // The log is too long again before a snapshot is complete, as on a disk that is slower than the pushes.
    served.start_after("export FASTPS_FAILPOINT=snapshot_rename:1:1500ms;", &["--snapshot-after", "1"]);
    let client = served.connect(Ack::Applied);
    register(&client, "a", 3 * SLICE, Apply::Exact, sgd(), 0.0);
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let end = AtTheEnd(&stop);
        let (pusher, stop) = (served.connect(Ack::Applied), &stop);
        scope.spawn(move || {
            while !stop.load(Ordering::Relaxed) {
                pusher.push(&[gradient("a", vec![-1.0; 3 * SLICE])], &options(PATIENT)).unwrap();
            }
        });
        until("each shard has shortened its log", || {
            let is_written = |(name, count): &(String, u64)| name == "snapshot" && *count > 0;
            let shards = client.stats(PATIENT).unwrap().shards;
            shards.iter().all(|(_, counters)| counters.iter().any(is_written))
        });
        for _ in 0..2 {
            client.checkpoint_of_cut("default", PATIENT).unwrap();
        }
        drop(end);
    });
}
