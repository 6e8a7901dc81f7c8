//! Random numbers that depend only on seed, purpose, worker and step, not on earlier draws: `SplitMix64`
//! (Steele, Lea, Flood 2014), started at a hash of all four.

/// Purpose of random numbers.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Purpose {
    /// Duration of a gradient.
    Duration = 1,
    /// Noise of a gradient.
    Noise = 2,
    /// Rows of a minibatch.
    Batch = 3,
    /// Initial parameters.
    Start = 4,
}

/// The distance between two states.
const GAMMA: u64 = 0x9E37_79B9_7F4A_7C15;

/// A sequence of numbers.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Draws(u64);

fn mixed(x: u64) -> u64 {
    let x = (x ^ (x >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    let x = (x ^ (x >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    x ^ (x >> 31)
}

impl Draws {
    /// The beginning of the numbers of a worker's step.
    pub(crate) fn at(seed: u64, purpose: Purpose, worker: u64, step: u64) -> Self {
        let key = [purpose as u64, worker, step].into_iter();
        Self(key.fold(mixed(seed.wrapping_add(GAMMA)), |hash, part| {
            mixed(hash ^ mixed(part.wrapping_add(1).wrapping_mul(GAMMA)))
        }))
    }

    fn bits(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(GAMMA);
        mixed(self.0)
    }

    /// A number in (0, 1].
    pub(crate) fn uniform(&mut self) -> f64 {
        ((self.bits() >> 11) + 1) as f64 / (1_u64 << 53) as f64
    }

    /// An integer below `n`.
    pub(crate) fn below(&mut self, n: usize) -> usize {
        ((u128::from(self.bits()) * n as u128) >> 64) as usize
    }

    /// An exponentially distributed number of mean 1, > 0.
    pub(crate) fn exponential(&mut self) -> f64 {
        -libm::log(self.uniform()) + f64::MIN_POSITIVE
    }

    /// A normally distributed number (Box and Muller 1958).
    pub(crate) fn normal(&mut self) -> f64 {
        let radius = libm::sqrt(2.0 * self.exponential());
        radius * libm::cos(2.0 * std::f64::consts::PI * self.uniform())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn draws_have_the_moments_of_their_distributions() {
        let n = 100_000;
        let mut draws = Draws::at(7, Purpose::Noise, 3, 11);
        let (mut mean, mut normal, mut square, mut low) = (0.0, 0.0, 0.0, 0);
        for _ in 0..n {
            let (e, z) = (draws.exponential(), draws.normal());
            assert!(e > 0.0);
            (mean, normal, square) = (mean + e, normal + z, square + z * z);
            low += usize::from(draws.below(10) < 3);
        }
        let n = f64::from(n);
        assert!(
            (mean / n - 1.0).abs() < 0.02 && (normal / n).abs() < 0.02 && (square / n - 1.0).abs() < 0.02
        );
        assert!((low as f64 / n - 0.3).abs() < 0.01);
    }

    #[test]
    fn every_part_of_the_place_counts() {
        let first = |seed, purpose, worker, step| Draws::at(seed, purpose, worker, step).bits();
        let own = first(1, Purpose::Duration, 2, 3);
        assert_eq!(own, first(1, Purpose::Duration, 2, 3));
        for other in [
            first(0, Purpose::Duration, 2, 3),
            first(1, Purpose::Batch, 2, 3),
            first(1, Purpose::Duration, 3, 2),
            first(1, Purpose::Duration, 2, 4),
        ] {
            assert_ne!(own, other);
        }
    }
}
