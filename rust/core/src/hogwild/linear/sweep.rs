//! Loops over all coefficients, block by block. No other thread may change them at the same time.

use crate::base::block::{Block, blocks};
use crate::base::isa::{Isa, Kernel};
use crate::memory::RacyBuffer;

/// Partial sums, because each addition to a single sum would wait for the previous one.
const SUMS: usize = 16;

/// Multiplies all coefficients by a factor.
pub(super) fn scale(isa: Isa, weights: &RacyBuffer, factor: f64) {
    let mut room = Block::ZERO;
    for (at, len) in blocks(weights.len()) {
        let room = &mut room.0[..len];
        weights.load(isa, at, room);
        isa.run(Scale(room, factor));
        weights.store(isa, at, room);
    }
}

/// The sum of squares and the sum of magnitudes; not finite if a coefficient is not.
pub(super) fn norms(isa: Isa, weights: &RacyBuffer) -> (f64, f64) {
    let (mut room, mut squares, mut magnitudes) = (Block::ZERO, 0.0, 0.0);
    for (at, len) in blocks(weights.len()) {
        let room = &mut room.0[..len];
        weights.load(isa, at, room);
        let (square, magnitude) = isa.run(Norms(room));
        squares += square;
        magnitudes += magnitude;
    }
    (squares, magnitudes)
}

struct Scale<'a>(&'a mut [f32], f64);

impl Kernel for Scale<'_> {
    type Out = ();
    #[inline(always)]
    fn run(self) {
        self.0.iter_mut().for_each(|w| *w = (self.1 * f64::from(*w)) as f32);
    }
}

struct Norms<'a>(&'a [f32]);

impl Kernel for Norms<'_> {
    type Out = (f64, f64);
    #[inline(always)]
    fn run(self) -> (f64, f64) {
        let (chunks, rest) = self.0.as_chunks::<SUMS>();
        let (mut squares, mut magnitudes) = ([0.0; SUMS], [0.0; SUMS]);
        for chunk in chunks {
            for k in 0..SUMS {
                let w = f64::from(chunk[k]);
                squares[k] += w * w;
                magnitudes[k] += w.abs();
            }
        }
        for (k, w) in rest.iter().map(|w| f64::from(*w)).enumerate() {
            squares[k] += w * w;
            magnitudes[k] += w.abs();
        }
        (squares.iter().sum(), magnitudes.iter().sum())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn filled(values: &[f32]) -> RacyBuffer {
        let weights = RacyBuffer::filled(values.len(), 0.0);
        weights.store(Isa::best(), 0, values);
        weights
    }

    #[test]
    fn sweeps_are_plain_loops() {
        for n in [0, 1, 15, 16, 17, 1023, 1024, 1025, 3000] {
            let values: Vec<f32> = (0..n).map(|j| (j as f32 - 700.0) * 0.37).collect();
            let weights = filled(&values);
            let (squares, magnitudes) = norms(Isa::best(), &weights);
            let square: f64 = values.iter().map(|w| f64::from(*w).powi(2)).sum();
            let magnitude: f64 = values.iter().map(|w| f64::from(w.abs())).sum();
            assert!((squares - square).abs() <= 1e-12 * square, "{n} {squares} {square}");
            assert!((magnitudes - magnitude).abs() <= 1e-12 * magnitude, "{n} {magnitudes} {magnitude}");
            scale(Isa::best(), &weights, 0.3);
            let scaled: Vec<f32> = values.iter().map(|w| (0.3 * f64::from(*w)) as f32).collect();
            assert!((0..n).all(|j| weights.get(j) == scaled[j]), "{n}");
        }
    }

    #[test]
    fn norms_show_what_is_not_finite() {
        for wrong in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            for place in [0, 20, 1040] {
                let mut values = vec![f32::MAX; 1041];
                assert!(norms(Isa::best(), &filled(&values)).0.is_finite());
                values[place] = wrong;
                let (squares, magnitudes) = norms(Isa::best(), &filled(&values));
                assert!(!squares.is_finite() && !magnitudes.is_finite(), "{wrong} {place}");
            }
        }
    }
}
