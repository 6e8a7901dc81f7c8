//! A worker's local step in one pass: `sum <- sum + g` and `W <- fma(-lr, g, W)`.

use crate::base::block::blocks;
use crate::base::isa::{Isa, Kernel};

struct LocalStep<'a> {
    params: &'a mut [f32],
    sum: &'a mut [f32],
    gradient: &'a [f32],
    neg_lr: f32,
    first: bool,
}

impl Kernel for LocalStep<'_> {
    type Out = ();
    #[inline(always)]
    fn run(self) {
        for (at, len) in blocks(self.gradient.len()) {
            let g = &self.gradient[at..at + len];
            self.params[at..at + len].iter_mut().zip(g).for_each(|(p, g)| *p = self.neg_lr.mul_add(*g, *p));
            let sum = &mut self.sum[at..at + len];
            if self.first {
                sum.copy_from_slice(g);
            } else {
                sum.iter_mut().zip(g).for_each(|(s, g)| *s += *g);
            }
        }
    }
}

/// Steps the parameters by a gradient and adds the gradient to a sum, or starts the sum with it if it is the
/// first. All three have the same length.
pub fn local_step(isa: Isa, params: &mut [f32], sum: &mut [f32], gradient: &[f32], lr: f64, first: bool) {
    isa.run(LocalStep { params, sum, gradient, neg_lr: -lr as f32, first });
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_instruction_set_agrees_with_the_formula() {
        for n in [0_usize, 1, 63, 1024, 5000] {
            let gradient: Vec<f32> = (0..n).map(|i| (i as f32 - 7.0) * 0.37).collect();
            for isa in Isa::ALL.into_iter().filter(|isa| isa.is_available()) {
                let (mut params, mut sum) = (vec![1.5_f32; n], vec![9.0_f32; n]);
                local_step(isa, &mut params, &mut sum, &gradient, 0.1, true);
                local_step(isa, &mut params, &mut sum, &gradient, 0.1, false);
                for (i, g) in gradient.iter().enumerate() {
                    let once = (-0.1_f32).mul_add(*g, 1.5);
                    assert_eq!(params[i].to_bits(), (-0.1_f32).mul_add(*g, once).to_bits());
                    assert_eq!(sum[i].to_bits(), (g + g).to_bits());
                }
            }
        }
    }
}
