//! What a start found.

use crate::catalog::Catalog;
use crate::frame::Origin;
use crate::recovery::growth::Growth;
use crate::recovery::history::{History, Name};
use std::collections::VecDeque;
use std::fmt;

/// What a start found.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Report {
    /// The snapshot that was loaded.
    pub generation: Option<u64>,
    /// Slices that are here.
    pub slices: u64,
    /// Records that were repeated.
    pub repeated: u64,
    /// What was not as it should be, a sentence each.
    pub notes: Vec<String>,
    /// What was durable and is lost, as [`Settings::accept_loss`] allows: a sentence each, with counts.
    pub lost: Vec<String>,
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { slices, repeated, .. } = self;
        match self.generation {
            Some(generation) => write!(f, "snapshot {generation}")?,
            None => write!(f, "no snapshot")?,
        }
        write!(f, ", {slices} slices, {repeated} later changes")
    }
}

/// The files as they were found, and what to go on with.
pub(crate) struct Found {
    pub(crate) report: Report,
    pub(crate) catalog: Catalog,
    pub(crate) origin: Origin,
    /// The next segment, which is free.
    pub(crate) segment: u64,
    /// The segment that the log so far ends in, and the length of it that is whole.
    pub(crate) last: Option<(u64, u64)>,
    /// The log that was read.
    pub(crate) growth: Growth,
    /// The next generation.
    pub(crate) generation: u64,
    pub(crate) kept: Kept,
    /// Generations that cannot be used, and why.
    pub(crate) damaged: Vec<(u64, String)>,
    /// Files of another server that are not used.
    pub(crate) others: Vec<Name>,
    /// Where the others come from.
    pub(crate) history: History,
    /// Something could not be read: what is here must be written anew.
    pub(crate) renew: bool,
}

/// Whole generations, the oldest first, and the first segment that each needs.
pub(crate) type Kept = VecDeque<(u64, u64)>;
