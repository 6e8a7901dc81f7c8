//! Blocks in, blocks out: all arithmetic is done on short runs of elements that stay in the first-level cache.

/// Elements of one block: a multiple of every codec's block, a divisor of every slice but a tensor's last.
pub const BLOCK: usize = 1024;

/// The blocks of `n` elements as (first element, length).
#[inline(always)]
pub fn blocks(n: usize) -> impl Iterator<Item = (usize, usize)> {
    (0..n).step_by(BLOCK).map(move |at| (at, BLOCK.min(n - at)))
}
