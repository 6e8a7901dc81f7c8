//! Any bytes that arrive as a frame: no panic, no change by what is refused, no memory beyond the message's own.
#![allow(clippy::unwrap_used, clippy::expect_used)]

use fastps_core::error::Result;
use fastps_core::frame::{Applied, Push};
use fastps_core::isa::Isa;
use fastps_core::optim::{Adam, Optimizer};
use fastps_core::shard::{Shard, ShardConfig};
use fastps_core::tensor::{Apply, DType, SliceId, TensorSpec};
use fastps_proto::v1 as pb;
use fastps_rpc::convert::{self, Verb};
use proptest::prelude::*;
use prost::Message;
use std::sync::{Arc, LazyLock, Mutex};

const ELEMENTS: usize = 130;

/// One shard for all cases: a hostile frame must leave it usable for the next.
static SHARD: LazyLock<Shard> = LazyLock::new(|| {
    let shard = Shard::new(ShardConfig::new(0, 1 << 20, Isa::best()));
    for (id, apply) in [(1, Apply::Exact), (2, Apply::Hogwild)] {
        let spec = TensorSpec {
            name: format!("{apply:?}").into(),
            shape: vec![ELEMENTS as u64],
            dtype: DType::Float32,
            apply,
            group: "default".into(),
            optimizer: Optimizer::Adam(Adam::default()),
        };
        shard.create(&Arc::new(spec), 0, &[(SliceId(id), 0)]).unwrap();
    }
    shard
});

/// Gives a frame to the shard as the server does, and checks what the answer claims.
fn offer(frame: &pb::Frame) -> bool {
    let Ok(request) = convert::request_from_frame(frame) else { return false };
    let before = SHARD.pull(0, request.slice).map(|s| (s.version, s.as_ref().to_vec()));
    match request.verb {
        Verb::Push { push, .. } => {
            let result = push_now(&push);
            let after = SHARD.pull(0, request.slice).map(|s| (s.version, s.as_ref().to_vec()));
            if result.is_err() {
                assert_eq!(before, after, "a refused frame changed its slice");
            }
            result.is_ok()
        }
        Verb::Pull => SHARD.pull(request.route.client, request.slice).is_ok(),
        Verb::PullState => SHARD.pull_state(request.route.client, request.slice).is_ok(),
        Verb::Resolve(identity) => SHARD.resolve(request.slice, identity).is_ok(),
    }
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
    prop_oneof![8 => 0..=sensible, 1 => any::<u64>(), 1 => Just(1 << 60)]
}

fn header() -> impl Strategy<Value = pb::Header> {
    let kinds = (
        0..24_i32,
        number(3),
        prop_oneof![6 => Just(ELEMENTS as u64), 1 => any::<u64>()],
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

proptest! {
    #![proptest_config(ProptestConfig { cases: 50_000, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn frames_with_any_fields(header in header(), payload in payload()) {
        offer(&pb::Frame { header: Some(header), payload: payload.into() });
    }

    #[test]
    fn messages_of_any_bytes(header in header(), payload in payload(), flips in prop::collection::vec(any::<(u16, u8)>(), 0..6), cut in any::<u16>()) {
        let mut bytes = pb::Frame { header: Some(header), payload: payload.into() }.encode_to_vec();
        for (at, bits) in flips {
            let at = usize::from(at) % bytes.len();
            bytes[at] ^= bits;
        }
        if cut % 4 == 0 {
            bytes.truncate(usize::from(cut) % bytes.len());
        }
        if let Ok(frame) = pb::Frame::decode(bytes.as_slice()) {
            offer(&frame);
            let _ = convert::answer_from_frame(frame);
        }
    }
}

#[test]
fn well_formed_frames_do_get_through() {
    let header = pb::Header {
        kind: pb::Kind::Gradient.into(),
        slice: 1,
        count: ELEMENTS as u64,
        codec: pb::Codec::Float32.into(),
        dtype: pb::DType::DtypeFloat32.into(),
        client: 9,
        sequence: 1,
        epoch: 1,
        ..pb::Header::default()
    };
    assert!(offer(&pb::Frame { header: Some(header), payload: vec![0; 4 * ELEMENTS].into() }));
}
