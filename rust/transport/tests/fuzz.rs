//! Arbitrary bytes as a frame: no panic, no change by a refused frame, no memory beyond the message's own.
#![allow(clippy::unwrap_used, clippy::expect_used)]

use bytes::Bytes;
use cap::Cap;
use fastps_core::error::Result;
use fastps_core::frame::{Applied, Push};
use fastps_core::isa::Isa;
use fastps_core::optim::{Adam, Optimizer};
use fastps_core::shard::{Shard, ShardConfig};
use fastps_core::slice::VectorsStanding;
use fastps_core::tensor::{Apply, SliceId, Space, SpaceId, TensorSpec};
use fastps_proto::v1 as pb;
use fastps_transport::convert::{self, Part, PortionOf, Run, VectorRead, Verb};
use proptest::prelude::*;
use proptest::test_runner::TestRunner;
use prost::Message;
use std::alloc::System;
use std::cell::Cell;
use std::sync::{Arc, LazyLock, Mutex};

const ELEMENTS: usize = 130;
/// The space over the third slice.
const SPACE: u64 = 7;
/// A number of elements that no slice has.
const HOSTILE: u64 = 1 << 60;
/// Bytes that a case may allocate beyond its message: the slice's next version (values and two slots of 130
/// elements), the answer, an error's message, and what the test harness allocates meanwhile.
const ALLOWANCE: usize = 8 << 10;

#[global_allocator]
static ALLOCATOR: Cap<System> = Cap::new(System, usize::MAX);

/// Adds up all allocated bytes, freed ones included: an upper bound of the peak.
#[derive(Default)]
struct Meter(usize);

impl Meter {
    fn during<T>(&mut self, work: impl FnOnce() -> T) -> T {
        let before = ALLOCATOR.total_allocated();
        let result = work();
        self.0 += ALLOCATOR.total_allocated() - before;
        result
    }

    fn check(&self, message: usize) {
        assert!(self.0 <= message + ALLOWANCE, "{} bytes allocated for a message of {message}", self.0);
    }
}

/// One shard for all cases: a hostile frame must leave it usable for the next.
static SHARD: LazyLock<Shard> = LazyLock::new(|| {
    let shard = Shard::new(ShardConfig::new(0, 1 << 20, Isa::best()));
    for (id, apply) in [(1, Apply::Exact), (2, Apply::Hogwild), (3, Apply::Exact)] {
        let spec = TensorSpec {
            apply,
            ..TensorSpec::new(
                format!("{apply:?} {id}"),
                vec![ELEMENTS as u64],
                Optimizer::Adam(Adam::default()),
            )
        };
        shard.create(&Arc::new(spec), 0, &[(SliceId(id), 0)]).unwrap();
    }
    shard
});

/// Passes a frame to the shard as the server does, and checks the answer and the memory used.
fn offer(frame: &pb::Frame) -> bool {
    let mut meter = Meter::default();
    let done = give(frame, &mut meter);
    meter.check(frame.encoded_len());
    // In a server, sessions bound the number of clients that a slice remembers.
    if let Some(header) = frame.header.as_ref().filter(|header| header.client > 9) {
        SHARD.forget_client(header.client);
    }
    done
}

fn give(frame: &pb::Frame, meter: &mut Meter) -> bool {
    let Ok(request) = meter.during(|| convert::request_from_frame(frame)) else { return false };
    match request.verb {
        Verb::Push { push, .. } => change(&push, meter),
        // Each part is applied or refused separately.
        Verb::PushParts(parts, _) => {
            let push = |(k, part)| change(&parts.push(k, part).unwrap(), meter);
            parts.iter().enumerate().map(push).fold(false, |any, done| any | done)
        }
        Verb::PullParts(parts) => {
            let rows = |part: Part<'_>| {
                let slice = SHARD.slice(part.slice)?;
                let Some(rows) = part.indices else {
                    if parts.in_bfloat16() {
                        let mut values = Vec::with_capacity(slice.bytes());
                        let average = parts.of_averages();
                        return slice.pull_bfloat16_copy(request.route.client, average, &mut values);
                    }
                    return slice.pull_copy(request.route.client, &mut Vec::with_capacity(slice.bytes()));
                };
                let mut values = Vec::with_capacity(4 * slice.row_elements(rows)?);
                slice.pull_rows(request.route.client, rows, &mut values)
            };
            parts.iter().map(|part| meter.during(|| rows(part)).is_ok()).fold(false, |any, done| any | done)
        }
        Verb::Pull { average, bfloat16 } => meter.during(|| {
            let (client, slice) = (request.route.client, request.slice);
            let pulled = if average { SHARD.pull_average(client, slice) } else { SHARD.pull(client, slice) };
            let coded = |values| if bfloat16 { SHARD.in_bfloat16(slice, values) } else { Ok(values) };
            pulled.and_then(coded).is_ok()
        }),
        Verb::PullVersion => meter.during(|| SHARD.slice(request.slice).is_ok()),
        Verb::PullVersions(parts) => {
            meter.during(|| parts.iter().all(|part| SHARD.slice(part.slice).is_ok()))
        }
        Verb::PullState => meter.during(|| SHARD.pull_state(request.route.client, request.slice).is_ok()),
        Verb::PullVector(VectorRead { space, index, batch }) => meter.during(|| {
            let slice = SHARD.slice(request.slice);
            slice.and_then(|slice| slice.pull_vector(request.route.client, space, index, batch)).is_ok()
        }),
        Verb::Portion { of, body, .. } => meter.during(|| add(request.slice, of, body).is_ok()),
        Verb::Run(run) => run_program(run, meter),
        Verb::Resolve(identity) => meter.during(|| SHARD.resolve(request.slice, identity).is_ok()),
    }
}

fn add(slice: SliceId, of: PortionOf, body: &[u8]) -> Result<bool> {
    SHARD.slice(slice)?.push_portion(of.space, of.batch, of.portion, body)
}

/// Runs a program on its slices. One that is refused must change nothing.
fn run_program(run: Run<'_>, meter: &mut Meter) -> bool {
    let Ok(program) = meter.during(|| run.program()) else { return false };
    let each = |slice: SliceId| {
        let Ok(slice) = SHARD.slice(slice) else { return false };
        let state =
            || slice.space().map(|(_, standing)| (standing, slice.pull(0).unwrap().as_ref().to_vec()));
        let before = state();
        let ran = meter.during(|| slice.run_program(run.command, &program));
        let changed = || state().map(|(standing, w)| (VectorsStanding { term: 0, ..standing }, w));
        let before = before.map(|(standing, w)| (VectorsStanding { term: 0, ..standing }, w));
        assert!(ran.is_ok() || changed() == before, "a refused program changed its slice");
        ran.is_ok()
    };
    run.slices().map(each).fold(false, |any, done| any | done)
}

/// Pushes. A refused push must change nothing.
fn change(push: &Push<'_>, meter: &mut Meter) -> bool {
    let values = || SHARD.pull(0, push.slice).map(|s| (s.version, s.as_ref().to_vec()));
    let before = values();
    let result = meter.during(|| push_now(push));
    assert!(result.is_ok() || before == values(), "a refused frame changed its slice");
    result.is_ok()
}

fn push_now(push: &Push<'_>) -> Result<Applied> {
    let answer = Arc::new(Mutex::new(None));
    let done = answer.clone();
    SHARD.push(push, move |result| *done.lock().unwrap() = Some(result));
    let answer = answer.lock().unwrap().take();
    answer.expect("an immediate policy answers at once")
}

/// Mostly sensible numbers, so that frames get past the first check, and now and then any number.
fn number(sensible: u64) -> impl Strategy<Value = u64> {
    prop_oneof![8 => 0..=sensible, 1 => any::<u64>(), 1 => Just(HOSTILE)]
}

fn header() -> impl Strategy<Value = pb::Header> {
    let kinds = (
        0..24_i32,
        number(3),
        prop_oneof![6 => Just(ELEMENTS as u64), 1 => any::<u64>(), 1 => Just(HOSTILE)],
        0..6_i32,
        0..3_i32,
    );
    let ids = (number(1), number(2), number(3), number(200));
    let options = (
        any::<Option<u64>>(),
        prop_oneof![3 => Just(None), 1 => any::<Option<f64>>()],
        prop_oneof![3 => Just(None), 1 => any::<Option<f32>>()],
        prop_oneof![9 => Just(None), 1 => any::<Option<u32>>()],
        prop_oneof![9 => Just(None), 1 => any::<Option<u64>>()],
    );
    (kinds, ids, options).prop_map(
        |((kind, slice, count, codec, dtype), (group, epoch, client, sequence), options)| {
            let (base_version, lr, scale, crc32c, reserved) = options;
            pb::Header {
                kind,
                slice,
                count,
                codec,
                dtype,
                group: group as u32,
                epoch,
                client,
                sequence,
                base_version,
                lr,
                scale,
                crc32c,
                have_version: reserved,
                ..pb::Header::default()
            }
        },
    )
}

/// Sparse messages: parts of some rows, mostly with a payload of their length; the rows mostly ascend.
fn parts() -> impl Strategy<Value = (pb::Header, Vec<u8>)> {
    let row = prop_oneof![9 => 0..ELEMENTS as u32, 1 => any::<u32>()];
    let part = (
        number(3),
        prop::collection::vec(row, 0..5),
        prop_oneof![6 => Just(None), 1 => any::<Option<u32>>()],
    );
    let list = || prop::collection::vec(number(4), 0..4);
    let table = prop_oneof![4 => Just(None), 1 => (list(), list()).prop_map(Some)];
    (header(), prop::collection::vec(part, 0..4), table, 0..9_u8).prop_map(|(header, parts, table, odd)| {
        let mut header = pb::Header { slice: 0, count: 0, ..header };
        header.kind = if odd & 1 == 0 { pb::Kind::Gradient } else { pb::Kind::Pull }.into();
        (header.codec, header.base_version) = (pb::PayloadCodec::CodecFloat32.into(), None);
        let mut payload = Vec::new();
        for (slice, mut rows, elements) in parts {
            if odd < 7 {
                rows.sort_unstable();
            }
            payload.extend(rows.iter().flat_map(|row| row.to_le_bytes()));
            let pushed = if odd & 1 == 0 { rows.len() as u32 } else { 0 };
            let elements = elements.unwrap_or(pushed);
            payload.extend((0..pushed).flat_map(|x| (x as f32).to_le_bytes()));
            header.parts.push(pb::Part { slice, count: rows.len() as _, elements });
        }
        header.table = table.map(|(base_versions, base_owns)| {
            Box::new(pb::PartTable { base_versions, base_owns, ..pb::PartTable::default() })
        });
        if odd == 8 {
            payload.pop();
        }
        (header, payload)
    })
}

/// Messages of whole slices, mostly of their length and named once.
fn whole_slices() -> impl Strategy<Value = (pb::Header, Vec<u8>)> {
    let part = (
        number(3),
        prop_oneof![9 => Just(0), 1 => any::<u64>()],
        prop_oneof![9 => Just(None), 1 => any::<Option<u32>>()],
    );
    let list = || prop::collection::vec(number(4), 0..4);
    let table = prop_oneof![4 => Just(None), 1 => (list(), list(), list()).prop_map(Some)];
    let odd = prop_oneof![9 => Just(0), 1 => any::<i8>()];
    (header(), prop::collection::vec(part, 1..4), table, 0..9_u8, odd).prop_map(
        |(header, parts, table, kind, odd)| {
            let kinds = [pb::Kind::Gradient, pb::Kind::Pull, pb::Kind::Assign];
            let kind = kinds[usize::from(kind % 3)];
            let mut header = pb::Header { slice: 0, count: 0, kind: kind.into(), ..header };
            (header.base_version, header.want_values) = (None, header.tag % 2 == 1);
            let mut length = 0;
            if kind == pb::Kind::Pull {
                (header.codec, header.dtype, header.sequence, header.lr, header.scale) =
                    (0, 0, 0, None, None);
            } else {
                header.codec = pb::PayloadCodec::CodecFloat32.into();
            }
            for (slice, count, elements) in parts {
                let pushed = if kind == pb::Kind::Pull { 0 } else { ELEMENTS };
                length += 4 * pushed;
                header.parts.push(pb::Part { slice, count, elements: elements.unwrap_or(pushed as u32) });
            }
            let (base_versions, base_owns, versions) = table.unwrap_or_default();
            let table =
                pb::PartTable { base_versions, base_owns, versions, whole: true, ..Default::default() };
            header.table = Some(Box::new(table));
            (header, vec![0; length.saturating_add_signed(odd.into())])
        },
    )
}

fn payload() -> impl Strategy<Value = Vec<u8>> {
    let floats = |n: usize| {
        prop::collection::vec(any::<f32>(), n)
            .prop_map(|v| v.into_iter().flat_map(f32::to_le_bytes).collect::<Vec<u8>>())
    };
    // The right lengths of each codec, and any length.
    prop_oneof![
        3 => floats(ELEMENTS),
        1 => floats(2 * ELEMENTS),
        2 => prop::collection::vec(any::<u8>(), 2 * ELEMENTS),
        2 => prop::collection::vec(any::<u8>(), 3 + ELEMENTS),
        2 => prop::collection::vec(any::<u8>(), 8 + ELEMENTS.div_ceil(8)),
        1 => prop::collection::vec(any::<u8>(), 0..600),
    ]
}

/// Frames for the space that is open over the third slice, mostly sensible.
fn vectors() -> impl Strategy<Value = (pb::Header, Vec<u8>)> {
    let index = || prop_oneof![9 => 0..4_u32, 1 => any::<u32>()];
    let factor = prop_oneof![6 => -2.0..2.0_f64, 1 => any::<f64>()];
    let fields = (prop::collection::vec(index(), 0..4), prop::collection::vec(factor, 0..3));
    let op = (0..13_i32, index(), fields, number(20));
    let op = op.prop_map(|(code, to, (from, by), batch)| pb::Op { code, to, from, by, batch });
    let program = prop::collection::vec(op, 0..3).prop_map(|ops| pb::Program { ops }.encode_to_vec());
    let payload = prop_oneof![3 => program.boxed(), 2 => payload().boxed()];
    let head = (number(8), number(3), number(200), any::<Option<u32>>(), number(20), index());
    (header(), payload, head, 0..3_usize).prop_map(|(header, payload, head, kind)| {
        let (space, term, number, vector, batch, portion) = head;
        let space = if space < 8 { SPACE } else { space };
        let kinds = [pb::Kind::Vector, pb::Kind::Pull, pb::Kind::Portion];
        let mut header = pb::Header { kind: kinds[kind].into(), slice: 3, sequence: 0, ..header };
        match kinds[kind] {
            pb::Kind::Vector => {
                (header.slice, header.count, header.codec, header.dtype) = (0, 0, 0, 0);
                header.parts = vec![pb::Part { slice: 3, ..Default::default() }];
                let head = pb::VectorHead { space, term, number, ..Default::default() };
                header.vector = Some(Box::new(head));
            }
            pb::Kind::Pull => {
                (header.count, header.codec, header.dtype) = (0, 0, 0);
                let head = pb::VectorHead { space, index: vector, batch, ..Default::default() };
                header.vector = Some(Box::new(head));
            }
            _ => header.portion = Some(Box::new(pb::PortionHead { space, batch, portion })),
        }
        (header, payload)
    })
}

/// Runs one property's cases.
fn check<S: Strategy>(messages: S, test: impl Fn(S::Value)) {
    let config = ProptestConfig { cases: 100_000, failure_persistence: None, ..ProptestConfig::default() };
    let test = |message| {
        test(message);
        Ok(())
    };
    TestRunner::new(config).run(&messages, test).unwrap();
}

/// A single test: the allocator counts all threads, and the harness starts and ends tests on its own threads.
#[test]
fn any_bytes_that_arrive_as_a_frame() {
    well_formed_frames_do_get_through();
    a_count_is_not_believed();
    frames_with_any_fields();
    sparse_frames();
    messages_of_whole_slices();
    too_many_parts();
    frames_for_vectors();
    messages_of_any_bytes();
}

fn frames_with_any_fields() {
    let hostile = Cell::new(0);
    check((header(), payload()), |(header, payload)| {
        hostile.set(hostile.get() + u32::from(header.count == HOSTILE));
        offer(&pb::Frame { header: Some(header), payload: payload.into() });
    });
    assert!(hostile.get() > 1000, "{} hostile counts", hostile.get());
}

fn sparse_frames() {
    let done = Cell::new(0);
    check(parts(), |(header, payload)| {
        done.set(done.get() + u32::from(offer(&pb::Frame { header: Some(header), payload: payload.into() })));
    });
    assert!(done.get() > 1000, "{} sparse frames did something", done.get());
}

fn messages_of_whole_slices() {
    let done = Cell::new(0);
    check(whole_slices(), |(header, payload)| {
        done.set(done.get() + u32::from(offer(&pb::Frame { header: Some(header), payload: payload.into() })));
    });
    assert!(done.get() > 1000, "{} messages of whole slices did something", done.get());
}

/// A message of a mebibyte that names as many slices as it can: it takes no more than their decoded form, and is
/// refused before anything is looked up.
fn too_many_parts() {
    for kind in [pb::Kind::Gradient, pb::Kind::Assign, pb::Kind::Pull] {
        for whole in [false, true] {
            let mut header = pb::Header { kind: kind.into(), slice: 0, count: 0, ..gradient() };
            if kind == pb::Kind::Pull {
                (header.codec, header.dtype, header.sequence) = (0, 0, 0);
            }
            header.parts = vec![pb::Part::default(); (1 << 20) / 3];
            header.table = whole.then(|| Box::new(pb::PartTable { whole, ..Default::default() }));
            let bytes = pb::Frame { header: Some(header), payload: Bytes::new() }.encode_to_vec();
            let mut meter = Meter::default();
            let frame = meter.during(|| pb::Frame::decode(bytes.as_slice()).unwrap());
            // A part takes 3 bytes in the message and 24 in memory; the list doubles as it grows.
            meter.check(4 * 24 / 3 * bytes.len());
            let mut meter = Meter::default();
            let error = meter.during(|| convert::request_from_frame(&frame).unwrap_err());
            assert!(error.message.contains("too many parts"), "{error}");
            meter.check(0);
        }
    }
}

fn frames_for_vectors() {
    let vectors = ["g".into(), "p".into()].to_vec();
    let space = Arc::new(Space { id: SpaceId(SPACE), name: "s".into(), vectors });
    SHARD.slice(SliceId(3)).unwrap().open_space(&space).unwrap();
    let (done, number) = (Cell::new(0), Cell::new(0));
    check(self::vectors(), |(mut header, payload)| {
        // A term or a number far ahead would be the last that the slice takes.
        if let Some(vector) = header.vector.as_mut().filter(|vector| vector.number > 0) {
            (vector.term, vector.number) = (1, number.get() + 1);
            number.set(vector.number - u64::from(vector.number % 7 == 0));
        }
        (header.base_version, header.lr, header.scale, header.have_version) = (None, None, None, None);
        done.set(done.get() + u32::from(offer(&pb::Frame { header: Some(header), payload: payload.into() })));
    });
    assert!(done.get() > 1000, "{} frames for vectors did something", done.get());
}

fn messages_of_any_bytes() {
    let hostile = Cell::new(0);
    let flips = prop::collection::vec(any::<(u16, u8)>(), 0..6);
    check((header(), payload(), flips, any::<u16>()), |(header, payload, flips, cut)| {
        let mut bytes = pb::Frame { header: Some(header), payload: payload.into() }.encode_to_vec();
        for (at, bits) in flips {
            let at = usize::from(at) % bytes.len();
            bytes[at] ^= bits;
        }
        if cut % 4 == 0 {
            bytes.truncate(usize::from(cut) % bytes.len());
        }
        let mut meter = Meter::default();
        if let Ok(frame) = meter.during(|| pb::Frame::decode(bytes.as_slice())) {
            let count = frame.header.as_ref().map_or(0, |header| header.count);
            hostile.set(hostile.get() + u32::from(count == HOSTILE));
            offer(&frame);
            let _ = meter.during(|| convert::answer_from_frame(frame));
        }
        meter.check(bytes.len());
    });
    assert!(hostile.get() > 1000, "{} hostile counts", hostile.get());
}

fn a_count_is_not_believed() {
    const COUNTS: [u64; 5] = [HOSTILE, u64::MAX, u64::MAX / 4 + 1, 1 << 32, 1 << 18];
    let payloads = [0, 1, 4 * ELEMENTS, 1 << 20].map(|n| Bytes::from(vec![0; n]));
    for (kind, codec) in (0..24).flat_map(|kind| (0..6).map(move |codec| (kind, codec))) {
        let payloads = payloads.iter();
        for (payload, count) in payloads.flat_map(|p| COUNTS.map(|count| (p, count))) {
            let header = pb::Header { kind, codec, count, ..gradient() };
            let bytes = pb::Frame { header: Some(header), payload: payload.clone() }.encode_to_vec();
            let mut meter = Meter::default();
            let frame = meter.during(|| pb::Frame::decode(bytes.as_slice()).unwrap());
            offer(&frame);
            let _ = meter.during(|| convert::answer_from_frame(frame));
            meter.check(bytes.len());
        }
    }
}

fn gradient() -> pb::Header {
    pb::Header {
        kind: pb::Kind::Gradient.into(),
        slice: 1,
        count: ELEMENTS as u64,
        codec: pb::PayloadCodec::CodecFloat32.into(),
        dtype: pb::DType::DtypeFloat32.into(),
        client: 9,
        sequence: 1,
        epoch: 1,
        ..pb::Header::default()
    }
}

fn well_formed_frames_do_get_through() {
    assert!(offer(&pb::Frame { header: Some(gradient()), payload: vec![0; 4 * ELEMENTS].into() }));
}
