//! Handwritten digits: a net with one hidden layer, `relu(x w1 + b1) w2 + b2`, trained on the mean
//! cross-entropy of minibatches. The images are those of `fastps demo`, prepared in the same way.

use super::archive::member;
use crate::random::{Draws, Purpose};
use std::sync::OnceLock;

const PIXELS: usize = 64;
const HIDDEN: usize = 32;
const CLASSES: usize = 10;

/// Names and shapes of the parameters.
pub(crate) const TENSORS: [(&str, &[u64]); 4] = [
    ("w1", &[PIXELS as u64, HIDDEN as u64]),
    ("b1", &[HIDDEN as u64]),
    ("w2", &[HIDDEN as u64, CLASSES as u64]),
    ("b2", &[CLASSES as u64]),
];
const W1: usize = 0;
const B1: usize = W1 + PIXELS * HIDDEN;
const W2: usize = B1 + HIDDEN;
const B2: usize = W2 + HIDDEN * CLASSES;
/// Number of all parameters.
pub(crate) const PARAMETERS: usize = B2 + CLASSES;

static FILE: &[u8] = include_bytes!("../../../../python/fastps/data/files/digits.npz");

/// Images as rows of 64 pixels, and their classes.
#[derive(Debug, Default)]
struct Images {
    pixels: Vec<f32>,
    classes: Vec<u8>,
}

impl Images {
    fn len(&self) -> usize {
        self.classes.len()
    }
}

/// The training and the test images.
#[derive(Debug, Default)]
pub(crate) struct Digits {
    train: Images,
    test: Images,
}

/// The images, unpacked at the first call.
pub(crate) fn digits() -> &'static Digits {
    static DIGITS: OnceLock<Digits> = OnceLock::new();
    DIGITS.get_or_init(Digits::unpack)
}

/// The numbers of the net's arithmetic: float32, and float64 for the check of the gradients.
pub(crate) trait Number:
    Copy
    + PartialOrd
    + From<f32>
    + std::ops::Add<Output = Self>
    + std::ops::Sub<Output = Self>
    + std::ops::Mul<Output = Self>
    + std::ops::Div<Output = Self>
    + std::ops::AddAssign
    + std::ops::MulAssign
{
    fn exp(self) -> Self;
    fn ln(self) -> Self;
}

impl Number for f32 {
    fn exp(self) -> Self {
        libm::expf(self)
    }
    fn ln(self) -> Self {
        libm::logf(self)
    }
}

impl Number for f64 {
    fn exp(self) -> Self {
        libm::exp(self)
    }
    fn ln(self) -> Self {
        libm::log(self)
    }
}

impl Digits {
    fn unpack() -> Self {
        let array = |name| member(FILE, name).unwrap_or_default();
        let (images, labels, test) = (array("images.npy"), array("labels.npy"), array("test.npy"));
        let mut is_test = vec![false; labels.len()];
        for index in test.chunks_exact(2) {
            is_test[usize::from(index[0]) | usize::from(index[1]) << 8] = true;
        }
        let mut digits = Self::default();
        for (k, (pixels, class)) in images.chunks_exact(PIXELS).zip(&labels).enumerate() {
            let part = if is_test[k] { &mut digits.test } else { &mut digits.train };
            part.pixels.extend(pixels.iter().map(|p| f32::from(*p) / 16.0));
            part.classes.push(*class);
        }
        let mut mean = [0.0_f64; PIXELS];
        for row in digits.train.pixels.chunks_exact(PIXELS) {
            mean.iter_mut().zip(row).for_each(|(m, p)| *m += f64::from(*p));
        }
        let mean = mean.map(|m| (m / digits.train.len() as f64) as f32);
        for part in [&mut digits.train, &mut digits.test] {
            for row in part.pixels.chunks_exact_mut(PIXELS) {
                row.iter_mut().zip(mean).for_each(|(p, m)| *p -= m);
            }
        }
        digits
    }

    /// The initial parameters: He's normal initialisation for the weights, zeros for the biases.
    pub(crate) fn start(seed: u64) -> Vec<f32> {
        let mut draws = Draws::at(seed, Purpose::Start, 0, 0);
        let mut params = vec![0.0; PARAMETERS];
        for (range, inputs) in [(W1..B1, PIXELS), (W2..B2, HIDDEN)] {
            let scale = libm::sqrt(2.0 / inputs as f64);
            params[range].fill_with(|| (draws.normal() * scale) as f32);
        }
        params
    }

    /// Mean loss of a minibatch, and its gradient, which replaces `gradient`.
    pub(crate) fn gradient(
        &self,
        params: &[f32],
        batch: usize,
        draws: &mut Draws,
        gradient: &mut [f32],
    ) -> f64 {
        let rows: Vec<_> = (0..batch).map(|_| draws.below(self.train.len())).collect();
        f64::from(loss_and_gradient(&self.train, params, &rows, gradient))
    }

    /// Mean loss on the training images, and the test error in percent.
    pub(crate) fn evaluate(&self, params: &[f32]) -> (f64, f64) {
        let mut net = Net::new(params);
        let (mut loss, mut wrong) = (0.0, 0);
        for (image, class) in self.train.pixels.chunks_exact(PIXELS).zip(&self.train.classes) {
            loss += f64::from(net.loss(image, usize::from(*class)));
        }
        for (image, class) in self.test.pixels.chunks_exact(PIXELS).zip(&self.test.classes) {
            net.forward(image);
            let likely =
                (1..CLASSES).fold(0, |best, k| if net.logits[k] > net.logits[best] { k } else { best });
            wrong += usize::from(likely != usize::from(*class));
        }
        (loss / self.train.len() as f64, 100.0 * wrong as f64 / self.test.len() as f64)
    }
}

/// The net, and its values for one image.
struct Net<'a, T> {
    params: &'a [T],
    hidden: [T; HIDDEN],
    logits: [T; CLASSES],
}

impl<'a, T: Number> Net<'a, T> {
    fn new(params: &'a [T]) -> Self {
        let zero = T::from(0.0);
        Self { params, hidden: [zero; HIDDEN], logits: [zero; CLASSES] }
    }

    fn forward(&mut self, image: &[f32]) {
        self.hidden.copy_from_slice(&self.params[B1..W2]);
        for (x, row) in image.iter().zip(self.params[W1..B1].chunks_exact(HIDDEN)) {
            let x = T::from(*x);
            self.hidden.iter_mut().zip(row).for_each(|(h, w)| *h += x * *w);
        }
        let zero = T::from(0.0);
        self.logits.copy_from_slice(&self.params[B2..]);
        for (h, row) in self.hidden.iter_mut().zip(self.params[W2..B2].chunks_exact(CLASSES)) {
            // NaN stays NaN.
            if *h < zero {
                *h = zero;
            }
            self.logits.iter_mut().zip(row).for_each(|(l, w)| *l += *h * *w);
        }
    }

    /// The cross-entropy of one image, and probabilities instead of the logits.
    fn loss(&mut self, image: &[f32], class: usize) -> T {
        self.forward(image);
        let most = self.logits.iter().fold(self.logits[0], |most, l| if *l > most { *l } else { most });
        let mut sum = T::from(0.0);
        for l in &mut self.logits {
            *l = (*l - most).exp();
            sum += *l;
        }
        for l in &mut self.logits {
            *l = *l / sum;
        }
        let p = self.logits[class];
        let least = T::from(1e-30);
        T::from(0.0) - (if p < least { least } else { p }).ln()
    }
}

/// Mean loss of some images, and its gradient, which replaces `gradient`.
fn loss_and_gradient<T: Number>(images: &Images, params: &[T], rows: &[usize], gradient: &mut [T]) -> T {
    let zero = T::from(0.0);
    let share = T::from(1.0) / T::from(rows.len() as f32);
    gradient.fill(zero);
    let (mut net, mut loss) = (Net::new(params), zero);
    for row in rows {
        let image = &images.pixels[row * PIXELS..][..PIXELS];
        let class = usize::from(images.classes[*row]);
        loss += net.loss(image, class);
        let mut slopes = net.logits;
        slopes[class] = slopes[class] - T::from(1.0);
        for slope in &mut slopes {
            *slope *= share;
        }
        let mut back = [zero; HIDDEN];
        for (j, h) in net.hidden.iter().enumerate() {
            let at = W2 + j * CLASSES;
            for (k, slope) in slopes.iter().enumerate() {
                gradient[at + k] += *h * *slope;
                if *h > zero {
                    back[j] += params[at + k] * *slope;
                }
            }
        }
        gradient[B2..].iter_mut().zip(slopes).for_each(|(g, s)| *g += s);
        gradient[B1..W2].iter_mut().zip(back).for_each(|(g, b)| *g += b);
        for (x, row) in image.iter().zip(gradient[W1..B1].chunks_exact_mut(HIDDEN)) {
            let x = T::from(*x);
            row.iter_mut().zip(back).for_each(|(g, b)| *g += x * b);
        }
    }
    loss * share
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_images_are_those_of_the_demo() {
        let all = digits();
        assert_eq!((all.train.len(), all.test.len()), (1442, 355));
        let column: f64 = all.train.pixels.iter().skip(10).step_by(PIXELS).map(|p| f64::from(*p)).sum();
        assert!((column / 1442.0).abs() < 1e-6);
        let (loss, error) = all.evaluate(&Digits::start(1));
        assert!((1.8..4.0).contains(&loss) && (70.0..=100.0).contains(&error), "{loss} {error}");
    }

    #[test]
    fn gradients_are_the_central_differences() {
        let images = &digits().train;
        let start: Vec<f64> = Digits::start(3).into_iter().map(f64::from).collect();
        let loss = |params: &[f64], rows: &[usize]| {
            let mut net = Net::new(params);
            let one = |row: &usize| {
                net.loss(&images.pixels[row * PIXELS..][..PIXELS], usize::from(images.classes[*row]))
            };
            rows.iter().map(one).sum::<f64>() / rows.len() as f64
        };
        let mut gradient = vec![0.0; PARAMETERS];
        for point in 0..1000 {
            let mut draws = Draws::at(9, Purpose::Noise, 0, point);
            let params: Vec<_> = start.iter().map(|p| p + 0.1 * draws.normal()).collect();
            let way: Vec<_> = params.iter().map(|_| draws.normal()).collect();
            let rows: Vec<_> = (0..4).map(|_| draws.below(images.len())).collect();
            loss_and_gradient(images, &params, &rows, &mut gradient);
            let stated: f64 = gradient.iter().zip(&way).map(|(g, w)| g * w).sum();
            let size: f64 = gradient.iter().map(|g| g * g).sum::<f64>().sqrt();
            let h = 1e-6;
            let there = |h: f64| -> Vec<_> { params.iter().zip(&way).map(|(p, w)| p + h * w).collect() };
            let found = (loss(&there(h), &rows) - loss(&there(-h), &rows)) / (2.0 * h);
            assert!((found - stated).abs() <= 1e-5 * size.max(stated.abs()), "{point}: {found} {stated}");
        }
    }
}
