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

    #[inline(always)]
    fn fma(self, factor: Self, term: Self) -> Self {
        self.mul_add(factor, term)
    }
}
