//! The codecs against the byte contract: independently computed golden vectors, bit equality of all
//! instruction sets, error feedback.

use fastps_core::codec::{Codec, CodecId, ErrorFeedback, Position};
use fastps_core::dtype::View;
use fastps_core::error::Kind;
use fastps_core::isa::Isa;
use fastps_core::outgoing;
use serde_json::Value;
use sha2::{Digest, Sha256};

const CODECS: [Codec; 6] = [
    Codec::Float32,
    Codec::BFloat16,
    Codec::Int8 { seed: None },
    Codec::Int8 { seed: Some(0x0123_4567_89AB_CDEF) },
    Codec::OneBit,
    Codec::FourBit,
];

/// The instruction sets of this machine. `FASTPS_REQUIRE_ISA=avx512,avx2` makes a missing one a failure, so
/// that a run in CI cannot pass by testing less.
fn isas() -> Vec<Isa> {
    let all: Vec<Isa> = Isa::ALL.into_iter().filter(|isa| isa.is_available()).collect();
    for name in std::env::var("FASTPS_REQUIRE_ISA").unwrap_or_default().split(',').filter(|s| !s.is_empty()) {
        assert!(all.iter().any(|isa| isa.name() == name), "this machine lacks {name}");
    }
    all
}

fn encode(codec: Codec, isa: Isa, values: &[f32], residual: Option<&mut [f32]>, at: Position) -> Vec<u8> {
    let mut body = Vec::new();
    codec.encode(isa, values, residual, at, &mut body);
    body
}

fn decode(id: CodecId, isa: Isa, body: &[u8], n: usize) -> Vec<f32> {
    let mut out = vec![f32::NAN; n];
    id.decode(isa, body, &mut out);
    out
}

fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|x| x.to_bits()).collect()
}

fn bytes(values: &[f32]) -> Vec<u8> {
    values.iter().flat_map(|x| x.to_le_bytes()).collect()
}

fn sha256(bytes: &[u8]) -> String {
    hex(&Sha256::digest(bytes)[..16])
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().fold(String::new(), |s, b| s + &format!("{b:02x}"))
}

fn unhex(value: &Value) -> Vec<u8> {
    let s = value.as_str().unwrap();
    (0..s.len()).step_by(2).map(|i| u8::from_str_radix(&s[i..i + 2], 16).unwrap()).collect()
}

fn floats(value: &Value) -> Vec<f32> {
    unhex(value).as_chunks().0.iter().map(|&b| f32::from_le_bytes(b)).collect()
}

fn number(value: &Value) -> Option<u64> {
    value.as_str().map(|s| u64::from_str_radix(&s[2..], 16).unwrap())
}

fn vectors() -> Value {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/vectors/codecs.json");
    serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap()
}

fn codec_of(name: &str, seed: Option<u64>) -> Codec {
    match name {
        "float32" => Codec::Float32,
        "bfloat16" => Codec::BFloat16,
        "int8" | "int8_stochastic" => Codec::Int8 { seed },
        "onebit" => Codec::OneBit,
        "fourbit" => Codec::FourBit,
        other => panic!("unknown codec {other}"),
    }
}

fn position_of(case: &Value) -> Position {
    Position {
        first_element: number(&case["first_element"]).unwrap_or(0),
        sequence: number(&case["sequence"]).unwrap_or(0),
    }
}

/// The golden input: uniform values whose scale changes from one 8-bit block to the next.
fn golden_input() -> Vec<f32> {
    (0..5000u32)
        .map(|i| {
            let u = i.wrapping_mul(2_654_435_761).wrapping_add(12_345) as i32;
            u as f32 * 2f32.powi(-31) * 2f32.powi((i / 64 % 7) as i32 - 3)
        })
        .collect()
}

#[test]
fn golden_digests() {
    // Written out here too: editing the file of vectors must not be enough to change the format.
    let published = [
        ("int8", 5079, "7575b6f2b8df2440eb672e754af62fba", "54bf2fcb21cce4d0354d6789d00f8466"),
        ("onebit", 665, "2123c88f841979d5413d7841b9ecdbda", ""),
        ("fourbit", 2579, "ff608333824787ef77aea0d794d909d2", "7f926d628e7819b1f313e3f18eeb77da"),
    ];
    let input = golden_input();
    assert_eq!(sha256(&bytes(&input)), "63e0afea80970880b9e253abf4fa9964");
    for isa in isas() {
        for (name, len, digest, decoded) in published {
            let codec = codec_of(name, None);
            let body = encode(codec, isa, &input, None, Position::default());
            assert_eq!((body.len(), sha256(&body)), (len, digest.to_owned()), "{name} {}", isa.name());
            let values = decode(codec.id(), isa, &body, input.len());
            assert!(decoded.is_empty() || sha256(&bytes(&values)) == decoded, "{name} {}", isa.name());
        }
    }
    let onebit = encode(Codec::OneBit, Isa::Scalar, &input, None, Position::default());
    let (means, _) = onebit.as_chunks();
    assert_eq!([means[0], means[1]].map(f32::from_le_bytes), [0.999_158_6, 1.008_593_9]);
}

#[test]
fn golden_digests_of_the_vectors() {
    let golden = &vectors()["golden"];
    let input = golden_input();
    assert_eq!(sha256(&bytes(&input)), golden["input_sha256"].as_str().unwrap());
    let bodies = golden["bodies"].as_object().unwrap();
    assert_eq!(bodies.len(), 6);
    for isa in isas() {
        for (name, case) in bodies {
            let codec = codec_of(name, number(&case["seed"]));
            let body = encode(codec, isa, &input, None, position_of(case));
            codec.id().validate(isa, &body, input.len()).unwrap();
            assert_eq!(body.len() as u64, case["bytes"].as_u64().unwrap(), "{name}");
            assert_eq!(sha256(&body), case["sha256"].as_str().unwrap(), "{name} {}", isa.name());
            let decoded = decode(codec.id(), isa, &body, input.len());
            assert_eq!(sha256(&bytes(&decoded)), case["decoded_sha256"].as_str().unwrap(), "{name}");
        }
    }
}

#[test]
fn cases_of_the_vectors() {
    let vectors = vectors();
    for (case, isa) in
        vectors["cases"].as_array().unwrap().iter().flat_map(|c| isas().into_iter().map(move |i| (c, i)))
    {
        let name = case["codec"].as_str().unwrap();
        let what = format!("{name}, {}, {}", case["name"], isa.name());
        let codec = codec_of(name, number(&case["seed"]));
        assert_eq!(codec.id() as u64, vectors["codecs"][name].as_u64().unwrap());
        let input = floats(&case["input"]);
        let n = case["n"].as_u64().unwrap() as usize;
        assert_eq!(n, input.len(), "{what}");
        let mut residual = case.get("residual").map(floats);
        let body = encode(codec, isa, &input, residual.as_deref_mut(), position_of(case));
        assert_eq!(hex(&body), case["body"].as_str().unwrap(), "{what}");
        codec.id().validate(isa, &body, n).unwrap();
        let decoded = decode(codec.id(), isa, &body, n);
        assert_eq!(hex(&bytes(&decoded)), case["decoded"].as_str().unwrap(), "{what}");
        if let Some(residual) = residual {
            assert_eq!(hex(&bytes(&residual)), case["residual_after"].as_str().unwrap(), "{what}");
        }
    }
}

#[test]
fn float64_bodies_of_the_vectors() {
    let vectors = vectors();
    let (float64, id) = (&vectors["float64"], CodecId::Float64);
    assert_eq!(float64["number"].as_u64(), Some(id as u64));
    for case in float64["cases"].as_array().unwrap() {
        let (input, n) = (unhex(&case["input"]), case["n"].as_u64().unwrap() as usize);
        let values: Vec<f64> = input.as_chunks().0.iter().map(|&b| f64::from_le_bytes(b)).collect();
        assert_eq!(hex(View::Float64(&values).bytes()), case["body"].as_str().unwrap(), "{}", case["name"]);
        for isa in isas() {
            id.validate(isa, &unhex(&case["body"]), n).unwrap();
        }
    }
    for case in float64["refused"].as_array().unwrap() {
        let kind = if case["kind"] == "non_finite" { Kind::NonFinite } else { Kind::Frame };
        for isa in isas() {
            let error =
                id.validate(isa, &unhex(&case["body"]), case["n"].as_u64().unwrap() as usize).unwrap_err();
            assert_eq!(error.kind, kind, "{}: {error}", case["name"]);
        }
    }
}

#[test]
fn refused_bodies_of_the_vectors() {
    let vectors = vectors();
    for case in vectors["refused"].as_array().unwrap() {
        let number = vectors["codecs"][case["codec"].as_str().unwrap()].as_u64().unwrap();
        let id = CodecId::ALL.into_iter().find(|id| *id as u64 == number).unwrap();
        let kind = if case["kind"] == "non_finite" { Kind::NonFinite } else { Kind::Frame };
        for isa in isas() {
            let error =
                id.validate(isa, &unhex(&case["body"]), case["n"].as_u64().unwrap() as usize).unwrap_err();
            assert_eq!(error.kind, kind, "{}: {error}", case["name"]);
        }
    }
}

#[test]
fn a_refusal_names_the_element_wherever_it_is() {
    for isa in isas() {
        for n in [1usize, 63, 64, 65, 1024, 5000] {
            for at in [0, n / 2, n - 1] {
                let values = vec![1.0; n];
                for (id, width, bad) in [
                    (Codec::Float32, 4, &[0, 0, 0xC0, 0x7F][..]),
                    (Codec::BFloat16, 2, &[0x80, 0xFF]),
                    (Codec::Int8 { seed: None }, 1, &[0x80]),
                ] {
                    let mut body = encode(id, isa, &values, None, Position::default());
                    let start = body.len() - width * n + width * at;
                    body[start..start + width].copy_from_slice(bad);
                    let error = id.id().validate(isa, &body, n).unwrap_err();
                    assert!(error.message.contains(&format!("element {at} is not")), "{error}");
                }
            }
        }
    }
}

#[test]
fn what_is_not_finite_is_never_encoded_as_something_finite() {
    // Only reached without the check; then the server must detect it.
    for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY, f32::from_bits(0xFFFF_FFFF)] {
        for (isa, codec) in isas().into_iter().flat_map(|isa| CODECS.map(|codec| (isa, codec))) {
            let mut values = vec![1.0; 100];
            values[70] = bad;
            let body = encode(codec, isa, &values, None, Position::default());
            assert!(codec.id().validate(isa, &body, 100).is_err(), "{codec:?} {bad}");
        }
    }
}

/// Inputs of every kind, from a small generator so that a failure names its case.
fn inputs(n: usize) -> Vec<(&'static str, Vec<f32>)> {
    let mut state = n as u64 + 1;
    let mut random = move || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 32) as u32
    };
    let mut fill =
        |f: &mut dyn FnMut(usize, u32) -> f32| (0..n).map(|i| f(i, random())).collect::<Vec<f32>>();
    let uniform = |u: u32| u as i32 as f32 * 2f32.powi(-31);
    let finite = |u: u32| f32::from_bits(if u & 0x7F80_0000 == 0x7F80_0000 { u & !0x4000_0000 } else { u });
    vec![
        ("normal", fill(&mut |_, u| uniform(u))),
        ("any finite", fill(&mut |_, u| finite(u))),
        ("huge", fill(&mut |_, u| uniform(u) * f32::MAX)),
        ("tiny", fill(&mut |_, u| uniform(u) * 2f32.powi(-95))),
        ("subnormal", fill(&mut |_, u| f32::from_bits(u & 0x807F_FFFF))),
        ("zeros", fill(&mut |_, u| if u & 1 == 0 { 0.0 } else { -0.0 })),
        ("constant", fill(&mut |_, _| -0.3)),
        ("an outlier", fill(&mut |i, u| if i % 97 == 5 { 1e30 } else { uniform(u) })),
        ("wide", fill(&mut |i, u| uniform(u) * 2f32.powi((i / 50 % 200) as i32 - 100))),
    ]
}

#[test]
fn all_instruction_sets_agree_bit_for_bit() {
    let lengths = (0..=257).chain([1023, 1024, 1025, 4095, 4096, 4097, 258_048, 258_049]);
    for n in lengths {
        for (kind, values) in inputs(n) {
            // Small compared with the values, so that no sum overflows.
            let before: Vec<f32> = values.iter().rev().map(|x| x * 2f32.powi(-20)).collect();
            for codec in CODECS {
                let at = Position { first_element: 258_048, sequence: n as u64 };
                let mut residual = before.clone();
                let body = encode(codec, Isa::Scalar, &values, None, at);
                let fed = encode(codec, Isa::Scalar, &values, Some(&mut residual), at);
                let decoded = decode(codec.id(), Isa::Scalar, &body, n);
                assert!(decoded.iter().all(|x| x.is_finite()), "{codec:?} {kind} {n}");
                for isa in isas() {
                    let what = format!("{codec:?}, {kind}, {n}, {}", isa.name());
                    codec.id().validate(isa, &body, n).unwrap();
                    assert!(encode(codec, isa, &values, None, at) == body, "{what}");
                    let mut other = before.clone();
                    assert!(encode(codec, isa, &values, Some(&mut other), at) == fed, "{what}");
                    assert!(bits(&other) == bits(&residual), "{what}");
                    assert!(bits(&decode(codec.id(), isa, &body, n)) == bits(&decoded), "{what}");
                }
            }
        }
    }
}

#[test]
fn encode_appends() {
    let mut body = vec![1, 2, 3];
    Codec::Int8 { seed: None }.encode(Isa::best(), &[1.0], None, Position::default(), &mut body);
    assert_eq!(body, [1, 2, 3, 127, 64]);
}

#[test]
fn a_tensor_in_slices_has_the_bytes_of_the_whole() {
    // The stochastic counter belongs to the tensor, not to the slice.
    let codec = Codec::Int8 { seed: Some(5) };
    let input = golden_input();
    let whole = encode(codec, Isa::best(), &input, None, Position { first_element: 0, sequence: 8 });
    let blocks = input.len().div_ceil(64);
    for cut in [64, 1024, 4096] {
        let head =
            encode(codec, Isa::best(), &input[..cut], None, Position { first_element: 0, sequence: 8 });
        let at = Position { first_element: cut as u64, sequence: 8 };
        let tail = encode(codec, Isa::best(), &input[cut..], None, at);
        assert_eq!(head[cut / 64..], whole[blocks..blocks + cut]);
        assert_eq!(tail[blocks - cut / 64..], whole[blocks + cut..]);
    }
}

#[test]
fn error_feedback_loses_nothing() {
    let n = 3000;
    for codec in CODECS {
        let mut feedback = ErrorFeedback::new();
        let (mut sent, mut given) = (vec![0.0f64; n], vec![0.0f64; n]);
        for step in 0..50u64 {
            let g: Vec<f32> =
                (0..n).map(|i| ((i as f32 * 0.37 + step as f32 * 1.7).sin() + 0.2) * 0.5).collect();
            let at = Position { first_element: 0, sequence: step };
            let body = encode(codec, Isa::best(), &g, Some(feedback.residual("w", n).unwrap()), at);
            for (s, d) in sent.iter_mut().zip(decode(codec.id(), Isa::best(), &body, n)) {
                *s += f64::from(d);
            }
            for (s, g) in given.iter_mut().zip(&g) {
                *s += f64::from(*g);
            }
        }
        let residual = feedback.residual("w", n).unwrap();
        for i in 0..n {
            let gap = (sent[i] + f64::from(residual[i]) - given[i]).abs();
            assert!(gap < 1e-4, "{codec:?} element {i}: {gap}");
        }
        let largest = residual.iter().fold(0.0f32, |m, x| m.max(x.abs()));
        assert!(largest < 20.0, "{codec:?}: the residual grows: {largest}");
    }
}

#[test]
fn the_residual_is_zero_after_what_the_codec_can_say() {
    for codec in CODECS {
        let values: Vec<f32> = (0..2000).map(|i| if i % 2 == 0 { 0.5 } else { -0.25 }).collect();
        let mut residual = vec![0.0; values.len()];
        encode(codec, Isa::best(), &values, Some(&mut residual), Position::default());
        assert!(residual.iter().all(|&e| e == 0.0), "{codec:?}");
    }
}

#[test]
fn below_the_limit_the_residual_keeps_everything() {
    let tiny = vec![2f32.powi(-96), -2f32.powi(-97), f32::from_bits(1)];
    for codec in [Codec::Int8 { seed: None }, Codec::Int8 { seed: Some(1) }, Codec::OneBit, Codec::FourBit] {
        let mut residual = vec![0.0; 3];
        let body = encode(codec, Isa::best(), &tiny, Some(&mut residual), Position::default());
        assert_eq!(bits(&residual), bits(&tiny), "{codec:?}");
        assert!(decode(codec.id(), Isa::best(), &body, 3).iter().all(|&x| x == 0.0));
    }
}

#[test]
fn saved_residuals_go_on_bit_for_bit() {
    let n = 2500;
    let step = |feedback: &mut ErrorFeedback, t: u32| {
        let g: Vec<f32> = (0..n).map(|i| ((i as u32 * 31 + t * 17) as f32).sin()).collect();
        encode(Codec::OneBit, Isa::best(), &g, Some(feedback.residual("w", n).unwrap()), Position::default())
    };
    let mut one = ErrorFeedback::new();
    for t in 0..10 {
        step(&mut one, t);
    }
    one.residual("a", 3).unwrap().copy_from_slice(&[-0.0, 1e-40, 2.0]);
    assert_eq!(one.entries().map(|(name, _)| name).collect::<Vec<_>>(), ["a", "w"]);
    let mut two = ErrorFeedback::new();
    for (name, values) in one.entries() {
        two.load(name, values.to_vec()).unwrap();
    }
    for t in 10..20 {
        assert_eq!(step(&mut one, t), step(&mut two, t));
    }
    for ((a, x), (b, y)) in one.entries().zip(two.entries()) {
        assert_eq!((a, bits(x)), (b, bits(y)));
    }
    one.clear();
    assert_eq!(one.entries().count(), 0);
}

#[test]
fn what_was_refused_comes_back() {
    let n = 3000;
    let first = 1024;
    for (isa, codec) in isas().into_iter().flat_map(|isa| CODECS.map(|codec| (isa, codec))) {
        let mut feedback = ErrorFeedback::new();
        let g: Vec<f32> = (0..n).map(|i| (i as f32 * 0.7).sin()).collect();
        let residual = feedback.residual("w", first + n + 10).unwrap();
        residual[..first].fill(3.0);
        let body = encode(codec, isa, &g, Some(&mut residual[first..first + n]), Position::default());
        let kept: Vec<f32> = residual.to_vec();
        let decoded = decode(codec.id(), isa, &body, n);
        feedback.give_back(isa, "w", first, codec.id(), &body, n).unwrap();
        let residual = feedback.residual("w", first + n + 10).unwrap();
        let expected: Vec<f32> = (0..kept.len())
            .map(|i| if (first..first + n).contains(&i) { kept[i] + decoded[i - first] } else { kept[i] })
            .collect();
        assert_eq!(bits(residual), bits(&expected), "{codec:?}");
    }
}

/// For a client with `check_finite=False`.
#[test]
fn what_was_encoded_beside_something_not_finite_is_taken_back() {
    let n = 3000;
    for (isa, codec) in isas().into_iter().flat_map(|isa| CODECS.map(|codec| (isa, codec))) {
        let g: Vec<f32> = (0..n).map(|i| (i as f32 * 0.7).sin() * 10_f32.powi(i % 7 - 3)).collect();
        let before: Vec<f32> = (0..n).map(|i| (i as f32 * 0.3).cos() / 64.0).collect();
        let mut residual = before.clone();
        let position = Position::default();
        let check = |g: &[f32], residual: &mut [f32]| {
            outgoing::check_and_encode(isa, codec, g, Some(residual), position)
        };
        let (mut other, body) = (before.clone(), check(&g, &mut residual).unwrap());
        assert_eq!(body, encode(codec, isa, &g, Some(&mut other), position), "{codec:?}");
        assert_eq!(bits(&residual), bits(&other), "{codec:?}");

        for (at, bad) in [(0_usize, f32::NAN), (1500, f32::NEG_INFINITY), (2999, f32::MAX)] {
            let (mut g, mut residual, mut before) = (g.clone(), before.clone(), before.clone());
            g[at] = bad;
            // In the last case only the sum with the residual is too large.
            (residual[at], before[at]) = (1e38, 1e38);
            let error = check(&g, &mut residual).unwrap_err();
            assert!(
                error.kind == Kind::NonFinite && error.message.contains(&format!("index {at}")),
                "{error}"
            );
            for (i, (now, then)) in residual.iter().zip(&before).enumerate() {
                let beside = i / 64 == at / 64;
                // Sums of up to 1000 are rounded.
                let most = if beside { 0.0 } else { 4000.0 * f32::EPSILON };
                assert!((now - then).abs() <= most, "{codec:?}, {i}: {now} for {then}");
            }
        }
    }
}

#[test]
fn a_wrong_give_back_changes_nothing() {
    let mut feedback = ErrorFeedback::new();
    feedback.residual("w", 8).unwrap().fill(f32::MAX);
    let before = feedback.clone();
    let body = bytes(&[1.0, 2.0, 3.0, f32::MAX]);
    let mut give = |name: &str, first, n, body: &[u8]| {
        let error = feedback.give_back(Isa::best(), name, first, CodecId::Float32, body, n).unwrap_err();
        assert_eq!(error.tensor.as_deref(), Some(name));
        error.kind
    };
    assert_eq!(give("x", 0, 4, &body), Kind::UnknownTensor);
    assert_eq!(give("w", 5, 4, &body), Kind::Shape);
    assert_eq!(give("w", usize::MAX, 4, &body), Kind::Shape);
    assert_eq!(give("w", 0, 3, &body), Kind::Frame);
    assert_eq!(give("w", 0, 4, &body), Kind::NonFinite);
    assert_eq!(feedback, before);
    assert_eq!(feedback.residual("w", 9).unwrap_err().kind, Kind::Shape);
    assert_eq!(feedback.load("w", vec![0.0, f32::NAN]).unwrap_err().kind, Kind::NonFinite);
    assert_eq!(feedback, before);
}
