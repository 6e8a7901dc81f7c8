//! A worker's request for a portion, and the answer.

use crate::base::error::{Error, Kind, Result};
use crate::base::sync::Arc;
use std::fmt;

/// Longest name, in bytes.
pub(super) const MAX_NAME: usize = 256;

/// The samples 0 to `n`, in portions of `size`; the last one may be shorter.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Samples {
    /// Workers that give the same name share the portions.
    pub name: Arc<str>,
    /// Number of samples.
    pub n: u64,
    /// Number of samples in a portion.
    pub size: u64,
    /// The seed from which the workers draw the order of the samples.
    pub seed: u64,
}

impl Samples {
    pub(super) fn portions(&self) -> u64 {
        self.n.div_ceil(self.size)
    }

    pub(super) fn check(&self) -> Result<()> {
        if self.name.is_empty() || self.name.len() > MAX_NAME {
            return Err(Error::new(Kind::Config, "invalid length of the portions' name")
                .expected(format!("1 to {MAX_NAME} bytes"), self.name.len()));
        }
        for (what, value) in [("n", self.n), ("size", self.size)] {
            if value == 0 {
                let message = format!("portions {:?}: invalid {what}", self.name);
                return Err(Error::new(Kind::Config, message).expected("at least 1", value));
            }
        }
        Ok(())
    }
}

impl fmt::Display for Samples {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "n={}, size={}, seed={}", self.n, self.size, self.seed)
    }
}

/// A worker's next action.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Then {
    /// It takes a portion, or waits for one.
    Take,
    /// It takes none now.
    Rest,
    /// It leaves, and returns its portion.
    Leave,
}

/// A worker's request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Ask {
    /// The samples that it wants portions of.
    pub samples: Samples,
    /// Which of its client's workers asks: a random number, not 0.
    pub worker: u64,
    /// Number of the table that it knows from the last answer; 0: none.
    pub run: u64,
    /// The epoch that it is in. If the request creates the table, this is the table's first epoch.
    pub epoch: u64,
    /// The portion of that epoch that it has finished.
    pub finished: Option<u64>,
    /// Its next action.
    pub then: Then,
}

/// Outcome of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Given {
    /// This portion, leased to the worker until it is finished.
    Portion(u64),
    /// The worker's epoch is over.
    Over,
    /// Nothing: it did not ask for more, or nothing was free yet.
    Nothing,
}

/// An answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PortionAnswer {
    /// Number of the table. If it differs from that of the last answer, the finished portions were forgotten.
    pub run: u64,
    /// The current epoch.
    pub epoch: u64,
    /// Number of unfinished portions in that epoch.
    pub unfinished: u64,
    /// Outcome of the request.
    pub given: Given,
}

/// Called at most once, with the answer of a waiting worker, while the tables are locked: it must not call
/// into them.
pub type PortionWaiter = Box<dyn FnOnce(PortionAnswer) + Send>;
