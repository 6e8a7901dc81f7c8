//! The element types that vectors are made of and that SGD steps. Products and linear combinations of vectors
//! are computed in float64 and rounded once; a step computes in the type itself.

use bytemuck::Pod;
use std::ops::{Add, Mul, Neg};

/// A float that is exact in float64.
pub(crate) trait Real:
    Pod + Neg<Output = Self> + Add<Output = Self> + Mul<Output = Self> + Send + Sync
{
    /// Zero.
    const ZERO: Self;
    /// The value in float64.
    fn wide(self) -> f64;
    /// The nearest value to one in float64.
    fn nearest(wide: f64) -> Self;
    /// The bits of a magnitude, which order as the magnitudes do; NaN is above infinity.
    type Magnitude: Copy + Ord + Default;
    /// The bits without the sign.
    fn magnitude(self) -> Self::Magnitude;
    /// The magnitude with these bits.
    fn of_magnitude(bits: Self::Magnitude) -> f64;
    /// `self * factor + term`, rounded once.
    fn fma(self, factor: Self, term: Self) -> Self;
}

impl Real for f32 {
    const ZERO: Self = 0.0;

    #[inline(always)]
    fn wide(self) -> f64 {
        f64::from(self)
    }

    #[inline(always)]
    fn nearest(wide: f64) -> Self {
        wide as Self
    }

    type Magnitude = u32;

    #[inline(always)]
    fn magnitude(self) -> u32 {
        self.to_bits() & (u32::MAX >> 1)
    }

    fn of_magnitude(bits: u32) -> f64 {
        Self::from_bits(bits).into()
    }

    #[inline(always)]
    fn fma(self, factor: Self, term: Self) -> Self {
        self.mul_add(factor, term)
    }
}

impl Real for f64 {
    const ZERO: Self = 0.0;

    #[inline(always)]
    fn wide(self) -> f64 {
        self
    }

    #[inline(always)]
    fn nearest(wide: f64) -> Self {
        wide
    }

    type Magnitude = u64;

    #[inline(always)]
    fn magnitude(self) -> u64 {
        self.to_bits() & (u64::MAX >> 1)
    }

    fn of_magnitude(bits: u64) -> f64 {
        Self::from_bits(bits)
    }

    #[inline(always)]
    fn fma(self, factor: Self, term: Self) -> Self {
        self.mul_add(factor, term)
    }
}
