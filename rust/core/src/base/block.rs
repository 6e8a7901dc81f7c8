//! The block: all kernels work on short runs of elements that stay in the first-level cache.

/// Elements of one block: a multiple of every codec's block, and a divisor of every slice length but a
/// tensor's last.
pub const BLOCK: usize = 1024;

/// Scratch space for one block.
pub(crate) type Block = AlignedBlock<BLOCK>;

/// Scratch space for `N` elements, aligned to a cache line: a vector that crosses two lines costs twice.
#[derive(Clone, Copy, Debug)]
#[repr(align(64))]
pub(crate) struct AlignedBlock<const N: usize>(pub(crate) [f32; N]);

impl<const N: usize> AlignedBlock<N> {
    pub(crate) const ZERO: Self = Self([0.0; N]);
}

impl<const N: usize> AsMut<[f32]> for AlignedBlock<N> {
    #[inline(always)]
    fn as_mut(&mut self) -> &mut [f32] {
        &mut self.0
    }
}

/// The blocks of `n` elements as (first element, length).
#[inline(always)]
pub fn blocks(n: usize) -> impl Iterator<Item = (usize, usize)> {
    (0..n).step_by(BLOCK).map(move |at| (at, BLOCK.min(n - at)))
}

/// An element in its stored form.
pub trait Lane<T = f32>: Copy {
    /// The element.
    fn value(self) -> T;
}

impl Lane for f32 {
    #[inline(always)]
    fn value(self) -> f32 {
        self
    }
}

impl Lane<f64> for f64 {
    #[inline(always)]
    fn value(self) -> f64 {
        self
    }
}
