//! The modes of a group as values, shared by the group table ([`crate::coordination::group`]) and its
//! callers.

use crate::base::error::{Error, Kind, Result, check_printable};
use serde::{Deserialize, Serialize};
use std::fmt;

/// Maximum number of workers whose gradients form one version.
const MOST_WORKERS: u32 = 1 << 16;
/// Maximum number of workers whose gradients are sorted.
const MOST_SORTED: u32 = 32;
/// Longest name of a worker, in bytes.
const LONGEST_NAME: usize = 128;

/// The rule that the workers of a group follow.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Mode {
    /// No coordination: each push is applied when it arrives.
    Free,
    /// Stale synchronous parallel: no worker is more than `staleness` steps ahead of the slowest (Ho et al.,
    /// 2013).
    Bounded {
        /// Steps.
        staleness: u64,
    },
    /// A version is made of the first gradients that arrive for it.
    Sync(Quorum),
    /// Only the first worker trains for `steps` steps, while the others wait.
    WarmStart {
        /// Steps.
        steps: u64,
    },
}

/// How many gradients form a version, and how they are combined.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Quorum {
    /// Gradients of one version; 0: those of all workers, whose number is not limited.
    pub workers: u32,
    /// Additional workers, so that a version does not wait for the slowest (Chen et al., 2016).
    pub backup: u32,
    /// Sums gradients in the order of their workers' ranks instead of their arrival.
    pub deterministic: bool,
    /// Applies the sum of the gradients instead of their mean.
    pub sum: bool,
    /// Applies the mean of the gradients by the weights of their pushes.
    pub weighted: bool,
    /// Sorts the gradients at each element, and applies the middle.
    pub robust: Option<Robust>,
    /// Gradients after which a version waits `grace_ms` for the others; 0: it waits until all have arrived.
    pub enough: u32,
    /// Milliseconds.
    pub grace_ms: u64,
    /// Local steps behind each gradient; 0: a gradient is one of a minibatch.
    pub every: u64,
    /// Groups of tensors whose gradients come in turn within `every` steps; 0: all come together.
    pub fragments: u32,
    /// Local steps between a gradient and the values that it leads to.
    pub overlap: u64,
}

/// The middle of the values of an element.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Robust {
    /// Their median.
    Median,
    /// Their mean without so many of the smallest and of the largest ones.
    TrimmedMean(u32),
}

impl Quorum {
    /// The factor on the sum of gradients with these weights, 1 each unless it is a weighted mean.
    pub fn share(self, weights: f64) -> f32 {
        if self.sum { 1.0 } else { 1.0 / weights as f32 }
    }

    /// Fails for a robust reduction of gradients that it cannot have.
    fn check_robust(self, robust: Robust) -> std::result::Result<(), (String, String)> {
        let Self { workers, backup, enough, .. } = self;
        if self.sum || self.weighted {
            return Err(("one way to reduce".to_owned(), self.to_string()));
        }
        if workers == 0 || workers.saturating_add(backup) > MOST_SORTED {
            let got = workers.saturating_add(backup);
            return Err((
                format!("1 to {MOST_SORTED} workers for a median or a trimmed mean"),
                got.to_string(),
            ));
        }
        let fewest = if enough > 0 { enough } else { workers };
        match robust {
            Robust::TrimmedMean(trim) if trim == 0 || trim >= fewest.div_ceil(2) => {
                let expected = format!("a trim from 1, below half of the {fewest} gradients of a version");
                Err((expected, trim.to_string()))
            }
            _ => Ok(()),
        }
    }

    /// Local steps between two gradients of a worker, at least.
    fn turn(self) -> u64 {
        self.every / u64::from(self.fragments.max(1))
    }

    /// Workers that must have been present before the first version.
    pub fn least(self) -> u32 {
        self.workers.max(1)
    }
}

impl Robust {
    /// The smallest, and the largest, values of an element that are left out of `count`: at least one stays.
    pub fn trimmed(self, count: usize) -> usize {
        let most = count.saturating_sub(1) / 2;
        match self {
            Self::Median => most,
            Self::TrimmedMean(trim) => most.min(trim as usize),
        }
    }
}

impl Mode {
    /// Fails for settings that no group can train with.
    pub fn check(self) -> Result<()> {
        let fail = |expected: String, got: String| {
            Err(Error::new(Kind::Config, "invalid mode of a group").expected(expected, got))
        };
        match self {
            Self::Sync(quorum)
                if quorum.workers > MOST_WORKERS || (quorum.workers == 0 && quorum.every == 0) =>
            {
                fail(format!("1 to {MOST_WORKERS} workers"), quorum.workers.to_string())
            }
            Self::Sync(quorum) if quorum.backup > MOST_WORKERS => {
                fail(format!("at most {MOST_WORKERS} backup workers"), quorum.backup.to_string())
            }
            Self::Sync(quorum)
                if quorum.enough > if quorum.workers == 0 { MOST_WORKERS } else { quorum.workers } =>
            {
                fail("a quorum of at most all workers".to_owned(), quorum.enough.to_string())
            }
            Self::Sync(quorum) if quorum.enough > 0 && quorum.backup > 0 => {
                fail("a quorum or backup workers".to_owned(), self.to_string())
            }
            Self::Sync(quorum) if quorum.grace_ms > 0 && quorum.enough == 0 => {
                fail("a grace after a quorum".to_owned(), "a grace without a quorum".to_owned())
            }
            Self::Sync(quorum) if quorum.overlap > 0 && quorum.overlap >= quorum.turn() => {
                let expected = format!("an overlap below the {} steps of a turn", quorum.turn());
                fail(expected, quorum.overlap.to_string())
            }
            Self::Sync(quorum) if quorum.fragments == 1 || u64::from(quorum.fragments) > quorum.every => {
                fail(format!("2 to {} fragments, or none", quorum.every), quorum.fragments.to_string())
            }
            Self::Sync(quorum) if quorum.sum && quorum.weighted => {
                fail("a sum or a weighted mean".to_owned(), "both".to_owned())
            }
            Self::Sync(quorum @ Quorum { robust: Some(robust), .. }) => {
                quorum.check_robust(robust).or_else(|(expected, got)| fail(expected, got))
            }
            Self::WarmStart { steps: 0 } => fail("at least 1 step".to_owned(), "0".to_owned()),
            _ => Ok(()),
        }
    }
}

impl fmt::Display for Mode {
    /// As written in Python.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Free => write!(f, "Async(...) or Local(...)"),
            Self::Bounded { staleness } => write!(f, "Bounded(staleness={staleness})"),
            Self::WarmStart { steps } => write!(f, "WarmStart(steps={steps})"),
            Self::Sync(quorum) => quorum.fmt(f),
        }
    }
}

impl fmt::Display for Quorum {
    /// As written in Python.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { workers, backup, deterministic, sum, weighted, robust, enough, grace_ms, every, .. } =
            *self;
        let Self { fragments, overlap, .. } = *self;
        match (every, workers) {
            (0, _) => write!(f, "Sync(workers={workers}, backup={backup}")?,
            (_, 0) => write!(f, "DiLoCo(every={every}")?,
            _ => write!(f, "DiLoCo(every={every}, workers={workers}")?,
        }
        if fragments > 0 {
            write!(f, ", fragments={fragments}")?;
        }
        if overlap > 0 {
            write!(f, ", overlap={overlap}")?;
        }
        if enough > 0 {
            write!(f, ", quorum={enough}, grace={}", grace_ms as f64 / 1e3)?;
        }
        if deterministic {
            write!(f, ", deterministic=True")?;
        }
        match robust {
            Some(Robust::Median) => return write!(f, ", reduce=\"median\")"),
            Some(Robust::TrimmedMean(trim)) => {
                return write!(f, ", reduce=\"trimmed_mean\", trim={trim})");
            }
            None => {}
        }
        let reduce = if sum { "sum" } else { "mean" };
        match (weighted, every) {
            (true, 0) => write!(f, ", reduce=\"weighted\"")?,
            (false, 1..) => write!(f, ", reduce=\"{reduce}\"")?,
            _ if sum => write!(f, ", reduce=\"sum\"")?,
            _ => {}
        }
        write!(f, ")")
    }
}

/// A worker's request for a place in a group.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct MembershipRequest {
    /// The mode that the worker expects.
    pub mode: Mode,
    /// Its position in the order of workers, if the mode needs one.
    pub rank: Option<u32>,
    /// A name for messages to people about missing or slow workers.
    pub name: String,
    /// Whether others wait for it. Not kept: a worker says so again when its server has restarted.
    #[serde(skip)]
    pub presence: Presence,
}

/// Whether the other workers of a group wait for one that has a place.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Presence {
    /// They do.
    #[default]
    Active,
    /// They do not, until it joins again or the next epoch begins: it waits for a portion of this one.
    Idle(Epoch),
    /// They do, and for all that were idle in earlier epochs, too: this one has begun.
    Rouses(Epoch),
}

/// An epoch of portions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Epoch {
    /// Identifies the table of portions.
    pub run: u64,
    /// Its epoch.
    pub epoch: u64,
}

impl Epoch {
    /// Returns whether this is an earlier epoch of the same portions.
    pub fn is_before(self, other: Self) -> bool {
        self.run == other.run && self.epoch < other.epoch
    }
}

impl MembershipRequest {
    /// A request of a worker that others wait for.
    pub fn new(mode: Mode, rank: Option<u32>, name: impl Into<String>) -> Self {
        Self { mode, rank, name: name.into(), presence: Presence::Active }
    }

    /// Fails unless the worker's name may be new.
    pub fn check_new_name(&self) -> Result<()> {
        check_printable("name of a worker", &self.name)
    }

    /// Fails for a request that cannot be granted.
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

impl fmt::Display for MembershipRequest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.rank {
            Some(rank) => write!(f, "{:?} (rank {rank})", self.name),
            None => write!(f, "{:?}", self.name),
        }
    }
}

/// Answer to a worker that gets its place.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Joined {
    /// The clock that it starts with: that of the slowest worker, so that it delays no other worker.
    pub clock: u64,
    /// The number of workers present, including this one.
    pub present: u64,
    /// The names of some workers, in order of arrival.
    pub workers: Vec<String>,
}

/// The progress of a group when a worker may continue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Clocks {
    /// Steps that the slowest worker has taken; in a warm start, steps that its leader has taken.
    pub slowest: u64,
    /// Set if this worker leads a warm start.
    pub leads: bool,
}
