//! Functions of two variables with their gradients, in float64. Python's tests repeat the operations of the
//! polynomials in the same order, so that the results are the same bits.

use std::f64::consts::{PI, SQRT_2};

/// A function to minimize, and how to show it.
#[derive(Debug)]
pub(crate) struct Toy {
    /// Its name.
    pub(crate) name: &'static str,
    /// Its formula, for people.
    pub(crate) formula: &'static str,
    /// Set when its gradient takes only additions and multiplications, and has no noise.
    pub(crate) polynomial: bool,
    /// Left, right, bottom and top of the visible part of the plane.
    pub(crate) view: [f64; 4],
    /// Starting point.
    pub(crate) start: [f64; 2],
    /// Its minima.
    pub(crate) minima: &'static [[f64; 2]],
    /// Its value at the minima.
    pub(crate) least: f64,
    /// Standard deviation of the noise on each part of a gradient.
    pub(crate) noise: f64,
    /// A rate at which SGD with one worker descends.
    pub(crate) lr: f64,
    /// The value at a point, and the gradient.
    pub(crate) at: fn(f64, f64) -> (f64, [f64; 2]),
}

/// All toys.
pub(crate) static TOYS: [Toy; 9] = [
    Toy {
        name: "Beale",
        formula: "(1.5 - x + xy)^2 + (2.25 - x + xy^2)^2 + (2.625 - x + xy^3)^2",
        polynomial: true,
        view: [-4.5, 4.5, -4.5, 4.5],
        start: [1.0, 1.0],
        minima: &[[3.0, 0.5]],
        least: 0.0,
        noise: 0.0,
        lr: 0.01,
        at: |x, y| {
            let a = 1.5 - x + x * y;
            let b = 2.25 - x + x * y * y;
            let c = 2.625 - x + x * y * y * y;
            let dx = 2.0 * (a * (y - 1.0) + b * (y * y - 1.0) + c * (y * y * y - 1.0));
            let dy = 2.0 * (a * x + b * (2.0 * x * y) + c * (3.0 * x * y * y));
            (a * a + b * b + c * c, [dx, dy])
        },
    },
    Toy {
        name: "Rosenbrock",
        formula: "(1 - x)^2 + 100 (y - x^2)^2",
        polynomial: true,
        view: [-2.0, 2.0, -1.0, 3.0],
        start: [-1.2, 1.0],
        minima: &[[1.0, 1.0]],
        least: 0.0,
        noise: 0.0,
        lr: 0.001,
        at: |x, y| {
            let a = 1.0 - x;
            let b = y - x * x;
            (a * a + 100.0 * (b * b), [-2.0 * a - 400.0 * (x * b), 200.0 * b])
        },
    },
    Toy {
        name: "Saddle",
        formula: "x^2 - y^2 + y^4 / 4",
        polynomial: true,
        view: [-2.0, 2.0, -2.0, 2.0],
        start: [1.8, 0.001],
        minima: &[[0.0, SQRT_2], [0.0, -SQRT_2]],
        least: -1.0,
        noise: 0.0,
        lr: 0.05,
        at: |x, y| {
            let s = y * y;
            (x * x - s + 0.25 * (s * s), [2.0 * x, y * s - 2.0 * y])
        },
    },
    Toy {
        name: "Himmelblau",
        formula: "(x^2 + y - 11)^2 + (x + y^2 - 7)^2",
        polynomial: true,
        view: [-5.0, 5.0, -5.0, 5.0],
        start: [0.0, -1.0],
        minima: &[[3.0, 2.0], [-2.805_118, 3.131_312], [-3.779_310, -3.283_186], [3.584_428, -1.848_126]],
        least: 0.0,
        noise: 0.0,
        lr: 0.005,
        at: |x, y| {
            let a = x * x + y - 11.0;
            let b = x + y * y - 7.0;
            (a * a + b * b, [4.0 * (x * a) + 2.0 * b, 2.0 * a + 4.0 * (y * b)])
        },
    },
    Toy {
        name: "Ill-conditioned quadratic",
        formula: "(x^2 + 20 y^2) / 2",
        polynomial: true,
        view: [-1.5, 1.5, -1.0, 1.0],
        start: [1.2, 0.8],
        minima: &[[0.0, 0.0]],
        least: 0.0,
        noise: 0.0,
        lr: 0.05,
        at: |x, y| (0.5 * (x * x + 20.0 * (y * y)), [x, 20.0 * y]),
    },
    Toy {
        name: "Booth",
        formula: "(x + 2y - 7)^2 + (2x + y - 5)^2",
        polynomial: true,
        view: [-10.0, 10.0, -10.0, 10.0],
        start: [-8.0, -6.0],
        minima: &[[1.0, 3.0]],
        least: 0.0,
        noise: 0.0,
        lr: 0.05,
        at: |x, y| {
            let a = x + 2.0 * y - 7.0;
            let b = 2.0 * x + y - 5.0;
            (a * a + b * b, [2.0 * a + 4.0 * b, 4.0 * a + 2.0 * b])
        },
    },
    Toy {
        name: "McCormick",
        formula: "sin(x + y) + (x - y)^2 - 1.5x + 2.5y + 1",
        polynomial: false,
        view: [-1.5, 4.0, -3.0, 4.0],
        start: [3.0, 3.5],
        minima: &[[-0.547_197_55, -1.547_197_55]],
        least: -1.913_222_954_981_037,
        noise: 0.0,
        lr: 0.05,
        at: |x, y| {
            let d = x - y;
            let (sin, cos) = (libm::sin(x + y), libm::cos(x + y));
            (sin + d * d - 1.5 * x + 2.5 * y + 1.0, [cos + 2.0 * d - 1.5, cos - 2.0 * d + 2.5])
        },
    },
    Toy {
        name: "Rastrigin",
        formula: "20 + x^2 - 10 cos(2 pi x) + y^2 - 10 cos(2 pi y)",
        polynomial: false,
        view: [-5.12, 5.12, -5.12, 5.12],
        start: [3.7, 2.6],
        minima: &[[0.0, 0.0]],
        least: 0.0,
        noise: 0.0,
        lr: 0.002,
        at: |x, y| {
            let turn = 2.0 * PI;
            let f = 20.0 + x * x - 10.0 * libm::cos(turn * x) + y * y - 10.0 * libm::cos(turn * y);
            let d = |v: f64| 2.0 * v + 10.0 * turn * libm::sin(turn * v);
            (f, [d(x), d(y)])
        },
    },
    Toy {
        name: "Noisy plateau",
        formula: "s / (1 + s), s = x^2 + y^2; gradients with noise of .1",
        polynomial: false,
        view: [-5.0, 5.0, -5.0, 5.0],
        start: [4.0, 3.0],
        minima: &[[0.0, 0.0]],
        least: 0.0,
        noise: 0.1,
        lr: 0.1,
        at: |x, y| {
            let s = x * x + y * y;
            let slope = 2.0 / ((1.0 + s) * (1.0 + s));
            (s / (1.0 + s), [slope * x, slope * y])
        },
    },
];

#[cfg(test)]
mod tests {
    use super::*;
    use crate::random::{Draws, Purpose};

    #[test]
    fn gradients_are_the_central_differences() {
        for (k, toy) in TOYS.iter().enumerate() {
            for point in 0..1000 {
                let mut draws = Draws::at(5, Purpose::Start, k as u64, point);
                let [left, right, bottom, top] = toy.view;
                let x = left + (right - left) * draws.uniform();
                let y = bottom + (top - bottom) * draws.uniform();
                let f = |x, y| (toy.at)(x, y).0;
                let h = 1e-5;
                let found =
                    [(f(x + h, y) - f(x - h, y)) / (2.0 * h), (f(x, y + h) - f(x, y - h)) / (2.0 * h)];
                let (_, stated) = (toy.at)(x, y);
                let size = stated[0].abs().max(stated[1].abs());
                for (found, stated) in found.into_iter().zip(stated) {
                    let name = toy.name;
                    assert!((found - stated).abs() <= 1e-5 * size, "{name} at {x}, {y}: {found} {stated}");
                }
            }
        }
    }

    #[test]
    fn minima_are_minima() {
        for toy in &TOYS {
            for [x, y] in toy.minima {
                let (f, g) = (toy.at)(*x, *y);
                assert!((f - toy.least).abs() < 1e-8, "{} {f}", toy.name);
                assert!(g[0].abs() < 1e-3 && g[1].abs() < 1e-3, "{} {g:?}", toy.name);
                for (dx, dy) in [(0.1, 0.0), (-0.1, 0.0), (0.0, 0.1), (0.0, -0.1)] {
                    assert!((toy.at)(x + dx, y + dy).0 > f, "{}", toy.name);
                }
            }
        }
    }
}
