//! The instruction set, a plain value chosen once per process, and the entries that compile a loop for it.
//! [`Isa::run`] chooses among them, and for racing memory `memory::cell::run_lines`.
//!
//! A [`Kernel`] is ordinary safe Rust whose `run` is inlined into one entry function per instruction set; the
//! compiler vectorises each copy. All copies perform the same IEEE operations, so they agree bit for bit.
#![allow(unsafe_code)]

use crate::base::error::{Error, Kind, Result};
use std::sync::OnceLock;

/// An instruction set that kernels are compiled for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Isa {
    /// The baseline of the target, one lane at a time where memory is shared.
    Scalar,
    /// x86-64 with AVX2 and FMA.
    Avx2,
    /// x86-64 with AVX-512 F, BW, DQ and VL.
    Avx512,
    /// AArch64 with NEON.
    Neon,
}

impl Isa {
    /// All instruction sets, also those that this CPU lacks.
    pub const ALL: [Self; 4] = [Self::Scalar, Self::Avx2, Self::Avx512, Self::Neon];

    /// The name used by `FASTPS_ISA`.
    pub fn name(self) -> &'static str {
        match self {
            Self::Scalar => "scalar",
            Self::Avx2 => "avx2",
            Self::Avx512 => "avx512",
            Self::Neon => "neon",
        }
    }

    /// Returns whether this CPU has it.
    #[inline]
    pub fn is_available(self) -> bool {
        static AVAILABLE: OnceLock<[bool; Isa::ALL.len()]> = OnceLock::new();
        AVAILABLE.get_or_init(|| Self::ALL.map(Self::detect))[self as usize]
    }

    fn detect(self) -> bool {
        match self {
            Self::Scalar => true,
            #[cfg(all(target_arch = "x86_64", not(miri)))]
            Self::Avx2 => {
                is_x86_feature_detected!("avx2")
                    && is_x86_feature_detected!("fma")
                    && is_x86_feature_detected!("bmi2")
                    && is_x86_feature_detected!("popcnt")
            }
            #[cfg(all(target_arch = "x86_64", not(miri)))]
            Self::Avx512 => {
                Self::Avx2.detect()
                    && is_x86_feature_detected!("avx512f")
                    && is_x86_feature_detected!("avx512bw")
                    && is_x86_feature_detected!("avx512dq")
                    && is_x86_feature_detected!("avx512vl")
            }
            #[cfg(all(target_arch = "aarch64", not(miri)))]
            Self::Neon => true,
            #[allow(unreachable_patterns)]
            _ => false,
        }
    }

    /// Parses a name as `FASTPS_ISA` takes it; fails if the CPU lacks the instruction set.
    pub fn parse(name: &str) -> Result<Self> {
        let isa = Self::ALL.into_iter().find(|isa| isa.name() == name).ok_or_else(|| {
            Error::new(Kind::Config, "FASTPS_ISA names no instruction set")
                .expected("scalar, avx2, avx512 or neon", name)
        })?;
        if isa.is_available() {
            Ok(isa)
        } else {
            Err(Error::new(Kind::Config, format!("FASTPS_ISA={name}: this CPU lacks {name}")))
        }
    }

    /// The process's instruction set: `FASTPS_ISA` if set, else the best available. Decided at the first
    /// call.
    pub fn get() -> Result<Self> {
        static CHOSEN: OnceLock<Result<Isa>> = OnceLock::new();
        CHOSEN
            .get_or_init(|| match std::env::var("FASTPS_ISA") {
                Ok(name) if !name.is_empty() => Self::parse(&name),
                _ => Ok(Self::best()),
            })
            .clone()
    }

    /// The widest instruction set of this CPU.
    pub fn best() -> Self {
        [Self::Avx512, Self::Avx2, Self::Neon]
            .into_iter()
            .find(|isa| isa.is_available())
            .unwrap_or(Self::Scalar)
    }

    /// Runs a kernel compiled for this instruction set; falls back to scalar where the CPU lacks it.
    #[inline]
    pub fn run<K: Kernel>(self, kernel: K) -> K::Out {
        match self {
            #[cfg(all(target_arch = "x86_64", not(any(miri, loom, fastps_scalar))))]
            // SAFETY: the features were just checked (the check is a cached load).
            Self::Avx512 if K::WIDE && self.is_available() => unsafe { run_avx512(kernel) },
            #[cfg(all(target_arch = "x86_64", not(any(miri, loom, fastps_scalar))))]
            // SAFETY: as above; `detect` reports AVX-512 only where AVX2 is present too.
            Self::Avx512 | Self::Avx2 if self.is_available() => unsafe { run_avx2(kernel) },
            // NEON is part of the AArch64 baseline, so the scalar entry is already compiled for it.
            _ => run_scalar(kernel),
        }
    }
}

/// Bytes of a cache line.
#[cfg(all(target_arch = "x86_64", not(miri)))]
const LINE: usize = 64;

/// Prefetches memory that will be read soon; a hint without other effects.
#[inline(always)]
pub(crate) fn prefetch<T>(values: &[T]) {
    #[cfg(all(target_arch = "x86_64", not(miri)))]
    {
        use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
        let start = values.as_ptr().cast::<i8>();
        let before = start.addr() % LINE;
        for at in (0..before + size_of_val(values)).step_by(LINE) {
            // SAFETY: a hint may name any address; SSE is part of x86-64.
            unsafe { _mm_prefetch::<_MM_HINT_T0>(start.wrapping_sub(before).wrapping_add(at)) };
        }
    }
    let _ = values;
}

/// A loop that is compiled once per instruction set. `run` and all that it calls must be `#[inline(always)]`.
pub trait Kernel {
    /// The result of the loop.
    type Out;
    /// Set to use AVX-512. Unset for a loop that streams through memory and needs none of its masks: vectors
    /// of a whole cache line arrive from the second-level cache and beyond up to a tenth more slowly than
    /// vectors of half a line.
    const WIDE: bool = true;
    /// The loop.
    fn run(self) -> Self::Out;
}

/// Not inlined; otherwise every caller would contain another copy of every kernel's loops.
#[inline(never)]
pub(crate) fn run_scalar<K: Kernel>(kernel: K) -> K::Out {
    kernel.run()
}

#[cfg(all(target_arch = "x86_64", not(any(miri, loom, fastps_scalar))))]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,bmi2,popcnt")]
pub(crate) fn run_avx512<K: Kernel>(kernel: K) -> K::Out {
    kernel.run()
}

#[cfg(all(target_arch = "x86_64", not(any(miri, loom, fastps_scalar))))]
#[target_feature(enable = "avx2,fma,bmi2,popcnt")]
pub(crate) fn run_avx2<K: Kernel>(kernel: K) -> K::Out {
    kernel.run()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parse_rejects_unknown_and_absent() {
        assert_eq!(Isa::parse("sse9").unwrap_err().kind, Kind::Config);
        for isa in Isa::ALL {
            assert_eq!(Isa::parse(isa.name()).is_ok(), isa.is_available());
        }
    }
}
