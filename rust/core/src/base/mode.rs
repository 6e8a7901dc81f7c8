//! How the workers of a group keep together, as values: what the table of a group
//! ([`crate::coordination::group`]) and whoever asks it speak of.

use crate::base::error::{Error, Kind, Result};
use serde::{Deserialize, Serialize};
use std::fmt;

/// Most workers that one version can be made of.
const MOST_WORKERS: u32 = 1 << 16;
/// Longest name of a worker, in bytes.
const LONGEST_NAME: usize = 128;

/// What binds the workers of a group.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Mode {
    /// Nothing: each push is applied when it arrives.
    Free,
    /// Stale synchronous parallel: nobody is more than `staleness` steps ahead of the slowest (Ho et al.,
    /// 2013).
    Bounded {
        /// Steps.
        staleness: u64,
    },
    /// A version is made of the first gradients that come for it.
    Sync(Quorum),
    /// The first who comes trains alone for so many steps; the others wait until then.
    WarmStart {
        /// Steps.
        steps: u64,
    },
}

/// Of how many gradients a version is made, and how.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Quorum {
    /// Gradients of one version.
    pub workers: u32,
    /// Workers beyond those, so that the slowest are not waited for (Chen et al., 2016).
    pub backup: u32,
    /// Gradients are summed in the order of their workers' ranks, not in that of their arrival.
    pub deterministic: bool,
    /// Of the gradients; else their mean.
    pub sum: bool,
}

impl Quorum {
    /// The factor on a sum of so many gradients.
    pub fn share(self, gradients: usize) -> f32 {
        if self.sum { 1.0 } else { 1.0 / gradients as f32 }
    }
}

impl Mode {
    /// Fails for settings that nobody could train with.
    pub fn check(self) -> Result<()> {
        let fail = |expected: String, got: String| {
            Err(Error::new(Kind::Config, "invalid mode of a group").expected(expected, got))
        };
        match self {
            Self::Sync(quorum) if quorum.workers == 0 || quorum.workers > MOST_WORKERS => {
                fail(format!("1 to {MOST_WORKERS} workers"), quorum.workers.to_string())
            }
            Self::Sync(quorum) if quorum.backup > MOST_WORKERS => {
                fail(format!("at most {MOST_WORKERS} backup workers"), quorum.backup.to_string())
            }
            Self::WarmStart { steps: 0 } => fail("at least 1 step".to_owned(), "0".to_owned()),
            _ => Ok(()),
        }
    }
}

impl fmt::Display for Mode {
    /// As in Python.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Free => write!(f, "Async(...) or Local(...)"),
            Self::Bounded { staleness } => write!(f, "Bounded(staleness={staleness})"),
            Self::WarmStart { steps } => write!(f, "WarmStart(steps={steps})"),
            Self::Sync(Quorum { workers, backup, deterministic, sum }) => {
                write!(f, "Sync(workers={workers}, backup={backup}")?;
                if *deterministic {
                    write!(f, ", deterministic=True")?;
                }
                if *sum {
                    write!(f, ", reduce=\"sum\"")?;
                }
                write!(f, ")")
            }
        }
    }
}

/// A worker that asks for its place in a group.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Seat {
    /// What it expects to be bound by.
    pub mode: Mode,
    /// Its place in the order of workers, where the mode asks for one.
    pub rank: Option<u32>,
    /// For people: who is missing, who is behind.
    pub name: String,
}

impl Seat {
    /// Fails for what nobody can be given.
    pub fn check(&self) -> Result<()> {
        self.mode.check()?;
        if self.name.len() > LONGEST_NAME {
            return Err(Error::new(Kind::Config, "the worker's name is too long")
                .expected(format!("at most {LONGEST_NAME} bytes"), format!("{} bytes", self.name.len())));
        }
        if matches!(self.mode, Mode::Sync(Quorum { deterministic: true, .. })) && self.rank.is_none() {
            return Err(Error::new(Kind::Config, "a deterministic Sync sums in the order of the ranks")
                .expected("a rank", "none"));
        }
        Ok(())
    }
}

impl fmt::Display for Seat {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.rank {
            Some(rank) => write!(f, "{:?} (rank {rank})", self.name),
            None => write!(f, "{:?}", self.name),
        }
    }
}

/// What a worker finds that got its place.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Joined {
    /// The clock that it begins with: the slowest one's, so that it holds nobody up.
    pub clock: u64,
    /// How many there are, itself included.
    pub present: u64,
    /// The names of some, the first who came first.
    pub workers: Vec<String>,
}

/// How far a group is when a worker may go on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Clocks {
    /// Steps that the slowest worker has taken; of a warm start, that were taken alone.
    pub slowest: u64,
    /// It is the one that trains alone.
    pub leads: bool,
}
