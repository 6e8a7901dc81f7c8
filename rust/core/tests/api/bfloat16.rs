//! Tensors of bfloat16: the same bits on every instruction set, from an image, and in two slices or one tensor.

use fastps_core::codec::{Codec, CodecId, Position};
use fastps_core::dtype::{DType, View};
use fastps_core::ema::Ema;
use fastps_core::error::{Kind, Result};
use fastps_core::frame::{Action, Applied, Identity, Push};
use fastps_core::isa::Isa;
use fastps_core::optim::Optimizer;
use fastps_core::rounding::Rounding;
use fastps_core::rows::Indices;
use fastps_core::shard::{Shard, ShardConfig};
use fastps_core::slice::Slice;
use fastps_core::tensor::{Apply, SliceId, TensorSpec};
use std::sync::Arc;

const ROWS: usize = 300;
const WIDTH: usize = 17;

fn spec(optimizer: Optimizer) -> Arc<TensorSpec> {
    let own = !optimizer.keeps_average() && optimizer.check_sparse().is_err();
    Arc::new(TensorSpec {
        dtype: DType::BFloat16,
        average: own.then_some(Ema { decay: 0.9, every: 2, start: 1 }),
        rounding: Some(Rounding::Stochastic { seed: 11 }),
        ..TensorSpec::new("w", [ROWS as u64, WIDTH as u64], optimizer)
    })
}

fn shard(spec: &Arc<TensorSpec>, isa: Isa) -> (Shard, Arc<Slice>) {
    let shard = Shard::new(ShardConfig::new(0, 1 << 30, isa));
    shard.create(spec, 0, &[(SliceId(1), 0)]).unwrap();
    let slice = shard.slice(SliceId(1)).unwrap();
    (shard, slice)
}

fn values(n: usize, seed: u32) -> Vec<f32> {
    (0..n as u32).map(|i| (i.wrapping_mul(2_654_435_761) ^ seed) as i32 as f32 / 2e9).collect()
}

fn send(shard: &Shard, push: &Push<'_>) -> Result<Applied> {
    let slice = shard.slice(SliceId(1)).unwrap();
    shard.push_to(&slice, push, || panic!("nothing is held")).unwrap()
}

fn push(shard: &Shard, sequence: u64, action: Action, codec: CodecId, body: &[u8]) {
    let identity = Identity { client: 1, sequence };
    let whole = Push::gradient(SliceId(1), identity, (ROWS * WIDTH) as u64, codec, body);
    send(shard, &Push { action, ..whole }).unwrap();
}

/// Assigns, steps with every codec, and steps rows where the optimizer does; from this sequence number on.
fn train(shard: &Shard, spec: &TensorSpec, isa: Isa, from: u64) {
    let n = ROWS * WIDTH;
    for k in 0..6 {
        let codec = [Codec::Float32, Codec::BFloat16, Codec::Int8 { seed: None }, Codec::FourBit][k % 4];
        let mut body = Vec::new();
        codec.encode(isa, &values(n, k as u32), None, Position::default(), &mut body);
        push(shard, from + 2 * k as u64, Action::Gradient, codec.id(), &body);
        if spec.check_sparse().is_ok() {
            let rows: Vec<u8> = [3_u32, 4, 9, 299].iter().flat_map(|row| row.to_le_bytes()).collect();
            let values = values(4 * WIDTH, 77);
            let identity = Identity { client: 1, sequence: from + 2 * k as u64 + 1 };
            let body = View::Float32(&values).bytes();
            let whole = Push::gradient(SliceId(1), identity, values.len() as u64, CodecId::Float32, body);
            send(shard, &Push { indices: Some(Indices::new(&rows)), ..whole }).unwrap();
        }
    }
}

fn arrays(slice: &Slice) -> [Vec<u8>; 2] {
    [slice.pull(0).unwrap().as_ref().to_vec(), slice.pull_state(0).unwrap().as_ref().to_vec()]
}

#[test]
fn every_instruction_set_and_an_image_give_the_same_bits() {
    for optimizer in Optimizer::all() {
        let spec = spec(optimizer);
        let mut first = None;
        for isa in Isa::ALL.into_iter().filter(|isa| isa.is_available()) {
            let (one, slice) = shard(&spec, isa);
            let mut body = Vec::new();
            let initial = values(ROWS * WIDTH, 5);
            Codec::BFloat16.encode(isa, &initial, None, Position::default(), &mut body);
            push(&one, 1, Action::Assign, CodecId::BFloat16, &body);
            train(&one, &spec, isa, 2);
            let image = slice.image().unwrap();
            assert_eq!((image.values.dtype, image.state.dtype), (DType::BFloat16, DType::Float32));
            assert!(slice.is_finite(&image));
            let (other, copy) = shard(&spec, isa);
            copy.restore(&image.standing, image.values.as_ref(), image.state.as_ref()).unwrap();
            for shard in [&one, &other] {
                train(shard, &spec, isa, 20);
            }
            assert_eq!(arrays(&slice), arrays(&copy), "{}", spec.optimizer);
            let arrays = arrays(&slice);
            assert_eq!(arrays[0].len(), 2 * ROWS * WIDTH);
            assert_eq!(arrays[1].len(), 4 * ROWS * WIDTH * spec.slots().len());
            assert_eq!(*first.get_or_insert(arrays.clone()), arrays, "{} {}", spec.optimizer, isa.name());
        }
    }
}

#[test]
fn what_is_not_of_the_type_is_refused() {
    let spec = spec(Optimizer::by_name("sgd").unwrap());
    let (shard, slice) = shard(&spec, Isa::Scalar);
    let n = ROWS * WIDTH;
    let refuse = |action, codec, bytes: usize| {
        let identity = Identity { client: 1, sequence: 1 };
        let body = vec![0; bytes];
        let push = Push { action, ..Push::gradient(SliceId(1), identity, n as u64, codec, &body) };
        send(&shard, &push).unwrap_err().kind
    };
    assert_eq!(refuse(Action::Gradient, CodecId::Float64, 8 * n), Kind::DType);
    assert_eq!(refuse(Action::Gradient, CodecId::BFloat16, 4 * n), Kind::Frame);
    assert_eq!(refuse(Action::Assign, CodecId::Float32, 4 * n), Kind::Frame);
    assert_eq!(refuse(Action::Assign, CodecId::Float64, 8 * n), Kind::DType);
    assert_eq!(refuse(Action::AssignState { step: 1 }, CodecId::BFloat16, 0), Kind::Frame);
    let infinite = vec![0x7F80_u16; n];
    let identity = Identity { client: 1, sequence: 1 };
    let body = View::BFloat16(&infinite).bytes();
    let whole = Push::gradient(SliceId(1), identity, n as u64, CodecId::BFloat16, body);
    let assign = Push { action: Action::Assign, ..whole };
    assert_eq!(send(&shard, &assign).unwrap_err().kind, Kind::NonFinite);
    assert_eq!(slice.version(0).0, 0);
    let bad = [
        TensorSpec { rounding: None, ..TensorSpec::clone(&spec) },
        TensorSpec { dtype: DType::Float32, ..TensorSpec::clone(&spec) },
        TensorSpec { dtype: DType::Float64, ..TensorSpec::clone(&spec) },
        TensorSpec { apply: Apply::Hogwild, average: None, ..TensorSpec::clone(&spec) },
    ];
    let kinds = bad.map(|spec| spec.validate().unwrap_err().kind);
    assert_eq!(kinds, [Kind::Config, Kind::Config, Kind::Config, Kind::DType]);
}
