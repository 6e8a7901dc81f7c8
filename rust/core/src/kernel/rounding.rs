//! How a step rounds its values to bfloat16. A step computes in float32; rounding to nearest drops every update
//! that is smaller than half of the distance to the next bfloat16, so training at a small rate stops. Stochastic
//! rounding takes the nearer of the two neighbours with the larger probability, and is right on average:
//!
//! ```text
//! r(x) = sign(x) * ((bits(|x|) + u) >> 16),   u = 16 random bits
//! ```
//!
//! `u` is a function of seed, element and step: Philox4x32-10 with key = seed and counter = (element of the tensor
//! / 8, 2^63 + steps that the slice had taken); eight elements take the low, then the high half of each of the four
//! words. So a log, a restart, another number of shards and another instruction set give the same bits. The 2^63
//! keeps these counters apart from those of the codec `Int8`.

use crate::base::dtype::widened;
use crate::base::error::{Error, Kind, Result};
use crate::base::isa::{Isa, Kernel};
use crate::kernel::codec::philox::{self, HALVES};
use serde::{Deserialize, Serialize};
use std::fmt;

/// How a step rounds its values.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Rounding {
    /// To one of the two neighbours, at random, by a seed.
    Stochastic {
        /// The key of the random numbers.
        seed: u64,
    },
    /// To the nearest value, and of two to the even one: for comparison, since small updates are lost.
    Nearest,
}

impl Rounding {
    /// The seed of a tensor whose registration names none: FNV-1a of its name, so that every worker registers the
    /// same and no two tensors round alike.
    pub fn seed_of(name: &str) -> u64 {
        let step = |hash: u64, byte: u8| (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01B3);
        name.bytes().fold(0xCBF2_9CE4_8422_2325, step)
    }

    /// Reads the two settings of a registration; without a seed, the seed is that of the name.
    pub fn parse(rounding: &str, seed: Option<u64>, tensor: &str) -> Result<Self> {
        match (rounding, seed) {
            ("stochastic", seed) => {
                Ok(Self::Stochastic { seed: seed.unwrap_or_else(|| Self::seed_of(tensor)) })
            }
            ("nearest", None) => Ok(Self::Nearest),
            ("nearest", Some(seed)) => {
                let error = Error::new(Kind::Config, "rounding to nearest has no seed");
                Err(error.tensor(tensor).expected("seed=None", seed))
            }
            _ => {
                let error = Error::new(Kind::Config, "unknown rounding");
                Err(error.tensor(tensor).expected("\"stochastic\" or \"nearest\"", format!("{rounding:?}")))
            }
        }
    }

    /// The name in Python.
    pub fn name(self) -> &'static str {
        match self {
            Self::Stochastic { .. } => "stochastic",
            Self::Nearest => "nearest",
        }
    }

    /// The seed, if it has one.
    pub fn seed(self) -> Option<u64> {
        match self {
            Self::Stochastic { seed } => Some(seed),
            Self::Nearest => None,
        }
    }
}

impl fmt::Display for Rounding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Stochastic { seed } => write!(f, "stochastic, seed {seed}"),
            Self::Nearest => f.write_str("nearest"),
        }
    }
}

/// Set in the step count of a counter.
const STEPS: u64 = 1 << 63;

/// Rounds the values of one slice in one step.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Rounder {
    pub(crate) isa: Isa,
    pub(crate) rounding: Rounding,
    /// Index in the tensor of the slice's first element.
    pub(crate) first: u64,
    /// Steps that the slice had taken before this one.
    pub(crate) step: u64,
}

impl Rounder {
    /// Rounds the slice's elements from `at` on.
    pub(crate) fn round(&self, at: usize, values: &[f32], to: &mut [u16]) {
        let Self { isa, rounding, first, step } = *self;
        match rounding {
            Rounding::Nearest => {
                isa.run(Nearest { values: bytemuck::cast_slice(values), to: bytemuck::cast_slice_mut(to) });
            }
            Rounding::Stochastic { seed } => {
                isa.run(Stochastic { values, to, seed, first: first + at as u64, step });
            }
        }
    }

    /// Widens values, which is exact.
    pub(crate) fn widen(&self, values: &[u16], to: &mut [f32]) {
        self.isa.run(Widen { values, to });
    }
}

struct Widen<'a> {
    values: &'a [u16],
    to: &'a mut [f32],
}

impl Kernel for Widen<'_> {
    type Out = ();

    #[inline(always)]
    fn run(self) {
        for (to, bits) in self.to.iter_mut().zip(self.values) {
            *to = widened(*bits);
        }
    }
}

/// Appends float32 values, little-endian, as bfloat16, rounded to nearest even. A finite value stays finite, an
/// infinity stays infinity, and NaN stays NaN: a reader sees what the tensor has.
pub fn append_nearest(isa: Isa, values: &[u8], to: &mut Vec<u8>) {
    let (values, _) = values.as_chunks();
    let begin = to.len();
    to.resize(begin + 2 * values.len(), 0);
    isa.run(Nearest { values, to: to[begin..].as_chunks_mut().0 });
}

struct Nearest<'a> {
    values: &'a [[u8; 4]],
    to: &'a mut [[u8; 2]],
}

impl Kernel for Nearest<'_> {
    type Out = ();

    #[inline(always)]
    fn run(self) {
        for (to, x) in self.to.iter_mut().zip(self.values) {
            let x = f32::from_le_bytes(*x);
            *to = rounded(x, 0x7FFF + (x.to_bits() >> 16 & 1)).to_le_bytes();
        }
    }
}

struct Stochastic<'a> {
    values: &'a [f32],
    to: &'a mut [u16],
    seed: u64,
    /// Index in the tensor of the first value.
    first: u64,
    step: u64,
}

impl Kernel for Stochastic<'_> {
    type Out = ();

    #[inline(always)]
    fn run(self) {
        let Self { mut values, mut to, seed, first, step } = self;
        // Rows may begin within the eight elements of a counter.
        let (mut counter, mut skipped) = (first / 8, (first % 8) as usize);
        while !values.is_empty() {
            let noise = philox::halves(seed, counter, STEPS | step);
            let len = values.len().min(HALVES - skipped);
            let (now, later) = values.split_at(len);
            let (now_to, later_to) = to.split_at_mut(len);
            for ((to, x), u) in now_to.iter_mut().zip(now).zip(&noise[skipped..]) {
                *to = rounded(*x, u32::from(*u));
            }
            (values, to) = (later, later_to);
            (counter, skipped) = (counter.wrapping_add(philox::LANES as u64), 0);
        }
    }
}

/// The upper half of a float32 to whose bits, without the sign, `added` is added. A finite value stays finite,
/// infinity stays infinity, and every NaN becomes one of them.
#[inline(always)]
fn rounded(x: f32, added: u32) -> u16 {
    let bits = x.to_bits();
    let magnitude = bits & 0x7FFF_FFFF;
    let finite = (magnitude.wrapping_add(added) >> 16).min(0x7F7F);
    let other = if magnitude > 0x7F80_0000 { 0x7FC0 } else { 0x7F80 };
    let kept = if magnitude < 0x7F80_0000 { finite } else { other };
    ((bits >> 16) & 0x8000 | kept) as u16
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rounder(isa: Isa, rounding: Rounding) -> Rounder {
        Rounder { isa, rounding, first: 4096, step: 17 }
    }

    fn round(rounder: Rounder, at: usize, values: &[f32]) -> Vec<u16> {
        let mut to = vec![0; values.len()];
        rounder.round(at, values, &mut to);
        to
    }

    #[test]
    fn every_part_and_instruction_set_rounds_alike() {
        let values: Vec<f32> = (0..1000).map(|i| (i as f32 - 500.0) * 1.000_123e-3).collect();
        for rounding in [Rounding::Nearest, Rounding::Stochastic { seed: 7 }] {
            let all = round(rounder(Isa::Scalar, rounding), 3, &values);
            for isa in Isa::ALL {
                for (start, end) in [(0, 1), (1, 9), (5, 300), (250, 1000), (999, 1000), (4, 4)] {
                    let part = round(rounder(isa, rounding), 3 + start, &values[start..end]);
                    assert_eq!(part, all[start..end], "{rounding} {isa:?} {start}..{end}");
                }
            }
        }
    }

    /// Against `tests/vectors/bfloat16.json`, made in NumPy.
    #[test]
    fn roundings_are_the_golden_ones() {
        let all = include_str!("../../../../tests/vectors/bfloat16.json");
        let all: serde_json::Value = serde_json::from_str(all).unwrap();
        let seed = u64::from_str_radix(all["seed"].as_str().unwrap(), 16).unwrap();
        let cases = all["cases"].as_array().unwrap();
        assert_eq!(cases.len(), 32);
        for case in cases {
            let bytes = |name: &str| -> Vec<u8> {
                let digits = case[name].as_str().unwrap().as_bytes();
                let digit = |digit: u8| (digit as char).to_digit(16).unwrap() as u8;
                digits.chunks(2).map(|pair| digit(pair[0]) << 4 | digit(pair[1])).collect()
            };
            let values: Vec<f32> =
                bytes("input").as_chunks().0.iter().map(|x| f32::from_le_bytes(*x)).collect();
            let (first, step) = (case["first"].as_u64().unwrap(), case["step"].as_u64().unwrap());
            for (name, rounding) in
                [("nearest", Rounding::Nearest), ("stochastic", Rounding::Stochastic { seed })]
            {
                let bits: Vec<u8> = round(Rounder { isa: Isa::best(), rounding, first, step }, 0, &values)
                    .into_iter()
                    .flat_map(u16::to_le_bytes)
                    .collect();
                assert_eq!(bits, bytes(name), "{name} at step {step}");
            }
        }
    }

    #[test]
    fn what_is_exact_stays_and_what_is_finite_stays_finite() {
        let largest = f32::from_bits(0x7F7F_0000);
        let exact = [0.0, -0.0, 1.0, -2.5, largest, f32::from_bits(0x0001_0000), f32::INFINITY];
        for seed in 0..50 {
            let rounder = rounder(Isa::Scalar, Rounding::Stochastic { seed });
            for (bits, x) in round(rounder, 0, &exact).into_iter().zip(exact) {
                assert_eq!(u32::from(bits) << 16, x.to_bits());
            }
            assert_eq!(round(rounder, 0, &[f32::MAX, f32::MIN]), [0x7F7F, 0xFF7F]);
            assert_eq!(round(rounder, 0, &[f32::NAN, -f32::NAN]), [0x7FC0, 0xFFC0]);
        }
        let halfway = [f32::from_bits(0x3F80_8000), f32::from_bits(0x3F81_8000), f32::MAX];
        assert_eq!(round(rounder(Isa::Scalar, Rounding::Nearest), 0, &halfway), [0x3F80, 0x3F82, 0x7F7F]);
        let (mut bytes, mut read) = (vec![0xFF], vec![7]);
        for x in [-0.0, f32::MIN, f32::NEG_INFINITY, f32::NAN] {
            bytes.extend(x.to_le_bytes());
        }
        append_nearest(Isa::Scalar, &bytes[1..], &mut read);
        assert_eq!(read, [7, 0, 0x80, 0x7F, 0xFF, 0x80, 0xFF, 0xC0, 0x7F]);
    }

    #[test]
    fn the_mean_of_many_roundings_is_the_value() {
        const COUNT: usize = 100_000;
        let step = 1.0 / 128.0;
        for share in [0.001, 0.25, 0.5, 0.9] {
            for sign in [1.0, -1.0] {
                let x = sign * (1.0 + share as f32 * step as f32);
                let exact = f64::from(x.abs() - 1.0) / step;
                let up = round(rounder(Isa::best(), Rounding::Stochastic { seed: 3 }), 0, &vec![x; COUNT]);
                let up = up.into_iter().filter(|bits| bits & 0x7FFF == 0x3F81).count() as f64;
                let error = (up / COUNT as f64 - exact).abs();
                assert!(error <= 4.0 * (exact * (1.0 - exact) / COUNT as f64).sqrt(), "{x}: {error}");
            }
        }
    }

    #[test]
    fn settings_are_read_and_refused_by_name() {
        assert_eq!(Rounding::seed_of(""), 0xCBF2_9CE4_8422_2325);
        assert_eq!(Rounding::seed_of("a"), 0xAF63_DC4C_8601_EC8C);
        assert_eq!(Rounding::parse("stochastic", Some(3), "w"), Ok(Rounding::Stochastic { seed: 3 }));
        assert_eq!(Rounding::parse("nearest", None, "w"), Ok(Rounding::Nearest));
        assert!(Rounding::parse("nearest", Some(1), "w").unwrap_err().message.contains("seed"));
        assert!(Rounding::parse("up", None, "w").unwrap_err().to_string().contains("\"up\""));
    }
}
