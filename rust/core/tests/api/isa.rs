//! Every instruction set gives the bits of the scalar one: optimizers and codecs together, in both kinds of
//! memory, at every length around vectors and blocks and at every alignment. The encoders are tested in
//! `codec.rs`.

use fastps_core::codec::{Codec, CodecId, Position};
use fastps_core::ema::Ema;
use fastps_core::error::Kind;
use fastps_core::finite;
use fastps_core::frame::{Action, Identity, Push};
use fastps_core::isa::Isa;
use fastps_core::optim::{
    Adadelta, Adagrad, Adam, AdamW, Average, EpsMode, Ftrl, Lion, Optimizer, Rmsprop, ScheduleFreeAdamW,
    ScheduleFreeSgd, Sgd,
};
use fastps_core::shard::{Shard, ShardConfig};
use fastps_core::tensor::{Apply, SliceId, TensorSpec};
use sha2::{Digest, Sha256};
use std::process::Command;
use std::sync::Arc;

const SLICE: SliceId = SliceId(1);
const CODECS: [Codec; 5] =
    [Codec::Float32, Codec::BFloat16, Codec::Int8 { seed: None }, Codec::OneBit, Codec::FourBit];
/// The length of a whole float32 slice.
const LONGEST: usize = 63 * 4096;

/// Instruction sets of this machine. `FASTPS_REQUIRE_ISA=avx512,avx2` makes a missing one a failure.
fn isas() -> Vec<Isa> {
    let all: Vec<Isa> = Isa::ALL.into_iter().filter(|isa| isa.is_available()).collect();
    for name in std::env::var("FASTPS_REQUIRE_ISA").unwrap_or_default().split(',').filter(|s| !s.is_empty()) {
        assert!(all.iter().any(|isa| isa.name() == name), "this machine lacks {name}");
    }
    all
}

/// Every form of every optimizer's formula.
fn optimizers() -> Vec<Optimizer> {
    let modes = [EpsMode::Outside, EpsMode::Inside, EpsMode::Both];
    let mut all = vec![
        Optimizer::Sgd(Sgd::default()),
        Optimizer::Sgd(Sgd { momentum: 0.9, dampening: 0.1, weight_decay: 0.01, ..Sgd::default() }),
        Optimizer::Sgd(Sgd { momentum: 0.9, nesterov: true, maximize: true, ..Sgd::default() }),
        Optimizer::Adadelta(Adadelta { weight_decay: 0.01, ..Adadelta::default() }),
        Optimizer::Adam(Adam::default()),
        Optimizer::Adam(Adam { amsgrad: true, weight_decay: 0.01, maximize: true, ..Adam::default() }),
        Optimizer::AdamW(AdamW(Adam { amsgrad: true, weight_decay: 0.02, ..Adam::default() })),
        Optimizer::Lion(Lion::default()),
        Optimizer::Lion(Lion { weight_decay: 0.02, maximize: true, ..Lion::default() }),
        Optimizer::Ftrl(Ftrl { l1: 0.1, l2: 0.2, ..Ftrl::default() }),
        Optimizer::Average(Average::default()),
        Optimizer::Average(Average { lr: 0.7 }),
        Optimizer::ScheduleFreeSgd(ScheduleFreeSgd { lr: 0.1, ..ScheduleFreeSgd::default() }),
        Optimizer::ScheduleFreeAdamW(ScheduleFreeAdamW {
            weight_decay: 0.01,
            warmup: 3.0,
            ..ScheduleFreeAdamW::default()
        }),
    ];
    for eps_mode in modes {
        all.push(Optimizer::Adagrad(Adagrad {
            lr_decay: 0.1,
            weight_decay: 0.01,
            eps_mode,
            ..Adagrad::default()
        }));
        all.push(Optimizer::Rmsprop(Rmsprop { eps_mode, ..Rmsprop::default() }));
        let (centered, momentum) = (true, 0.9);
        all.push(Optimizer::Rmsprop(Rmsprop { eps_mode, centered, momentum, ..Rmsprop::default() }));
    }
    all
}

/// Values of mixed signs and sizes, some of them 0 or subnormal.
fn values(n: usize, seed: u64) -> Vec<f32> {
    let mut state = seed.wrapping_add(1).wrapping_mul(0x9E37_79B9_7F4A_7C15);
    (0..n)
        .map(|_| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            let x = (state >> 32) as i32 as f32 * 2f32.powi(-31);
            match state >> 59 {
                0 => x * 2f32.powi(-20),
                1 => x * 2f32.powi(-130),
                2 => 0.0 * x,
                3 => x * 1000.0,
                _ => x,
            }
        })
        .collect()
}

/// A copy of the bytes, `offset` bytes past a multiple of 64, in memory that extends beyond them.
struct Placed {
    memory: Vec<u8>,
    start: usize,
    len: usize,
}

impl Placed {
    fn new(bytes: &[u8], offset: usize) -> Self {
        let mut memory = vec![0; bytes.len() + 128];
        let start = memory.as_ptr().align_offset(64) + offset;
        memory[start..start + bytes.len()].copy_from_slice(bytes);
        Self { memory, start, len: bytes.len() }
    }

    fn bytes(&self) -> &[u8] {
        &self.memory[self.start..self.start + self.len]
    }
}

fn encode(codec: Codec, values: &[f32]) -> Vec<u8> {
    let mut body = Vec::new();
    codec.encode(Isa::Scalar, values, None, Position::default(), &mut body);
    body
}

/// Applies one assignment and two gradients. Returns the bytes of values and state, with the average.
fn trained(
    isa: Isa,
    apply: Apply,
    (optimizer, average): (Optimizer, Option<Ema>),
    initial: &[u8],
    codec: CodecId,
    body: &[u8],
    n: usize,
) -> Vec<u8> {
    let shard = Shard::new(ShardConfig::new(0, u64::MAX, isa));
    let spec = TensorSpec { apply, average, ..TensorSpec::new("w", [n as u64], optimizer) };
    shard.create(&Arc::new(spec), 0, &[(SLICE, 0)]).unwrap();
    let steps = [
        (Action::Assign, CodecId::Float32, initial, None),
        (Action::Gradient, codec, body, None),
        (Action::Gradient, codec, body, Some(0.37)),
    ];
    for (k, (action, codec, body, scale)) in steps.into_iter().enumerate() {
        let push = Push {
            action,
            scale,
            ..Push::gradient(SLICE, Identity { client: 1, sequence: k as u64 + 1 }, n as u64, codec, body)
        };
        shard.push(&push, |result| assert!(result.is_ok(), "{result:?}"));
    }
    let mut bytes = shard.pull(0, SLICE).unwrap().as_ref().to_vec();
    bytes.extend_from_slice(shard.pull_state(0, SLICE).unwrap().as_ref());
    if optimizer.keeps_average() {
        bytes.extend_from_slice(shard.pull_average(0, SLICE).unwrap().as_ref());
    }
    bytes
}

fn assert_same_training(n: usize, optimizers: &[Optimizer], codecs: &[Codec], offset: usize) {
    let float_bytes = |values: Vec<f32>| values.into_iter().flat_map(f32::to_le_bytes).collect::<Vec<_>>();
    let initial = float_bytes(values(n, 1));
    for (&optimizer, &codec) in optimizers.iter().flat_map(|o| codecs.iter().map(move |c| (o, c))) {
        let body = encode(codec, &values(n, 2));
        let average = Some(Ema { decay: 0.75, every: 1, start: 0 }).filter(|_| !optimizer.keeps_average());
        let plain = (optimizer, None);
        let expected = trained(Isa::Scalar, Apply::Exact, plain, &initial, codec.id(), &body, n);
        let averaged =
            trained(Isa::Scalar, Apply::Exact, (optimizer, average), &initial, codec.id(), &body, n);
        assert!(averaged.starts_with(&expected), "an average changes a step of {optimizer:?}");
        let (initial, body) = (Placed::new(&initial, offset), Placed::new(&body, offset));
        for (isa, apply) in isas().into_iter().flat_map(|isa| [(isa, Apply::Exact), (isa, Apply::Hogwild)]) {
            if apply == Apply::Hogwild && optimizer.keeps_average() {
                continue;
            }
            let got = trained(isa, apply, plain, initial.bytes(), codec.id(), body.bytes(), n);
            let average = average.filter(|_| apply == Apply::Exact);
            let with =
                trained(isa, apply, (optimizer, average), initial.bytes(), codec.id(), body.bytes(), n);
            let wanted = if average.is_some() { &averaged } else { &expected };
            assert!(
                got == expected && with == *wanted,
                "{} {apply:?} {optimizer:?} {codec:?}, {n} elements, {offset}",
                isa.name()
            );
        }
    }
}

#[test]
fn optimizers_and_codecs_give_the_scalar_bits_at_every_length() {
    let all = optimizers();
    for n in (0..=257).chain([1023, 1024, 1025, 2047, 2048, 2049, 4095, 4097]) {
        // Every optimizer at every length, with one of the codecs and at any alignment of the body.
        assert_same_training(n, &all, &CODECS[n % 4..][..1], n * 7 % 64);
    }
}

#[test]
fn every_optimizer_decodes_every_codec() {
    for n in [63, 64, 65, 1000, 1024, 1025, 2500] {
        assert_same_training(n, &optimizers(), &CODECS, n % 64);
    }
}

#[test]
fn the_longest_slice_gives_the_scalar_bits() {
    let few = [Optimizer::Sgd(Sgd { momentum: 0.9, ..Sgd::default() }), Optimizer::Adam(Adam::default())];
    for n in [LONGEST - 1, LONGEST] {
        assert_same_training(n, &few, &CODECS, 1);
    }
}

#[test]
fn every_alignment_of_a_body_gives_the_scalar_bits() {
    for offset in 0..64 {
        assert_same_training(1100, &[Optimizer::Adam(Adam::default())], &CODECS, offset);
    }
}

#[test]
fn every_alignment_of_values_gives_the_scalar_bytes() {
    let (n, all) = (1100, values(1100 + 32, 3));
    let stochastic = Codec::Int8 { seed: Some(7) };
    for (from, codec) in
        (0..16).flat_map(|from| CODECS.into_iter().chain([stochastic]).map(move |c| (from, c)))
    {
        let values = &all[from..from + n];
        let residual = &all[from + 3..from + 3 + n];
        let run = |isa: Isa, shift: usize| {
            let mut kept = vec![0.0; n + shift];
            kept[shift..].copy_from_slice(residual);
            let mut body = vec![0; shift];
            codec.encode(isa, values, Some(&mut kept[shift..]), Position::default(), &mut body);
            codec.id().validate(isa, &body[shift..], n).unwrap();
            let mut decoded = vec![0.0; n + shift];
            codec.id().decode(isa, &body[shift..], &mut decoded[shift..]);
            let bits = |values: &[f32]| values[shift..].iter().map(|x| x.to_bits()).collect::<Vec<_>>();
            (body[shift..].to_vec(), bits(&kept), bits(&decoded))
        };
        let expected = run(Isa::Scalar, 0);
        for (isa, shift) in isas().into_iter().flat_map(|isa| [0, 1, 5, 15].map(|shift| (isa, shift))) {
            assert!(run(isa, shift) == expected, "{} {codec:?} from {from}, {shift}", isa.name());
        }
    }
}

#[test]
fn what_is_not_finite_is_found_at_every_place() {
    for isa in isas() {
        for n in (1..=130).chain([1024, 1025]) {
            let mut values = values(n, 4);
            finite::check(isa, &values, None).unwrap();
            for at in (0..n).step_by(1 + n / 130) {
                let good = std::mem::replace(&mut values[at], f32::from_bits(0xFFC0_0000));
                let error = finite::check(isa, &values, None).unwrap_err();
                assert!(
                    error.kind == Kind::NonFinite && error.message.contains(&format!("index {at}")),
                    "{error}"
                );
                values[at] = good;
            }
        }
    }
}

/// Prints the result of training on the process's own instruction set, for the test below.
#[test]
fn digest_of_the_chosen_instruction_set() {
    let isa = Isa::get().unwrap();
    let mut digest = Sha256::new();
    for (k, optimizer) in optimizers().into_iter().enumerate() {
        let n = 1000 + k;
        let initial: Vec<u8> = values(n, 5).into_iter().flat_map(f32::to_le_bytes).collect();
        let body = encode(CODECS[k % 4], &values(n, 6));
        digest.update(trained(isa, Apply::Exact, (optimizer, None), &initial, CODECS[k % 4].id(), &body, n));
    }
    let hex = digest.finalize().iter().fold(String::new(), |s, b| s + &format!("{b:02x}"));
    println!("digest {} {hex}", isa.name());
}

#[test]
fn fastps_isa_chooses_and_changes_no_bit() {
    let mut digests = Vec::new();
    for isa in Isa::ALL {
        let run = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "isa::digest_of_the_chosen_instruction_set", "--nocapture"])
            .env("FASTPS_ISA", isa.name())
            .output()
            .unwrap();
        let output = String::from_utf8(run.stdout).unwrap();
        assert_eq!(run.status.success(), isas().contains(&isa), "{output}");
        let found = output.split(&format!("digest {} ", isa.name())).nth(1);
        assert_eq!(found.is_some(), isas().contains(&isa), "{output}");
        digests.extend(found.and_then(|rest| rest.split_whitespace().next()).map(str::to_owned));
    }
    assert!(!digests.is_empty() && digests.iter().all(|digest| *digest == digests[0]), "{digests:?}");
}
