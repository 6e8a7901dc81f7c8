//! Losses of one example: value and derivative with respect to the prediction, in float64, as scikit-learn
//! defines them.

use crate::base::error::{Error, Kind, Result};

/// The loss of a prediction. Classifiers have targets of -1 and 1.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Loss {
    /// ln(1 + exp(-y p)).
    Logistic,
    /// max(0, 1 - y p).
    Hinge,
    /// max(0, 1 - y p)^2.
    SquaredHinge,
    /// (p - y)^2 / 2.
    Squared,
    /// Squared up to this distance, linear beyond it (Huber 1964).
    Huber(f64),
}

impl Loss {
    /// Parses scikit-learn's name; `epsilon` is Huber's distance.
    pub fn parse(name: &str, epsilon: f64) -> Result<Self> {
        Ok(match name {
            "log_loss" => Self::Logistic,
            "hinge" => Self::Hinge,
            "squared_hinge" => Self::SquaredHinge,
            "squared_error" => Self::Squared,
            "huber" => Self::Huber(epsilon),
            _ => {
                let names = "log_loss, hinge, squared_hinge, squared_error or huber";
                return Err(Error::new(Kind::Config, "no such loss").expected(names, name));
            }
        })
    }

    /// The loss at prediction `p`.
    #[inline(always)]
    pub fn value(self, y: f64, p: f64) -> f64 {
        let margin = y * p;
        match self {
            // This form overflows in neither exponential.
            Self::Logistic => (-margin.abs()).exp().ln_1p() + (-margin).max(0.0),
            Self::Hinge => (1.0 - margin).max(0.0),
            Self::SquaredHinge => (1.0 - margin).max(0.0).powi(2),
            Self::Squared => 0.5 * (p - y) * (p - y),
            Self::Huber(c) => {
                let r = (p - y).abs();
                if r <= c { 0.5 * r * r } else { c * r - 0.5 * c * c }
            }
        }
    }

    /// The derivative at prediction `p`, clamped to a magnitude of 1e12.
    #[inline(always)]
    pub fn slope(self, y: f64, p: f64) -> f64 {
        let margin = y * p;
        let slope = match self {
            Self::Logistic => -y / (1.0 + margin.exp()),
            Self::Hinge => {
                if margin <= 1.0 {
                    -y
                } else {
                    0.0
                }
            }
            Self::SquaredHinge => -2.0 * y * (1.0 - margin).max(0.0),
            Self::Squared => p - y,
            Self::Huber(c) => (p - y).clamp(-c, c),
        };
        slope.clamp(-1e12, 1e12)
    }

    /// The largest second derivative; a kink counts as a bend over the whole margin.
    pub(super) fn curvature(self) -> f64 {
        match self {
            Self::Logistic => 0.25,
            Self::Hinge | Self::Squared | Self::Huber(_) => 1.0,
            Self::SquaredHinge => 2.0,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ALL: [Loss; 5] = [Loss::Logistic, Loss::Hinge, Loss::SquaredHinge, Loss::Squared, Loss::Huber(0.7)];

    #[test]
    fn slopes_are_the_derivatives() {
        for loss in ALL {
            for y in [-1.0, 1.0] {
                for k in -40..=40 {
                    // Beside the kinks.
                    let (p, h) = (f64::from(k) * 0.25 + 0.01, 1e-6);
                    let slope = (loss.value(y, p + h) - loss.value(y, p - h)) / (2.0 * h);
                    assert!((slope - loss.slope(y, p)).abs() < 1e-6, "{loss:?} {y} {p}");
                }
            }
        }
    }

    #[test]
    fn far_predictions_stay_finite() {
        for loss in ALL {
            for p in [-1e30, -800.0, 800.0, 1e30] {
                assert!(loss.value(1.0, p).is_finite() && loss.slope(1.0, p).is_finite(), "{loss:?} {p}");
            }
        }
        assert_eq!(Loss::parse("log", 0.1).unwrap_err().kind, Kind::Config);
    }
}
