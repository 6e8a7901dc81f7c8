//! Linear combinations and products by element: `to <- sum of by_k x_k` in one pass, each element computed in
//! float64 by fused multiply-adds in the order of the terms, and rounded once.

use super::real::Real;
use crate::base::block::{BLOCK, blocks};
use crate::base::isa::{Isa, Kernel};

/// A factor and the vector that it scales; `None`: the target's own values.
pub(crate) type Term<'a, T> = (f64, Option<&'a [T]>);

/// Terms that are read side by side.
const TOGETHER: usize = 4;

struct Combine<'a, T> {
    to: &'a mut [T],
    terms: &'a [Term<'a, T>],
}

/// `sums <- sums + by_0 x_0 + by_1 x_1 + ...`
#[inline(always)]
fn add<T: Real, const N: usize>(sums: &mut [f64], by: [f64; N], x: [&[T]; N]) {
    let len = sums.len();
    let x = x.map(|x| &x[..len]);
    for i in 0..len {
        let mut sum = sums[i];
        for k in 0..N {
            sum = by[k].mul_add(x[k][i].wide(), sum);
        }
        sums[i] = sum;
    }
}

/// `to <- by_0 x_0 + by_1 x_1 + ...`
#[inline(always)]
fn write<T: Real, U: Real, const N: usize>(to: &mut [U], by: [f64; N], x: [&[T]; N]) {
    let len = to.len();
    let x = x.map(|x| &x[..len]);
    for i in 0..len {
        let mut sum = by[0] * x[0][i].wide();
        for k in 1..N {
            sum = by[k].mul_add(x[k][i].wide(), sum);
        }
        to[i] = U::nearest(sum);
    }
}

/// `to <- by_0 to + by_1 x_1`, where `by_0` is often 1.
#[inline(always)]
fn add_to<T: Real>(to: &mut [T], (own, by): (f64, f64), x: &[T]) {
    let x = &x[..to.len()];
    if own == 1.0 {
        to.iter_mut().zip(x).for_each(|(to, x)| *to = T::nearest(by.mul_add(x.wide(), to.wide())));
    } else {
        to.iter_mut().zip(x).for_each(|(to, x)| *to = T::nearest(by.mul_add(x.wide(), own * to.wide())));
    }
}

/// `to <- own to + by_0 x_0 + by_1 x_1`
#[inline(always)]
fn add_two_to<T: Real>(to: &mut [T], own: f64, by: [f64; 2], x: [&[T]; 2]) {
    let len = to.len();
    let x = x.map(|x| &x[..len]);
    for i in 0..len {
        let sum = by[0].mul_add(x[0][i].wide(), own * to[i].wide());
        to[i] = T::nearest(by[1].mul_add(x[1][i].wide(), sum));
    }
}

impl<T: Real> Kernel for Combine<'_, T> {
    type Out = ();
    #[inline(always)]
    fn run(self) {
        let Self { to, terms } = self;
        if let [(own, None), (by, Some(x))] = terms {
            return add_to(to, (*own, *by), x);
        }
        if let [(own, None), (first, Some(x)), (second, Some(y))] = terms {
            return add_two_to(to, *own, [*first, *second], [x, y]);
        }
        let mut own = [T::ZERO; BLOCK];
        let uses_own = terms.iter().any(|(_, x)| x.is_none());
        for (at, len) in blocks(to.len()) {
            let to = &mut to[at..at + len];
            if uses_own {
                own[..len].copy_from_slice(to);
            }
            let own = &own[..len];
            let x = |k: usize| terms[k].1.map_or(own, |x| &x[at..at + len]);
            let by = |k: usize| terms[k].0;
            match terms.len() {
                0 => to.fill(T::ZERO),
                1 => write(to, [by(0)], [x(0)]),
                2 => write(to, [by(0), by(1)], [x(0), x(1)]),
                3 => write(to, [by(0), by(1), by(2)], [x(0), x(1), x(2)]),
                n => {
                    let mut sums = [0.0; BLOCK];
                    let sums = &mut sums[..len];
                    // The first product is not added to 0, which would lose a zero's sign.
                    write(sums, [by(0)], [x(0)]);
                    let whole = 1 + (n - 1) / TOGETHER * TOGETHER;
                    for k in (1..whole).step_by(TOGETHER) {
                        let four = std::array::from_fn::<_, TOGETHER, _>(|j| k + j);
                        add(sums, four.map(by), four.map(x));
                    }
                    for k in whole..n {
                        add(sums, [by(k)], [x(k)]);
                    }
                    to.iter_mut().zip(sums).for_each(|(to, sum)| *to = T::nearest(*sum));
                }
            }
        }
    }
}

/// `to <- sum of by_k x_k`; without terms 0. All vectors have one length.
pub(crate) fn combine<T: Real>(isa: Isa, to: &mut [T], terms: &[Term<'_, T>]) {
    isa.run(Combine { to, terms });
}

struct Multiply<'a, T> {
    to: &'a mut [T],
    x: Option<&'a [T]>,
    y: Option<&'a [T]>,
}

impl<T: Real> Kernel for Multiply<'_, T> {
    type Out = ();
    #[inline(always)]
    fn run(self) {
        let product = |x: T, y: T| T::nearest(x.wide() * y.wide());
        match (self.x, self.y) {
            (Some(x), Some(y)) => {
                self.to.iter_mut().zip(x).zip(y).for_each(|((to, x), y)| *to = product(*x, *y));
            }
            (Some(x), None) | (None, Some(x)) => {
                self.to.iter_mut().zip(x).for_each(|(to, x)| *to = product(*to, *x));
            }
            (None, None) => self.to.iter_mut().for_each(|to| *to = product(*to, *to)),
        }
    }
}

/// `to <- x y` by element; `None`: the target's own values.
pub(crate) fn multiply<T: Real>(isa: Isa, to: &mut [T], x: Option<&[T]>, y: Option<&[T]>) {
    isa.run(Multiply { to, x, y });
}

#[cfg(test)]
mod tests {
    use super::*;

    fn values(n: usize, k: usize) -> Vec<f32> {
        (0..n).map(|i| ((i * 37 + k * 101) % 211) as f32 * 0.173 - 17.0).collect()
    }

    #[test]
    fn every_instruction_set_agrees_with_the_formula() {
        for n in [0_usize, 1, 17, 1024, 1025, 3000] {
            for count in 0..10 {
                let vectors: Vec<_> = (0..count).map(|k| values(n, k)).collect();
                let by: Vec<_> = (0..count).map(|k| 0.1 + 0.7 * k as f64).collect();
                let before = values(n, 99);
                // Every third term is the target itself.
                let terms: Vec<Term<'_, f32>> = (0..count)
                    .map(|k| (by[k], if k % 3 == 2 { None } else { Some(vectors[k].as_slice()) }))
                    .collect();
                let expected: Vec<_> = (0..n)
                    .map(|i| {
                        let value = |k: usize| f64::from(terms[k].1.map_or(before[i], |x| x[i]));
                        let first = if count == 0 { 0.0 } else { by[0] * value(0) };
                        (1..count).fold(first, |sum, k| by[k].mul_add(value(k), sum)) as f32
                    })
                    .collect();
                for isa in Isa::ALL.into_iter().filter(|isa| isa.is_available()) {
                    let mut to = before.clone();
                    combine(isa, &mut to, &terms);
                    assert_eq!(to, expected, "{isa:?}, {n}, {count} terms");
                }
            }
        }
    }

    #[test]
    fn products_by_element_may_have_the_target_as_a_factor() {
        let (x, y) = (values(1030, 1), values(1030, 2));
        for isa in Isa::ALL.into_iter().filter(|isa| isa.is_available()) {
            let (mut apart, mut left, mut right, mut square) = (x.clone(), x.clone(), y.clone(), x.clone());
            multiply(isa, &mut apart, Some(&x), Some(&y));
            multiply(isa, &mut left, None, Some(&y));
            multiply(isa, &mut right, Some(&x), None);
            multiply(isa, &mut square, None, None);
            let expected: Vec<_> = x.iter().zip(&y).map(|(x, y)| x * y).collect();
            assert_eq!((&apart, &left, &right), (&expected, &expected, &expected));
            assert_eq!(square, x.iter().map(|x| x * x).collect::<Vec<_>>());
        }
    }
}
