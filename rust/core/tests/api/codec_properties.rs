//! Properties of every input: error bounds, symmetries, and safe handling of arbitrary bytes.

use fastps_core::codec::{Codec, CodecId, Position};
use fastps_core::isa::Isa;
use proptest::collection::vec;
use proptest::prelude::*;

const INT8: Codec = Codec::Int8 { seed: None };
/// The limit below which 8-bit and 1-bit blocks are zero.
const LIMIT: f32 = 2.524_355e-29;

fn encode(codec: Codec, values: &[f32]) -> Vec<u8> {
    let mut body = Vec::new();
    codec.encode(Isa::best(), values, None, Position::default(), &mut body);
    body
}

fn decode(id: CodecId, body: &[u8], n: usize) -> Vec<f32> {
    let mut out = vec![f32::NAN; n];
    id.decode(Isa::best(), body, &mut out);
    out
}

fn round_trip(codec: Codec, values: &[f32]) -> Vec<f32> {
    decode(codec.id(), &encode(codec, values), values.len())
}

fn codec() -> impl Strategy<Value = Codec> {
    prop_oneof![
        Just(Codec::Float32),
        Just(Codec::BFloat16),
        Just(INT8),
        any::<u64>().prop_map(|seed| Codec::Int8 { seed: Some(seed) }),
        Just(Codec::OneBit),
        Just(Codec::FourBit),
    ]
}

fn id() -> impl Strategy<Value = CodecId> {
    (0..5usize).prop_map(|i| CodecId::ALL[i])
}

/// Any finite float32; all magnitudes are equally likely.
fn finite() -> impl Strategy<Value = f32> {
    any::<u32>().prop_map(f32::from_bits).prop_filter("finite", |x| x.is_finite())
}

fn similar() -> impl Strategy<Value = Vec<f32>> {
    (-60..60i32, vec(-1.0f32..1.0, 0..300))
        .prop_map(|(k, v)| v.into_iter().map(|x| x * 2f32.powi(k)).collect())
}

fn values() -> impl Strategy<Value = Vec<f32>> {
    prop_oneof![vec(finite(), 0..300), similar(), vec(finite(), 1020..1100)]
}

/// Sum of squares, exact enough for bounds.
fn energy(values: impl Iterator<Item = f64>) -> f64 {
    values.map(|x| x * x).sum()
}

fn error_energy(v: &[f32], d: &[f32]) -> f64 {
    energy(v.iter().zip(d).map(|(v, d)| f64::from(*v) - f64::from(*d)))
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 20_000, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn arbitrary_bytes_never_panic(id in id(), n in 0..80usize, body in vec(any::<u8>(), 0..400)) {
        for isa in Isa::ALL {
            prop_assert_eq!(id.validate(isa, &body, n).is_ok(), id.validate(Isa::Scalar, &body, n).is_ok());
        }
    }

    #[test]
    fn what_validates_is_finite(id in id(), n in 0..40usize, bytes in vec(any::<u8>(), 200)) {
        let body = &bytes[..id.body_len(n)];
        if id.validate(Isa::best(), body, n).is_ok() {
            prop_assert!(decode(id, body, n).iter().all(|x| x.is_finite()));
        }
    }

    #[test]
    fn damaged_bodies_never_panic(
        codec in codec(),
        values in vec(finite(), 0..100),
        (at, bit, cut, more) in (any::<usize>(), 0..8u8, 1..10usize, vec(any::<u8>(), 1..10)),
    ) {
        let (id, n) = (codec.id(), values.len());
        let body = encode(codec, &values);
        prop_assert!(id.validate(Isa::best(), &body, n).is_ok());
        prop_assert!(decode(id, &body, n).iter().all(|x| x.is_finite()));
        prop_assert!(id.validate(Isa::best(), &body[..body.len().saturating_sub(cut)], n).is_err() || body.is_empty());
        prop_assert!(id.validate(Isa::best(), &[&body[..], &more].concat(), n).is_err());
        prop_assert!(n == 0 || id.validate(Isa::best(), &body, n + 8).is_err());
        if let Some(at) = at.checked_rem(body.len()) {
            let mut flipped = body;
            flipped[at] ^= 1 << bit;
            if id.validate(Isa::best(), &flipped, n).is_ok() {
                prop_assert!(decode(id, &flipped, n).iter().all(|x| x.is_finite()));
            }
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 2_000, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn encoding_what_was_decoded_gives_the_same_bytes(values in values()) {
        for codec in [Codec::Float32, Codec::BFloat16, INT8] {
            let body = encode(codec, &values);
            prop_assert_eq!(encode(codec, &decode(codec.id(), &body, values.len())), body);
        }
    }

    #[test]
    fn signs_are_symmetric(values in values()) {
        let negated: Vec<f32> = values.iter().map(|x| -x).collect();
        for codec in [Codec::Float32, Codec::BFloat16, INT8, Codec::OneBit] {
            let (plus, minus) = (round_trip(codec, &values), round_trip(codec, &negated));
            prop_assert!(plus.iter().zip(&minus).all(|(p, m)| *p == -*m), "{codec:?}");
        }
    }

    #[test]
    fn scaling_changes_only_scales(values in similar(), k in -20..20i32) {
        let largest = |v: &[f32], n| v.chunks(n).all(|b| b.iter().any(|x| x.abs() >= LIMIT * 2f32.powi(40)));
        prop_assume!(largest(&values, 64));
        let factor = 2f32.powi(k);
        let scaled: Vec<f32> = values.iter().map(|x| x * factor).collect();
        for (codec, scales) in [
            (INT8, values.len().div_ceil(64)),
            (Codec::Int8 { seed: Some(1) }, values.len().div_ceil(64)),
            (Codec::OneBit, 8 * values.len().div_ceil(1024)),
        ] {
            prop_assert_eq!(&encode(codec, &scaled)[scales..], &encode(codec, &values)[scales..]);
            let (one, other) = (round_trip(codec, &values), round_trip(codec, &scaled));
            prop_assert!(one.iter().zip(&other).all(|(a, b)| a * factor == *b), "{codec:?}");
        }
    }

    #[test]
    fn eight_bits_err_by_half_a_step(values in values(), seed in any::<u64>()) {
        let body = encode(INT8, &values);
        let drawn = round_trip(Codec::Int8 { seed: Some(seed) }, &values);
        let decoded = decode(CodecId::Int8, &body, values.len());
        for (i, (v, d)) in values.iter().zip(&decoded).enumerate() {
            let scale = i32::from(body[i / 64]);
            let step = if scale == 0 { f64::from(LIMIT) } else { 2f64.powi(scale - 133) };
            let q = (f64::from(*v) / step).abs();
            let bound = if scale == 0 || q > 127.0 { step } else { step / 2.0 };
            prop_assert!((f64::from(*v) - f64::from(*d)).abs() <= bound, "element {i}: {v} {d}");
            prop_assert!((f64::from(*v) - f64::from(drawn[i])).abs() <= step, "element {i}: {v} {}", drawn[i]);
        }
    }

    #[test]
    fn bfloat16_errs_by_half_a_step(values in vec(finite(), 1..100)) {
        for (v, d) in values.iter().zip(round_trip(Codec::BFloat16, &values)) {
            let (v, d) = (f64::from(*v), f64::from(d));
            // Half a step is 2^-9 of the value's binade; above the largest bfloat16, up to a whole one.
            let bound = if v.abs() > 3.389_531e38 { v.abs() / 256.0 } else { (v.abs() / 256.0).max(2f64.powi(-134)) };
            prop_assert!((v - d).abs() <= bound, "{v} {d}");
        }
    }

    #[test]
    fn one_bit_contracts(values in prop_oneof![similar(), vec(prop_oneof![Just(0.0), finite()], 1..1100)]) {
        for (v, d) in values.chunks(1024).zip(round_trip(Codec::OneBit, &values).chunks(1024)) {
            if v.iter().all(|x| x.abs() < LIMIT) {
                prop_assert!(d.iter().all(|x| *x == 0.0));
                continue;
            }
            let before = energy(v.iter().map(|x| f64::from(*x)));
            let bound = (1.0 - 1.0 / v.len() as f64) * before;
            prop_assert!(error_energy(v, d) <= bound + 1e-6 * before, "n = {}", v.len());
        }
    }

    #[test]
    fn one_bit_says_the_means(values in vec(-1.0f32..1.0, 1..1024)) {
        for (d, side) in [(0usize, false), (1, true)] {
            let of_side: Vec<f64> =
                values.iter().filter(|x| x.is_sign_negative() == side).map(|x| f64::from(x.abs())).collect();
            let body = encode(Codec::OneBit, &values);
            let mean = f64::from(f32::from_le_bytes(body.as_chunks().0[d]));
            let expected = of_side.iter().sum::<f64>() / (of_side.len().max(1)) as f64;
            prop_assert!((mean - expected).abs() <= 3e-7, "{mean} {expected}");
        }
    }

    #[test]
    fn blocks_stand_alone(values in vec(finite(), 128..400), at in 0..3usize) {
        let whole = round_trip(INT8, &values);
        let part = &values[64 * at.min(values.len() / 64 - 1)..];
        let alone = round_trip(INT8, part);
        prop_assert_eq!(&whole[whole.len() - alone.len()..], &alone[..]);
    }
}

/// Normal (Box-Muller) or Laplace samples.
fn samples(n: usize, laplace: bool) -> Vec<f32> {
    let mut state = 1u64;
    let mut uniform = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        ((state >> 11) as f64 + 0.5) * 2f64.powi(-53)
    };
    (0..n)
        .map(|_| {
            let (a, b) = (uniform(), uniform());
            let magnitude = if laplace { -a.ln() } else { (-2.0 * a.ln()).sqrt() };
            let side = if laplace { (b - 0.5).signum() } else { (std::f64::consts::TAU * b).cos() };
            (magnitude * side) as f32
        })
        .collect()
}

#[test]
fn published_error_levels() {
    let relative =
        |codec, v: &[f32]| error_energy(v, &round_trip(codec, v)) / energy(v.iter().map(|x| f64::from(*x)));
    let (normal, laplace) = (samples(1 << 20, false), samples(1 << 20, true));
    let close =
        |x: f64, expected: f64, share: f64| assert!((x / expected - 1.0).abs() < share, "{x} {expected}");
    close(relative(INT8, &normal).sqrt(), 0.0089, 0.03);
    close(relative(INT8, &laplace).sqrt(), 0.0116, 0.03);
    close(relative(Codec::OneBit, &normal), 0.3634, 0.01);
    close(relative(Codec::OneBit, &laplace), 0.5, 0.01);
}

#[test]
fn stochastic_rounding_is_unbiased() {
    // 16 values, each drawn in 2000 blocks of 64 at 4 sequence numbers.
    let kinds: Vec<f32> = (0..16).map(|i| (i as f32 - 7.5) * 0.0613).collect();
    let mut values: Vec<f32> = (0..2000 * 64).map(|i| kinds[i % 16]).collect();
    // The block's scale is that of 0.9, so a step is 2^-7.
    values.iter_mut().step_by(64).for_each(|x| *x = 0.9);
    let step = 2f64.powi(-7);
    let (mut sum, mut squares, mut count) = ([0.0; 16], [0.0; 16], [0.0; 16]);
    for sequence in 0..4 {
        let codec = Codec::Int8 { seed: Some(42) };
        let mut body = Vec::new();
        codec.encode(Isa::best(), &values, None, Position { first_element: 0, sequence }, &mut body);
        for (i, d) in decode(CodecId::Int8, &body, values.len()).into_iter().enumerate() {
            if i % 64 != 0 {
                let error = f64::from(d) - f64::from(kinds[i % 16]);
                sum[i % 16] += error;
                squares[i % 16] += error * error;
                count[i % 16] += 1.0;
            }
        }
    }
    for i in 0..16 {
        let (mean, variance) = (sum[i] / count[i], squares[i] / count[i]);
        assert!(variance <= step * step / 4.0 * 1.01, "{i}: {variance}");
        // The floor of p may take away 2^-16 of a step.
        let allowed = 4.0 * (variance / count[i]).sqrt() + step * 2f64.powi(-16);
        assert!(mean.abs() <= allowed, "{i}: {mean} > {allowed}");
    }
}

#[test]
fn stochastic_draws_depend_on_seed_and_sequence_only() {
    let v = samples(5000, false);
    let draw = |seed, sequence| {
        let mut body = Vec::new();
        Codec::Int8 { seed: Some(seed) }.encode(
            Isa::best(),
            &v,
            None,
            Position { first_element: 0, sequence },
            &mut body,
        );
        body
    };
    assert_eq!(draw(1, 1), draw(1, 1));
    assert_ne!(draw(1, 1), draw(1, 2));
    assert_ne!(draw(1, 1), draw(2, 1));
    assert_ne!(draw(1, 1), draw(1 + (1 << 32), 1));
    assert_ne!(draw(1, 1), draw(1, 1 + (1 << 32)));
}

#[test]
fn bfloat16_saturates() {
    let values = [f32::MAX, -f32::MAX, f32::from_bits(0x7F7F_7FFF), f32::from_bits(0x7F7F_8000)];
    let largest = f32::from_bits(0x7F7F_0000);
    assert_eq!(round_trip(Codec::BFloat16, &values), [largest, -largest, largest, largest]);
    let mut residual = [0.0];
    let mut body = Vec::new();
    Codec::BFloat16.encode(Isa::best(), &values[..1], Some(&mut residual), Position::default(), &mut body);
    assert_eq!(residual[0], f32::MAX - largest);
}
