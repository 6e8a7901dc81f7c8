//! Philox4x32-10 (Salmon et al., SC 2011): random words that are a pure function of key and counter, so that
//! stochastic rounding gives the same bytes in any order, on any device and in any language.

use std::array;

const MULTIPLIERS: [u64; 2] = [0xD251_1F53, 0xCD9E_8D57];
const WEYL: [u32; 2] = [0x9E37_79B9, 0xBB67_AE85];

/// Counters that are computed together: enough independent products to hide the latency of a multiplication.
pub(in crate::kernel) const LANES: usize = 32;

const LOW: u64 = 0xFFFF_FFFF;

/// The four output words of each of `LANES` consecutive counters, each in the low half of 64 bits. `counter` is the
/// low half of the first one; all share the high half and the key.
///
/// What is in the high halves means nothing: a vector multiplies the low halves of its 64-bit lanes, so that nothing
/// has to be widened, narrowed or cleared between two rounds.
#[inline(always)]
fn words(key: u64, counter: u64, high: u64) -> [[u64; LANES]; 4] {
    let counters: [u64; LANES] = array::from_fn(|i| counter.wrapping_add(i as u64));
    let mut x = [counters, counters.map(|counter| counter >> 32), [high; LANES], [high >> 32; LANES]];
    let [x0, x1, x2, x3] = &mut x;
    let mut k = [key as u32, (key >> 32) as u32];
    for _ in 0..10 {
        let [k0, k1] = k.map(u64::from);
        for (((x0, x1), x2), x3) in x0.iter_mut().zip(&mut *x1).zip(&mut *x2).zip(&mut *x3) {
            let a = MULTIPLIERS[0].wrapping_mul(*x0 & LOW);
            let b = MULTIPLIERS[1].wrapping_mul(*x2 & LOW);
            *x0 = b >> 32 ^ *x1 ^ k0;
            *x2 = a >> 32 ^ *x3 ^ k1;
            *x1 = b;
            *x3 = a;
        }
        k[0] = k[0].wrapping_add(WEYL[0]);
        k[1] = k[1].wrapping_add(WEYL[1]);
    }
    x
}

/// Numbers of 16 bits that one call of [`halves`] gives.
pub(in crate::kernel) const HALVES: usize = 8 * LANES;

/// The words of `LANES` consecutive counters as numbers of 16 bits: for each counter the low, then the high half of
/// each of its four words.
#[inline(always)]
pub(in crate::kernel) fn halves(key: u64, counter: u64, high: u64) -> [u16; HALVES] {
    let ([x0, x1, x2, x3], mut out) = (words(key, counter, high), [0; HALVES]);
    for (i, out) in out.as_chunks_mut::<8>().0.iter_mut().enumerate() {
        let (p, q) = (x0[i] & LOW | x1[i] << 32, x2[i] & LOW | x3[i] << 32);
        let half = |x: u64, j: u32| (x >> (16 * j)) as u16;
        *out =
            [half(p, 0), half(p, 1), half(p, 2), half(p, 3), half(q, 0), half(q, 1), half(q, 2), half(q, 3)];
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::base::isa::{Isa, Kernel};

    struct Words(u64, u64, u64);

    impl Kernel for Words {
        type Out = [[u64; LANES]; 4];
        #[inline(always)]
        fn run(self) -> Self::Out {
            words(self.0, self.1, self.2)
        }
    }

    fn lane(w: &[[u64; LANES]; 4], i: usize) -> [u32; 4] {
        w.map(|words| words[i] as u32)
    }

    #[test]
    fn known_answers_of_random123() {
        let cases = [
            ((0, 0, 0), [0x6627_e8d5, 0xe169_c58d, 0xbc57_ac4c, 0x9b00_dbd8]),
            ((u64::MAX, u64::MAX, u64::MAX), [0x408f_276d, 0x41c8_3b0e, 0xa20b_c7c6, 0x6d54_51fd]),
            (
                (0x299f_31d0_a409_3822, 0x85a3_08d3_243f_6a88, 0x0370_7344_1319_8a2e),
                [0xd16c_fe09, 0x94fd_cceb, 0x5001_e420, 0x2412_6ea1],
            ),
        ];
        for isa in Isa::ALL.into_iter().filter(|isa| isa.is_available()) {
            for ((key, counter, high), expected) in cases {
                assert_eq!(lane(&isa.run(Words(key, counter, high)), 0), expected, "{}", isa.name());
            }
        }
    }

    #[test]
    fn lanes_are_consecutive_counters() {
        // Across the carry from the low to the high word of the counter.
        let start = u64::from(u32::MAX) - 5;
        let together = Isa::best().run(Words(7, start, 9));
        for i in 0..LANES {
            let alone = Isa::Scalar.run(Words(7, start + i as u64, 9));
            assert_eq!(lane(&together, i), lane(&alone, 0));
        }
    }
}
