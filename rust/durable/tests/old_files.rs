//! Files of earlier versions (`tests/vectors/durable-*`): every later version loads them and finds the state
//! in the `expected.json` beside them.
//!
//! `FASTPS_REGENERATE=1 cargo test -p fastps-durable --test old_files load` rewrites those of this version,
//! with [`tell`].
#![allow(missing_docs, clippy::unwrap_used, clippy::panic)]

use fastps_core::codec::{Codec, CodecId, Position};
use fastps_core::frame::{Action, Base, Identity, Push};
use fastps_core::isa::Isa;
use fastps_core::optim::{Adadelta, Adagrad, Adam, AdamW, Ftrl, Optimizer, Rmsprop, Sgd};
use fastps_core::rows::Indices;
use fastps_core::shard::{Shard, ShardConfig};
use fastps_core::tensor::{Apply, SliceId, TensorSpec};
use fastps_durable::{Event, Holding, Journal, Report, Reservation, SecretHash, Settings, Stage};
use serde_json::{Value, json};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

/// The folders that this version writes, with snapshots and without.
const CURRENT: [(&str, bool); 2] = [("durable-2", true), ("durable-2-log", false)];
const SHARD: &str = "shard-1";

fn vectors() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/vectors")
}

struct World {
    journal: Arc<Journal>,
    shard: Shard,
    report: Report,
}

impl World {
    fn open(path: &Path) -> Self {
        let path = path.to_owned();
        let journal = Journal::open(Settings {
            path,
            shard: 1,
            shards: 2,
            keep: 2,
            keep_for: Duration::ZERO,
            history: 0,
            accept_loss: false,
        })
        .unwrap();
        let config = ShardConfig::new(1, 1 << 30, Isa::get().unwrap());
        let shard = Shard::new(ShardConfig { sink: Some(journal.clone()), ..config });
        let report = journal.recover(&shard).unwrap();
        Self { journal, shard, report }
    }

    fn register(&self, id: u64, name: &str, shape: &[u64], apply: Apply, optimizer: Optimizer) {
        let shape = shape.to_vec();
        let spec = TensorSpec { apply, ..TensorSpec::new(name, shape, optimizer) };
        self.shard.create(&Arc::new(spec.clone()), 1, &[(SliceId(id), 0)]).unwrap();
        let reserved = Reservation { spec, group: 1, slices: vec![(id, 0)], stage: Stage::Open };
        self.journal.note(&Event::Reserved(id, reserved));
        let n = self.shard.slice(SliceId(id)).unwrap().len();
        self.push(id, 1, 1, Codec::Float32, None, &vec![0.5; n], |push| push.action = Action::Assign);
        self.journal.note(&Event::Sealed(id));
        self.journal.note(&Event::Committed(id));
    }

    /// A push, adjusted by `change`.
    #[allow(clippy::too_many_arguments, reason = "one line says what a push is")]
    fn push(
        &self,
        id: u64,
        client: u64,
        sequence: u64,
        codec: Codec,
        rows: Option<&[u32]>,
        values: &[f32],
        change: impl FnOnce(&mut Push<'_>),
    ) {
        let isa = Isa::get().unwrap();
        let (mut body, position) = (Vec::new(), Position { first_element: 0, sequence });
        codec.encode(isa, values, None, position, &mut body);
        let rows = rows.map(|rows| rows.iter().flat_map(|row| row.to_le_bytes()).collect::<Vec<_>>());
        let mut push = Push {
            indices: rows.as_deref().map(Indices::new),
            ..Push::gradient(
                SliceId(id),
                Identity { client, sequence },
                values.len() as u64,
                codec.id(),
                &body,
            )
        };
        change(&mut push);
        let slice = self.shard.slice(SliceId(id)).unwrap();
        self.shard.push_to(&slice, &push, || panic!("nothing is held")).unwrap().unwrap();
    }

    /// All that a start must restore, as JSON, with arrays in hex.
    fn all(&self) -> Value {
        let catalog = self.journal.catalog();
        let slice = |id: u64, name: &str| {
            let image = self.shard.slice(SliceId(id)).unwrap().image().unwrap();
            let standing = image.standing;
            let clients: Vec<_> = standing.clients.iter().map(|client| {
                let outcomes = client.outcomes.iter().map(|(sequence, applied)| match applied {
                    None => json!({"sequence": sequence}),
                    Some(applied) => json!({
                        "sequence": sequence, "version": applied.version, "own": applied.own,
                        "staleness": applied.staleness, "scale": applied.scale,
                    }),
                });
                let outcomes: Vec<_> = outcomes.collect();
                json!({"client": client.client, "own": client.own, "forgotten": client.forgotten, "outcomes": outcomes})
            }).collect();
            json!({
                "slice": id, "tensor": name, "version": standing.version, "step": standing.step,
                "assigns": standing.assigns, "clients": clients,
                "values": hex(image.values.as_ref()), "state": hex(image.state.as_ref()),
            })
        };
        let slices: Vec<_> = catalog.slices().map(|(id, _, held)| slice(id, &held.spec.name)).collect();
        let tensors = catalog.reservations.iter().map(|(id, held)| {
            let (spec, stage) = (&held.spec, format!("{:?}", held.stage));
            json!({"reservation": id, "tensor": spec.name, "shape": spec.shape, "stage": stage})
        });
        let tensors: Vec<_> = tensors.collect();
        let map = catalog.map.iter().map(|(id, held)| {
            json!({"reservation": id, "tensor": held.spec.name, "slices": held.slices, "shards": held.shards})
        });
        let map: Vec<_> = map.collect();
        let mut all = json!({"sessions": catalog.sessions, "tensors": tensors, "map": map, "slices": slices});
        // The first files have none.
        if !catalog.secrets.is_empty() {
            let secret = |(client, hash)| json!({"client": client, "sha256": hash});
            all["secrets"] = catalog.secrets.iter().map(secret).collect();
        }
        all
    }
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().fold(String::new(), |hex, byte| hex + &format!("{byte:02x}"))
}

/// JSON with one line per list entry.
fn lines(value: &Value) -> String {
    let parts = value.as_object().unwrap().iter().map(|(name, list)| {
        let entries: Vec<_> = list.as_array().unwrap().iter().map(|entry| format!("  {entry}")).collect();
        format!("\"{name}\": [\n{}\n]", entries.join(",\n"))
    });
    format!("{{\n{}\n}}\n", parts.collect::<Vec<_>>().join(",\n"))
}

/// Numbers that no codec represents exactly.
fn values(n: usize, seed: u32) -> Vec<f32> {
    (0..n as u32)
        .map(|i| (i.wrapping_mul(2_654_435_761) ^ seed.wrapping_mul(97)) as i32 as f32 / 2e9)
        .collect()
}

const CODECS: [Codec; 4] = [Codec::Float32, Codec::BFloat16, Codec::Int8 { seed: Some(3) }, Codec::OneBit];

fn optimizers() -> Vec<Optimizer> {
    vec![
        Optimizer::Sgd(Sgd { lr: 0.1, momentum: 0.9, dampening: 0.25, ..Sgd::default() }),
        Optimizer::Adagrad(Adagrad { initial_accumulator_value: 0.5, ..Adagrad::default() }),
        Optimizer::Rmsprop(Rmsprop { momentum: 0.5, centered: true, ..Rmsprop::default() }),
        Optimizer::Adadelta(Adadelta::default()),
        Optimizer::Adam(Adam { amsgrad: true, ..Adam::default() }),
        Optimizer::AdamW(AdamW::default()),
        Optimizer::Ftrl(Ftrl::default()),
    ]
}

/// Writes the files: every kind of record, twice before a snapshot and once after the last.
fn tell(path: &Path, snapshots: bool) -> Value {
    let world = World::open(path);
    for client in 1..=2 {
        world.journal.note(&Event::SessionBegan(client));
    }
    for client in 2..=4 {
        world.journal.note(&Event::SessionOpened(client, SecretHash::of(&[client as u8; 16])));
    }
    let counter = || Optimizer::Sgd(Sgd { lr: 1.0, ..Sgd::default() });
    world.register(10, "counted", &[5], Apply::Exact, counter());
    world.register(11, "rows", &[6, 3], Apply::Exact, Optimizer::Adagrad(Adagrad::default()));
    world.register(12, "racing", &[7], Apply::Hogwild, counter());
    world.register(13, "dropped", &[2], Apply::Exact, counter());
    for (k, optimizer) in optimizers().into_iter().enumerate() {
        world.register(20 + k as u64, &format!("layer {k}"), &[2, 35], Apply::Exact, optimizer);
    }
    let mut sequence = 10;
    for part in 0..3_u32 {
        for (k, codec) in CODECS.into_iter().enumerate() {
            sequence += 1;
            let client = 1 + sequence % 4;
            // Each push to `counted` adds 1.
            world.push(10, client, sequence, Codec::Float32, None, &[-1.0; 5], |_| {});
            for layer in 0..7 {
                let values = values(70, sequence as u32 + layer);
                let id = 20 + u64::from(layer);
                let base = Base { version: 1, own: (k % 2 == 0).then_some(0) };
                world.push(id, client, sequence, codec, None, &values, |push| {
                    push.lr = (k == 1).then_some(0.125);
                    push.scale = (k == 2).then_some(0.75);
                    push.momentum = (k == 3 && layer == 0).then_some(0.5);
                    push.base = (k > 0).then_some(base);
                });
            }
            let rows = [part, part + 2, 5];
            if codec.id() != CodecId::OneBit {
                world.push(11, client, sequence, codec, Some(&rows), &values(9, k as u32), |_| {});
            }
            // The log records the sync.
            world.journal.sync(world.journal.position()).unwrap();
        }
        sequence += 1;
        world.push(12, 1, sequence, Codec::Float32, None, &values(7, part), |push| {
            push.action = Action::Assign;
        });
        // State with a separate step count.
        world.push(24, 2, sequence, Codec::Float32, None, &vec![0.25; 70], |push| {
            push.action = Action::Assign;
        });
        world.push(24, 3, sequence, Codec::Float32, None, &vec![0.5; 3 * 70], |push| {
            push.action = Action::AssignState { step: 7 + u64::from(part) };
            push.count = 70;
        });
        world.shard.resolve(SliceId(20), Identity { client: 3, sequence: 1000 + sequence }).unwrap();
        if snapshots && part < 2 {
            world.journal.snapshot(&world.shard).unwrap();
        }
    }
    let spec = world.journal.catalog().reservations[&10].spec.clone();
    world.journal.note(&Event::Entered(90, Holding { spec, group: 1, slices: vec![10], shards: vec![1] }));
    let spec = world.journal.catalog().reservations[&11].spec.clone();
    world.journal.note(&Event::Entered(91, Holding { spec, group: 1, slices: vec![11], shards: vec![1] }));
    world.journal.note(&Event::Removed("rows".into()));
    world.journal.note(&Event::Dropped(vec![13]));
    world.shard.remove(&[SliceId(13)]);
    world.journal.note(&Event::SessionEnded(4));
    world.shard.forget_client(4);
    let all = world.all();
    world.journal.close();
    all
}

fn copy(from: &Path, to: &Path) {
    std::fs::create_dir_all(to).unwrap();
    for entry in std::fs::read_dir(from).unwrap() {
        let (path, to) = (entry.as_ref().unwrap().path(), to.join(entry.as_ref().unwrap().file_name()));
        if path.is_dir() {
            copy(&path, &to);
        } else {
            std::fs::copy(&path, &to).unwrap();
        }
    }
}

/// A temporary folder for this test, in memory where possible.
fn temporary(name: &str) -> PathBuf {
    let shm = Path::new("/dev/shm");
    let parent = if shm.is_dir() { shm.to_owned() } else { std::env::temp_dir() };
    let path = parent.join(format!("fastps-old-files-{}-{name}", std::process::id()));
    let _ = std::fs::remove_dir_all(&path);
    path
}

#[test]
fn files_of_every_version_load() {
    if std::env::var_os("FASTPS_REGENERATE").is_some() {
        for (name, snapshots) in CURRENT {
            let folder = vectors().join(name);
            let _ = std::fs::remove_dir_all(&folder);
            let expected = tell(&folder.join(SHARD), snapshots);
            std::fs::remove_file(folder.join(SHARD).join("lock")).unwrap();
            std::fs::write(folder.join("expected.json"), lines(&expected)).unwrap();
        }
    }
    let mut loaded = 0;
    for entry in std::fs::read_dir(vectors()).unwrap() {
        let folder = entry.unwrap().path();
        let name = folder.file_name().unwrap().to_str().unwrap().to_owned();
        if !name.starts_with("durable-") {
            continue;
        }
        let text = std::fs::read_to_string(folder.join("expected.json")).unwrap();
        let expected: Value = serde_json::from_str(&text).unwrap();
        // From the newest snapshot, and from the one before it with more of the log.
        for without in [None, Some("generation-00000002")] {
            let here = temporary(&name);
            copy(&folder.join(SHARD), &here);
            if let Some(without) = without.map(|without| here.join(without)).filter(|path| path.exists()) {
                std::fs::remove_dir_all(without).unwrap();
            }
            let world = World::open(&here);
            assert_eq!((world.all(), &world.report.notes), (expected.clone(), &Vec::new()), "{name}");
            assert!(world.report.repeated > 0, "{name}: {}", world.report);
            // The shard continues from there.
            world.push(10, 1, 500, Codec::Float32, None, &[-1.0; 5], |_| {});
            world.journal.snapshot(&world.shard).unwrap();
            let all = world.all();
            drop(world);
            assert_eq!(World::open(&here).all(), all, "{name}");
            std::fs::remove_dir_all(&here).unwrap();
        }
        loaded += 1;
    }
    assert!(loaded > 0);
}

/// The expectations, computed by hand: of 12 pushes of -1 at 0.5, each adds 1.
#[test]
fn the_expectations_match_the_story() {
    let text = std::fs::read_to_string(vectors().join(CURRENT[0].0).join("expected.json")).unwrap();
    let expected: Value = serde_json::from_str(&text).unwrap();
    let slices = expected["slices"].as_array().unwrap();
    let find = |name: &str| slices.iter().find(|slice| slice["tensor"] == name);
    let counted = find("counted").unwrap();
    assert_eq!(counted["values"], hex(&12.5_f32.to_le_bytes()).repeat(5));
    assert_eq!(
        (&counted["version"], &counted["step"], &counted["assigns"]),
        (&json!(13), &json!(12), &json!(1))
    );
    let values = values(7, 2);
    let racing: Vec<u8> = values.iter().flat_map(|x| x.to_le_bytes()).collect();
    assert_eq!(find("racing").unwrap()["values"], hex(&racing));
    assert!(find("dropped").is_none() && find("rows").is_some());
    assert_eq!(expected["sessions"], json!([1, 2, 3]));
    assert_eq!(expected["map"].as_array().unwrap().len(), 1);
    // A slice that remembers client 4 would take its pushes for duplicates.
    assert!(
        !slices
            .iter()
            .flat_map(|slice| slice["clients"].as_array().unwrap())
            .any(|client| client["client"] == 4)
    );
}
