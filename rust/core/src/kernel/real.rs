//! The element types that vectors are made of. Products and linear combinations are computed in float64 and
//! rounded once.

use bytemuck::Pod;

/// A float that is exact in float64.
pub(crate) trait Real: Pod + Send + Sync {
    /// Zero.
    const ZERO: Self;
    /// The value in float64.
    fn wide(self) -> f64;
    /// The nearest value to one in float64.
    fn nearest(wide: f64) -> Self;
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
}
