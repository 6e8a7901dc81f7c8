//! Property tests of the file formats: what is written is read back unchanged, and changed bytes are detected
//! or have no effect.

use crate::catalog::secret::SecretHash;
use crate::catalog::{Catalog, Event, Member, Reservation, Stage};
use crate::files::output::{Extent, FileDigest, Output};
use crate::frame::{self, Author, Content, Origin, SliceEntry, VectorsEntry};
use crate::log::read::{self, SegmentEnd};
use crate::snapshot::manifest::{Cut, Manifest};
use crate::snapshot::safetensors::Layout;
use fastps_core::codec::CodecId;
use fastps_core::dtype::DType;
use fastps_core::frame::{Action, Base, Identity};
use fastps_core::identity::{Remembered, Settled};
use fastps_core::mode::{MembershipRequest, Mode, Quorum, Robust};
use fastps_core::optim::{Adam, Optimizer, Sgd};
use fastps_core::program::{Command, Op, Program};
use fastps_core::record::{Identities, ProgramRecord, Record, SumRecord};
use fastps_core::rows::Indices;
use fastps_core::slice::{Standing, VectorsStanding};
use fastps_core::tensor::{Apply, SliceId, Space, SpaceId, TensorSpec};
use proptest::collection::{btree_map, btree_set, vec};
use proptest::prelude::*;
use std::ops::ControlFlow;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

const ORIGIN: Origin = Origin { id: 77, shard: 1, shards: 3 };

/// A push that owns its bytes.
#[derive(Clone, Debug)]
struct Pushed {
    numbers: [u64; 6],
    action: Action,
    base: Option<Base>,
    hogwild: bool,
    once: bool,
    rows: Option<Vec<u8>>,
    body: Vec<u8>,
    lr: f64,
    scale: f32,
    momentum: f64,
    beta1: Option<f64>,
    shared_by: Vec<u8>,
    note: String,
}

impl Pushed {
    fn record(&self) -> Record<'_> {
        let [slice, version, client, sequence, codec, acknowledged] = self.numbers;
        Record {
            slice: SliceId(slice),
            apply: if self.hogwild { Apply::Hogwild } else { Apply::Exact },
            version,
            identity: Identity { client, sequence },
            base: self.base,
            once: self.once,
            acknowledged,
            action: self.action,
            indices: self.rows.as_deref().map(Indices::new),
            codec: CodecId::ALL[codec as usize % 4],
            body: &self.body,
            lr: self.lr,
            scale: self.scale,
            momentum: self.momentum,
            beta1: self.beta1,
            shared_by: Identities::new(&self.shared_by).unwrap_or_default(),
            note: &self.note,
        }
    }
}

fn pushed() -> impl Strategy<Value = Pushed> {
    let action = prop_oneof![
        Just(Action::Gradient),
        Just(Action::Assign),
        any::<u64>().prop_map(|step| Action::AssignState { step })
    ];
    let base = (any::<u64>(), any::<Option<u64>>()).prop_map(|(version, own)| Base { version, own });
    let rows = vec(any::<[u8; 4]>(), 0..9).prop_map(|rows| rows.concat());
    let options = (proptest::option::of(base), any::<bool>(), any::<bool>(), proptest::option::of(rows));
    let factors = (any::<f64>(), any::<f32>(), any::<f64>(), any::<Option<f64>>());
    let shared_by = vec(any::<[u8; Identities::BYTES]>(), 0..5).prop_map(|identities| identities.concat());
    (any::<[u64; 6]>(), action, options, (vec(any::<u8>(), 0..300), shared_by, "[a-zé ]{0,9}"), factors)
        .prop_map(
            |(
                numbers,
                action,
                (base, hogwild, once, rows),
                (body, shared_by, note),
                (lr, scale, momentum, beta1),
            )| {
                Pushed {
                    numbers,
                    action,
                    base,
                    hogwild,
                    once,
                    rows,
                    body,
                    lr,
                    scale,
                    momentum,
                    beta1,
                    shared_by,
                    note,
                }
            },
        )
}

fn standing() -> impl Strategy<Value = Standing> {
    let applied = (any::<[u64; 2]>(), proptest::option::of(0..u64::MAX), any::<f32>())
        .prop_map(|([version, own], staleness, scale)| Settled { version, own, staleness, scale });
    let outcomes = vec((any::<u64>(), proptest::option::of(applied)), 0..6);
    let client =
        (any::<[u64; 3]>(), 0_u64..3, outcomes).prop_map(|([client, own, forgotten], assigned, outcomes)| {
            Remembered { client: client.max(1), own, assigned, forgotten, outcomes }
        });
    let gradients = vec(any::<(u64, u8)>(), 0..5);
    (any::<[u64; 3]>(), vec(client, 0..4), gradients).prop_map(
        |([version, step, assigns], clients, gradients)| Standing {
            version,
            step,
            assigns,
            clients,
            gradients,
        },
    )
}

fn entry() -> impl Strategy<Value = SliceEntry> {
    let extent = || {
        (any::<[u64; 2]>(), any::<u32>()).prop_map(|([offset, bytes], crc32c)| Extent {
            offset,
            bytes,
            crc32c,
        })
    };
    (any::<u64>(), extent(), extent(), standing()).prop_map(|(slice, values, state, standing)| SliceEntry {
        slice,
        values,
        state,
        standing,
    })
}

fn spec() -> impl Strategy<Value = TensorSpec> {
    (".{0,20}", vec(any::<u64>(), 0..4), any::<bool>(), ".{0,5}").prop_map(|(name, shape, hogwild, group)| {
        TensorSpec {
            apply: if hogwild { Apply::Hogwild } else { Apply::Exact },
            group: group.into(),
            ..TensorSpec::new(
                name,
                shape,
                if hogwild {
                    Optimizer::Sgd(Sgd { lr: 1.0 / 3.0, ..Sgd::default() })
                } else {
                    Optimizer::Adam(Adam::default())
                },
            )
        }
    })
}

fn reservation() -> impl Strategy<Value = Reservation> {
    let stage = prop_oneof![Just(Stage::Open), Just(Stage::Sealed), Just(Stage::Committed)];
    (spec(), any::<u32>(), vec(any::<(u64, u64)>(), 0..4), stage)
        .prop_map(|(spec, group, slices, stage)| Reservation { spec, group, slices, stage })
}

fn robust() -> impl Strategy<Value = Option<Robust>> {
    let trimmed = any::<u32>().prop_map(|trim| Some(Robust::TrimmedMean(trim)));
    prop_oneof![Just(None), Just(Some(Robust::Median)), trimmed]
}

fn member() -> impl Strategy<Value = Member> {
    let quorum = (any::<[u32; 4]>(), any::<[bool; 3]>(), any::<[u64; 3]>(), robust()).prop_map(
        |(counts, flags, numbers, robust)| {
            let ([workers, backup, enough, fragments], [deterministic, sum, weighted]) = (counts, flags);
            let [grace_ms, every, overlap] = numbers;
            Mode::Sync(Quorum {
                workers,
                backup,
                deterministic,
                sum,
                weighted,
                robust,
                enough,
                grace_ms,
                every,
                fragments,
                overlap,
            })
        },
    );
    let bounded = any::<u64>().prop_map(|staleness| Mode::Bounded { staleness });
    let warm = any::<u64>().prop_map(|steps| Mode::WarmStart { steps });
    let mode = prop_oneof![Just(Mode::Free), quorum, bounded, warm];
    let seat = (mode, proptest::option::of(any::<u32>()), ".{0,9}")
        .prop_map(|(mode, rank, name)| MembershipRequest::new(mode, rank, name));
    (any::<u64>(), any::<u32>(), seat).prop_map(|(client, group, seat)| Member { client, group, seat })
}

fn secret() -> impl Strategy<Value = SecretHash> {
    any::<[u8; 16]>().prop_map(|secret| SecretHash::of(&secret))
}

fn event() -> impl Strategy<Value = Event> {
    prop_oneof![
        (member(), any::<bool>()).prop_map(|(member, complete)| Event::Joined(member, complete)),
        (any::<u64>(), any::<u32>(), any::<bool>()).prop_map(|(client, group, warm)| Event::Left {
            client,
            group,
            warm
        }),
        any::<u64>().prop_map(Event::SessionBegan),
        (any::<u64>(), secret()).prop_map(|(client, secret)| Event::SessionOpened(client, secret)),
        any::<u64>().prop_map(Event::SessionEnded),
        any::<(u64, u32, u32)>().prop_map(|(client, at, remembered)| Event::SessionOver {
            client,
            at,
            remembered
        }),
        (any::<u64>(), reservation()).prop_map(|(id, reservation)| Event::Reserved(id, reservation)),
        vec(any::<u64>(), 0..5).prop_map(Event::Dropped),
        ".{0,9}".prop_map(|name| Event::Removed(name.into())),
    ]
}

fn manifest() -> impl Strategy<Value = Manifest> {
    let written = (any::<u64>(), any::<u32>()).prop_map(|(bytes, crc32c)| FileDigest { bytes, crc32c });
    let catalog = (
        btree_set(any::<u64>(), 0..5),
        btree_map(any::<u64>(), secret(), 0..5),
        btree_map(any::<u64>(), reservation(), 0..3),
        vec(member(), 0..3),
        btree_set(any::<u32>(), 0..3),
        any::<u64>(),
    )
        .prop_map(|(sessions, secrets, reservations, members, complete, cluster_id)| Catalog {
            sessions,
            secrets,
            reservations,
            members,
            complete,
            cluster_id,
            ..Catalog::default()
        });
    let files = btree_map("[a-z.]{1,9}", written, 0..4);
    let cut = proptest::option::of((any::<u64>(), ".{0,9}").prop_map(|(id, group)| Cut { id, group }));
    let gone = btree_set(any::<u64>(), 0..4);
    let not_finite = btree_set(".{0,9}", 0..3);
    (any::<[u64; 6]>(), any::<[u32; 2]>(), files, (gone, not_finite), cut, catalog).prop_map(
        |(
            [id, generation, log, written, incarnation, predecessor],
            [shard, shards],
            files,
            (gone, not_finite),
            cut,
            catalog,
        )| Manifest {
            format: frame::FORMAT,
            incarnation,
            predecessor,
            durable: (log % 2 == 0).then_some((log, written)),
            id,
            shard,
            shards,
            generation,
            log,
            written,
            files,
            gone,
            not_finite,
            cut,
            catalog: catalog.into(),
        },
    )
}

/// A change of some bytes.
#[derive(Clone, Debug)]
enum Mishap {
    Flip(usize, u8),
    Cut(usize),
    Insert(usize, Vec<u8>),
    Leave(usize, usize),
    Copy(usize, usize, usize),
}

fn mishap() -> impl Strategy<Value = Mishap> {
    prop_oneof![
        (any::<usize>(), 0..8_u8).prop_map(|(at, bit)| Mishap::Flip(at, bit)),
        any::<usize>().prop_map(Mishap::Cut),
        (any::<usize>(), vec(any::<u8>(), 1..40)).prop_map(|(at, bytes)| Mishap::Insert(at, bytes)),
        (any::<usize>(), 1..60_usize).prop_map(|(at, n)| Mishap::Leave(at, n)),
        (any::<usize>(), any::<usize>(), 1..60_usize).prop_map(|(from, to, n)| Mishap::Copy(from, to, n)),
    ]
}

impl Mishap {
    fn befall(&self, bytes: &mut Vec<u8>) {
        let len = bytes.len();
        match self {
            Self::Flip(at, bit) => bytes[at % len] ^= 1 << bit,
            Self::Cut(at) => bytes.truncate(at % len),
            Self::Insert(at, new) => drop(bytes.splice(at % len..at % len, new.iter().copied())),
            Self::Leave(at, n) => drop(bytes.drain(at % len..(at % len + n).min(len))),
            Self::Copy(from, to, n) => {
                let (from, to) = (from % len, to % len);
                bytes.copy_within(from..(from + n.min(&(len - to))).min(len), to);
            }
        }
    }
}

/// A log segment with these frames.
fn segment_of(frames: &[Vec<u8>], last: Option<u64>) -> Vec<u8> {
    let mut bytes = Vec::new();
    frame::segment(&mut bytes, 4, false, ORIGIN, Author::default());
    for frame in frames {
        bytes.extend(frame);
    }
    if let Some(last) = last {
        frame::end(&mut bytes, last);
    }
    frame::seal(&mut bytes);
    bytes
}

/// Reads such a file: the content of each frame, and how the file ends or why it cannot be used.
fn read_back(bytes: &[u8]) -> (Vec<String>, Result<SegmentEnd, String>) {
    static NEXT: AtomicU64 = AtomicU64::new(0);
    let shm = PathBuf::from("/dev/shm");
    let parent = if shm.is_dir() { shm } else { std::env::temp_dir() };
    let path = parent.join(format!(
        "fastps-segment-{}-{}",
        std::process::id(),
        NEXT.fetch_add(1, Ordering::Relaxed)
    ));
    std::fs::write(&path, bytes).unwrap();
    let mut said = Vec::new();
    let end = read::read(&path, 4, Some(ORIGIN), |_, content| {
        said.push(format!("{content:?}"));
        Ok(ControlFlow::Continue(()))
    });
    std::fs::remove_file(&path).unwrap();
    (said, end.map(|(_, end)| end).map_err(|why| format!("{why:?}")))
}

fn space() -> impl Strategy<Value = Arc<Space>> {
    (any::<u64>(), ".{1,9}", btree_set("[a-v]{1,5}", 1..5)).prop_map(|(id, name, vectors)| {
        let vectors = vectors.into_iter().map(Arc::from).collect();
        Arc::new(Space { id: SpaceId(id), name: name.into(), vectors })
    })
}

fn vectors_entry() -> impl Strategy<Value = VectorsEntry> {
    let grid = proptest::option::of(any::<i32>());
    (any::<[u64; 4]>(), space(), vec(any::<f64>(), 0..5), any::<f64>(), any::<bool>(), grid).prop_map(
        |([slice, term, number, batch], space, results, largest, open, grid)| VectorsEntry {
            slice,
            space,
            standing: VectorsStanding { term, number, results, batch, open, largest, grid },
        },
    )
}

/// The frame of a program of each operation.
fn program(to: &mut Vec<u8>, [slice, version, space, term, number]: [u64; 5], sum: Option<&[u8]>) -> bool {
    let ops = vec![
        Op::Combine { to: 1, terms: vec![(0.5, 0), (-1.5, 2)] },
        Op::Block { rows: vec![0, 1], columns: vec![2] },
        Op::EndSum { to: 2 },
        Op::BeginSum { batch: number, portions: 3, largest: 1.5, coarser: 2 },
    ];
    let command = Command { space: SpaceId(space), term, number };
    let sum = sum.map(|values| SumRecord { values, largest: 2.5 });
    let (slice, program) = (SliceId(slice), &Program::new(ops).unwrap());
    frame::program(to, &ProgramRecord { slice, version, command, program, sum })
}

fn frames() -> impl Strategy<Value = Vec<Vec<u8>>> {
    let frame = prop_oneof![
        pushed().prop_map(|pushed| {
            let mut to = Vec::new();
            frame::push(&mut to, &pushed.record());
            to
        }),
        any::<[u64; 3]>().prop_map(|[slice, client, sequence]| {
            let mut to = Vec::new();
            frame::fence(&mut to, SliceId(slice), Identity { client, sequence });
            to
        }),
        event().prop_map(|event| {
            let mut to = Vec::new();
            frame::event(&mut to, &event);
            to
        }),
        (any::<u64>(), space()).prop_map(|(slice, space)| {
            let mut to = Vec::new();
            frame::space_opened(&mut to, SliceId(slice), &space);
            to
        }),
        (any::<[u64; 5]>(), proptest::option::of(vec(any::<u8>(), 0..40))).prop_map(|(numbers, sum)| {
            let mut to = Vec::new();
            program(&mut to, numbers, sum.as_deref());
            to
        }),
    ];
    vec(frame, 0..8)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 2000, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn a_push_round_trips(pushed in pushed()) {
        let mut bytes = Vec::new();
        prop_assert!(frame::push(&mut bytes, &pushed.record()));
        frame::seal(&mut bytes);
        let (content, rest) = frame::split(&bytes).unwrap();
        prop_assert!(rest.is_empty());
        let Some(Content::Push(read)) = frame::read(content) else { panic!("it is no push") };
        // An assignment has no step, and a NaN keeps its bits.
        prop_assert_eq!(format!("{read:?}"), format!("{:?}", pushed.record()));
        prop_assert_eq!(read.lr.to_bits(), pushed.lr.to_bits());
    }

    #[test]
    fn a_space_round_trips(entry in vectors_entry(), numbers: [u64; 5], sum in vec(any::<u8>(), 0..40)) {
        let mut bytes = Vec::new();
        prop_assert!(frame::vectors(&mut bytes, &entry));
        prop_assert!(program(&mut bytes, numbers, Some(&sum)));
        frame::seal(&mut bytes);
        let (content, rest) = frame::split(&bytes).unwrap();
        let Some(Content::Vectors(read)) = frame::read(content) else { panic!("it is no space") };
        prop_assert_eq!(format!("{read:?}"), format!("{entry:?}"));
        let (content, _) = frame::split(rest).unwrap();
        let Some(Content::Program(read)) = frame::read(content) else { panic!("it is no program") };
        prop_assert_eq!(read.sum.map(|sum| sum.values), Some(&sum[..]));
        let again = ProgramRecord {
            slice: read.slice,
            version: read.version,
            command: read.command,
            program: &read.program,
            sum: read.sum,
        };
        let mut written = Vec::new();
        prop_assert!(frame::program(&mut written, &again));
        frame::seal(&mut written);
        prop_assert_eq!(&written[..], rest);
    }

    #[test]
    fn a_slice_round_trips(entry in entry()) {
        let mut bytes = Vec::new();
        prop_assert!(frame::slice(&mut bytes, &entry));
        frame::seal(&mut bytes);
        let (content, _) = frame::split(&bytes).unwrap();
        let Some(Content::Slice(read)) = frame::read(content) else { panic!("it is no slice") };
        prop_assert_eq!(format!("{read:?}"), format!("{entry:?}"));
    }

    #[test]
    fn an_event_and_a_manifest_round_trip(event in event(), manifest in manifest()) {
        let mut bytes = Vec::new();
        prop_assert!(frame::event(&mut bytes, &event));
        frame::seal(&mut bytes);
        let (content, _) = frame::split(&bytes).unwrap();
        let Some(Content::Event(read)) = frame::read(content) else { panic!("it is no event") };
        prop_assert_eq!(read, event);
        let text = manifest.text().unwrap();
        let path = std::env::temp_dir().join(format!("fastps-manifest-{}", std::process::id()));
        let _ = std::fs::remove_file(&path);
        let mut file = Output::create(&path).unwrap();
        manifest.write(&mut file).unwrap();
        file.finish().unwrap();
        prop_assert_eq!(&std::fs::read(&path).unwrap(), &text);
        for read in [Manifest::parse(&text), Manifest::read(&path).unwrap()] {
            prop_assert_eq!(format!("{:?}", read.unwrap()), format!("{manifest:?}"));
        }
    }

    #[test]
    fn a_changed_manifest_is_detected(manifest in manifest(), mishap in mishap()) {
        let whole = manifest.text().unwrap();
        let mut bytes = whole.clone();
        mishap.befall(&mut bytes);
        prop_assert!(bytes == whole || Manifest::parse(&bytes).is_none());
        let path = std::env::temp_dir().join(format!("fastps-changed-{}", std::process::id()));
        std::fs::write(&path, &bytes).unwrap();
        prop_assert!(bytes == whole || Manifest::read(&path).unwrap().is_none());
    }

    /// A damaged log is read correctly up to the damage.
    #[test]
    fn a_changed_log_is_read_up_to_the_change(
        frames in frames(), last in any::<Option<u64>>(), mishaps in vec(mishap(), 1..3),
    ) {
        let whole = segment_of(&frames, last);
        let (said, end) = read_back(&whole);
        prop_assert_eq!(said.len(), frames.len());
        let expected = match last {
            Some(last) => SegmentEnd::Continued(last),
            None => SegmentEnd::Open { whole: whole.len() as u64, torn: 0 },
        };
        prop_assert_eq!(end, Ok(expected));
        let mut bytes = whole.clone();
        for mishap in &mishaps {
            if !bytes.is_empty() {
                mishap.befall(&mut bytes);
            }
        }
        let (read, end) = read_back(&bytes);
        // Copied or missing whole frames are detected by the versions in them, not here.
        let moved = mishaps.iter().any(|mishap| matches!(mishap, Mishap::Copy(..) | Mishap::Leave(..)));
        prop_assert!(moved || said.starts_with(&read), "{read:?}, not {said:?}");
        if let Ok(SegmentEnd::Open { whole, torn }) = end {
            let (written, zeros) = bytes.split_at((whole + torn) as usize);
            prop_assert!(zeros.iter().all(|byte| *byte == 0));
            prop_assert!(torn == 0 || written.last() != Some(&0));
        }
    }

    /// Other programs can open a snapshot, whatever its tensors are named.
    #[test]
    fn any_names_open_as_safetensors(tensors in vec((".{0,12}|__metadata__|a~?", vec(0..5_u64, 0..3)), 0..6)) {
        let mut layout = Layout::default();
        let (mut all, types) = (0, [DType::Float32, DType::Float64, DType::BFloat16]);
        for (name, shape) in &tensors {
            let (dtype, elements) = (types[shape.len() % 3], shape.iter().product::<u64>() as usize);
            layout.add(name.clone(), shape.clone(), dtype, elements);
            all += dtype.size() * elements;
        }
        let mut file = layout.header().unwrap();
        file.resize(file.len() + all, 7);
        let read = safetensors::SafeTensors::deserialize(&file).unwrap();
        prop_assert_eq!(read.len(), tensors.len());
        for (name, shape) in &tensors {
            let found = read.tensors().into_iter().any(|(other, view)| {
                let shown = view.shape().iter().map(|n| *n as u64).collect::<Vec<_>>();
                other.trim_end_matches('~') == name.trim_end_matches('~') && shown == *shape
            });
            prop_assert!(found, "{name:?} {shape:?}");
        }
    }
}
