//! Blocks in, blocks out: all arithmetic is done on short runs of elements that stay in the first-level
//! cache.

/// Elements of one block: a multiple of every codec's block, a divisor of every slice but a tensor's last.
pub const BLOCK: usize = 1024;

/// Room for one block.
pub(crate) type Block = Room<BLOCK>;

/// Room for so many elements, aligned to a cache line: a vector that crosses two costs twice.
#[derive(Clone, Copy, Debug)]
#[repr(align(64))]
pub(crate) struct Room<const N: usize>(pub(crate) [f32; N]);

impl<const N: usize> Room<N> {
    pub(crate) const ZERO: Self = Self([0.0; N]);
}

impl<const N: usize> AsMut<[f32]> for Room<N> {
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

/// A value as it lies in memory.
pub trait Lane: Copy {
    /// As float32.
    fn value(self) -> f32;
}

impl Lane for f32 {
    #[inline(always)]
    fn value(self) -> f32 {
        self
    }
}
