//! How a slice corrects a stale gradient of an asynchronous mode: a smaller step, a refusal, or less
//! momentum. The slice decides under its lock, where the staleness is known; the record of the push holds
//! the factor and momentum that took effect.
//!
//! ```text
//! tau = changes by others since the gradient's base        C = clients that push to the slice
//! s   = updates that asynchrony adds to the mean age of gradients (see `slice::asynchrony`)
//! delay-adaptive    g * min(1, C / tau)        Koloskova, Stich, Jaggi 2022;
//!                                              Mishchenko, Bach, Even, Woodworth 2022
//! tau > max         g * max / tau, or refused  (the smaller of the two factors counts)
//! momentum          A = mu / (1 - mu) - s;  mu' = A / (1 + A), 0 if A <= 0
//!                   mu: SGD's and RMSprop's momentum, Adam's and AdamW's beta1
//! ```
//!
//! The factor scales the gradient and not the learning rate: with momentum or running means, a step moves by
//! more than its own gradient, and only that gradient is stale. `mu'` gives the gradients in a step the mean
//! age that `mu` gives them for one worker (asynchrony begets momentum: Mitliagkas, Zhang, Hadjis, Re 2016).

use crate::base::error::{Error, Kind, Result};

/// The corrections that a push asks for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Correction {
    /// Scales a gradient down if its staleness exceeds the number of clients.
    pub delay_adaptive: bool,
    /// Above this staleness, a gradient is scaled down or refused.
    pub max_staleness: Option<u64>,
    /// Refuses a gradient above `max_staleness` instead of scaling it.
    pub reject: bool,
    /// Reduces the optimizer's momentum by the share that asynchrony adds.
    pub momentum_matching: bool,
}

impl Correction {
    /// Fails if a gradient of this staleness must be refused; `changes`: all changes since its base, which
    /// decide if the slice does not know how many of them are by others.
    pub(crate) fn check(self, staleness: Option<u64>, changes: Option<u64>) -> Result<()> {
        match (self.max_staleness, staleness.or(changes)) {
            (Some(max), Some(stale)) if self.reject && stale > max => {
                let why = "the gradient is too stale: others have changed the slice since the values that it was computed from";
                Err(Error::new(Kind::StalePush, why)
                    .expected(format!("at most {max} changes"), format!("{stale} changes")))
            }
            _ => Ok(()),
        }
    }

    /// The factor on a gradient of this staleness when `clients` clients push; 1 if the staleness is unknown.
    pub(crate) fn factor(self, staleness: Option<u64>, clients: usize) -> f64 {
        let Some(tau) = staleness.filter(|tau| *tau > 0) else { return 1.0 };
        let share = |of: u64| (of as f64 / tau as f64).min(1.0);
        let delay = if self.delay_adaptive { share(clients as u64) } else { 1.0 };
        self.max_staleness.map_or(delay, |max| share(max).min(delay))
    }

    /// The momentum that replaces `momentum` when asynchrony adds so many updates.
    pub(crate) fn momentum(self, momentum: f64, added: f64) -> f64 {
        if !self.momentum_matching || added <= 0.0 || momentum >= 1.0 {
            return momentum;
        }
        let age = momentum / (1.0 - momentum) - added;
        if age > 0.0 { age / (1.0 + age) } else { 0.0 }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_stale_gradient_counts_less() {
        let adaptive = Correction { delay_adaptive: true, ..Correction::default() };
        for (staleness, clients, factor) in
            [(None, 2, 1.0), (Some(0), 1, 1.0), (Some(3), 4, 1.0), (Some(4), 4, 1.0), (Some(8), 2, 0.25)]
        {
            assert_eq!(adaptive.factor(staleness, clients), factor, "{staleness:?} {clients}");
            assert_eq!(Correction::default().factor(staleness, clients), 1.0);
        }
        let bounded = Correction { max_staleness: Some(2), ..adaptive };
        assert_eq!(bounded.factor(Some(8), 4), 0.25);
        assert_eq!(bounded.factor(Some(8), 1), 0.125);
        assert_eq!(Correction { max_staleness: Some(0), ..bounded }.factor(Some(1), 4), 0.0);
        assert!(bounded.check(Some(3), Some(3)).is_ok());
        let strict = Correction { reject: true, ..bounded };
        assert!(strict.check(Some(2), Some(9)).is_ok() && strict.check(None, None).is_ok());
        assert!(strict.check(None, Some(2)).is_ok());
        for (staleness, changes) in [(Some(3), Some(9)), (None, Some(3))] {
            let error = strict.check(staleness, changes).unwrap_err();
            assert_eq!((error.kind, error.got.as_deref()), (Kind::StalePush, Some("3 changes")));
        }
    }

    #[test]
    fn momentum_gives_way_to_what_asynchrony_adds() {
        let matching = Correction { momentum_matching: true, ..Correction::default() };
        for (added, expected) in
            [(0.0, 0.9), (0.5, 0.894_736), (3.0, 0.857_142), (7.0, 0.666_666), (9.0, 0.0)]
        {
            assert!((matching.momentum(0.9, added) - expected).abs() < 1e-6, "{added}");
            assert_eq!(Correction::default().momentum(0.9, added), 0.9);
            assert_eq!(matching.momentum(0.0, added), 0.0);
        }
    }
}
