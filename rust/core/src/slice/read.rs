//! What a slice gives away and changes nothing for: values, rows, state, versions.

use super::Snapshot;
use super::slice::{Counters, Memory, Slice};
use crate::base::error::Result;
use crate::base::fault::fault;
use crate::base::isa::prefetch;
use crate::kernel::rows::Indices;
use crate::tensor::SliceVersion;

/// Elements of rows that are worth asking for ahead; what is more, a CPU sees coming by itself.
const MAX_PREFETCHED_ELEMENTS: usize = 4096;

impl Slice {
    /// The values at one version: pinned for `exact`, copied (perhaps in the middle of pushes) for `hogwild`.
    /// A copy that does not fit is refused.
    pub fn pull(&self, client: u64) -> Result<Snapshot> {
        Counters::count(&self.counters.pulls);
        let snapshot = match &self.memory {
            Memory::Exact(memory) if fault("version_read_early") => {
                let version = memory.lock().version(client).0;
                memory.lock().pull(self, client).map(|snapshot| Snapshot { version, ..snapshot })
            }
            Memory::Exact(memory) => memory.lock().pull(self, client),
            Memory::Hogwild(memory) => memory.pull(self, client),
        };
        snapshot.map_err(|error| self.name(error))
    }

    /// How many elements these rows have here; fails unless they ascend and lie in the slice.
    pub fn row_elements(&self, indices: Indices<'_>) -> Result<usize> {
        self.layout.elements(indices).map_err(|error| self.name(error))
    }

    /// Appends the values of some rows, copied at one version (`exact`); nothing is pinned.
    pub fn pull_rows(&self, client: u64, indices: Indices<'_>, into: &mut Vec<u8>) -> Result<SliceVersion> {
        Counters::count(&self.counters.pulls);
        self.row_elements(indices)?;
        let (version, own) = match &self.memory {
            Memory::Exact(memory) => memory.lock().pull_rows(self, client, indices, into),
            Memory::Hogwild(memory) => memory.pull_rows(self, client, indices, into),
        };
        Ok(SliceVersion { slice: self.id, version, own })
    }

    /// Asks for the slice's own fields. Where the slices of one call lie far apart, waiting for memory is
    /// most of its work, so that many are asked for before the first is used: the fields, then what they lead
    /// to, then the rows. Changes nothing.
    pub fn prefetch(&self) {
        prefetch(std::slice::from_ref(self));
    }

    /// Asks for what the fields lead to.
    pub fn prefetch_memory(&self) {
        if let Memory::Exact(memory) = &self.memory {
            memory.lock().prefetch();
        }
    }

    /// Asks for the rows; where a client is to push them, also for their state and for what is noted of the
    /// client. Changes nothing, whatever the indices are.
    pub fn prefetch_rows(&self, indices: Indices<'_>, pushed_by: Option<u64>) {
        if let (Memory::Exact(memory), Ok(..=MAX_PREFETCHED_ELEMENTS)) =
            (&self.memory, self.layout.elements(indices))
        {
            memory.lock().prefetch_rows(self, indices, pushed_by);
        }
    }

    /// Whether readers keep so many versions that the next push must take memory for its own.
    pub fn needs_memory(&self) -> bool {
        match &self.memory {
            Memory::Exact(memory) => memory.lock().needs_memory(),
            Memory::Hogwild(_) => false,
        }
    }

    /// The optimizer state, all slots one after the other; a copy.
    pub fn pull_state(&self, client: u64) -> Result<Snapshot> {
        let snapshot = match &self.memory {
            Memory::Exact(memory) => memory.lock().pull_state(self, client),
            Memory::Hogwild(memory) => memory.pull_state(self, client),
        };
        snapshot.map_err(|error| self.name(error))
    }

    /// Updates of one block that were probed, and those of them that racing ones overwrote; 0 for `exact`.
    pub fn probed(&self) -> (u64, u64) {
        match &self.memory {
            Memory::Exact(_) => (0, 0),
            Memory::Hogwild(memory) => memory.probed(),
        }
    }

    /// The version, and how many of its changes were the client's own.
    pub fn version(&self, client: u64) -> (u64, u64) {
        match &self.memory {
            Memory::Exact(memory) => memory.lock().version(client),
            Memory::Hogwild(memory) => memory.version(client),
        }
    }

    /// Gradients and assignments that were applied.
    pub(crate) fn changes(&self) -> (u64, u64) {
        match &self.memory {
            Memory::Exact(memory) => memory.lock().changes(),
            Memory::Hogwild(memory) => memory.changes(),
        }
    }
}
