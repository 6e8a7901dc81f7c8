//! Reads of a slice: values, rows, optimizer state and versions. No read changes any of them.

use super::Snapshot;
use super::context::Counters;
use super::slice::{Slice, SliceMemory};
use crate::base::error::Result;
use crate::base::fault::fault;
use crate::base::isa::prefetch;
use crate::base::sync::Ordering;
use crate::kernel::codec::CodecId;
use crate::kernel::rounding;
use crate::kernel::rows::Indices;
use crate::tensor::SliceVersion;

/// Most elements of rows that are prefetched; the CPU's own prefetcher handles more than that.
const MAX_PREFETCHED_ELEMENTS: usize = 4096;

impl Slice {
    /// Pulls the values: pinned at one version for `exact`; copied, possibly in the middle of pushes, for
    /// `hogwild`. Fails if a copy exceeds the memory limit.
    pub fn pull(&self, client: u64) -> Result<Snapshot> {
        Counters::count(&self.counters.pulls);
        let snapshot = match &self.memory {
            SliceMemory::Exact(memory) if fault("version_read_early") => {
                let version = memory.lock().version(client).0;
                memory.lock().pull(self, client).map(|snapshot| Snapshot { version, ..snapshot })
            }
            SliceMemory::Exact(memory) => memory.lock().pull(self, client),
            SliceMemory::Hogwild(memory) => memory.pull(self, client),
        };
        snapshot.map_err(|error| self.name(error))
    }

    /// Number of the slice's elements in these rows; fails unless the rows ascend and are in the slice.
    pub fn row_elements(&self, indices: Indices<'_>) -> Result<usize> {
        self.spec.need_float32("a push or pull of rows")?;
        self.layout.elements(indices).map_err(|error| self.name(error))
    }

    /// Appends a copy of some rows' values, of one version if the slice is `exact`; pins nothing.
    pub fn pull_rows(&self, client: u64, indices: Indices<'_>, into: &mut Vec<u8>) -> Result<SliceVersion> {
        Counters::count(&self.counters.pulls);
        self.row_elements(indices)?;
        let (version, own) = match &self.memory {
            SliceMemory::Exact(memory) => memory.lock().pull_rows(self, client, indices, into),
            SliceMemory::Hogwild(memory) => memory.pull_rows(self, client, indices, into),
        };
        Ok(SliceVersion { slice: self.id, version, own })
    }

    /// Appends a copy of all values, of one version if the slice is `exact`; pins nothing. Fails if the copy of
    /// `hogwild` values exceeds the memory limit.
    pub fn pull_copy(&self, client: u64, into: &mut Vec<u8>) -> Result<SliceVersion> {
        if let SliceMemory::Exact(memory) = &self.memory {
            Counters::count(&self.counters.pulls);
            let (version, own) = memory.lock().pull_copy(client, into);
            return Ok(SliceVersion { slice: self.id, version, own });
        }
        let values = self.pull(client)?;
        into.extend_from_slice(values.as_ref());
        Ok(SliceVersion { slice: self.id, version: values.version, own: values.own })
    }

    /// Fails unless the values can be read in bfloat16.
    pub fn need_bfloat16(&self) -> Result<()> {
        self.spec.need_float32("a pull in bfloat16")
    }

    /// Pulled values in bfloat16, rounded to nearest even unless they come in it. Fails for float64, and if a
    /// copy exceeds the memory limit.
    pub fn in_bfloat16(&self, pulled: Snapshot) -> Result<Snapshot> {
        self.need_bfloat16()?;
        if pulled.codec == CodecId::BFloat16 {
            return Ok(pulled);
        }
        pulled.rounded(self.isa, &self.meter).map_err(|error| self.name(error))
    }

    /// As [`Slice::pull_copy`], of the values or of their average, in bfloat16.
    pub fn pull_bfloat16_copy(&self, client: u64, average: bool, into: &mut Vec<u8>) -> Result<SliceVersion> {
        self.need_bfloat16()?;
        let values = if average { self.pull_average(client)? } else { self.pull(client)? };
        if values.codec == CodecId::BFloat16 {
            into.extend_from_slice(values.as_ref());
        } else {
            rounding::append_nearest(self.isa, values.as_ref(), into);
        }
        Ok(SliceVersion { slice: self.id, version: values.version, own: values.own })
    }

    /// As [`Slice::pull_copy`], of the average of the values.
    pub fn pull_average_copy(&self, client: u64, into: &mut Vec<u8>) -> Result<SliceVersion> {
        let average = self.pull_average(client)?;
        into.extend_from_slice(average.as_ref());
        Ok(SliceVersion { slice: self.id, version: average.version, own: average.own })
    }

    /// Prefetches the slice's own fields. A call whose slices are scattered in memory spends most of its time
    /// on cache misses, so it prefetches many slices before it uses the first: their fields, then what these
    /// point to, then the rows. Changes nothing.
    pub fn prefetch(&self) {
        prefetch(std::slice::from_ref(self));
    }

    /// Prefetches what the fields point to.
    pub fn prefetch_memory(&self) {
        if let SliceMemory::Exact(memory) = &self.memory {
            memory.lock().prefetch();
        }
    }

    /// Prefetches rows; if a client is about to push them, also their state and the client's outcomes. Of whole
    /// slices only the outcomes: the CPU's own prefetcher handles the values. Changes nothing; invalid indices are
    /// ignored.
    pub fn prefetch_rows(&self, indices: Option<Indices<'_>>, pushed_by: Option<u64>) {
        let Some(indices) = indices else {
            if let (SliceMemory::Exact(memory), Some(client)) = (&self.memory, pushed_by) {
                memory.lock().prefetch_window(client);
            }
            return;
        };
        if let (SliceMemory::Exact(memory), Ok(..=MAX_PREFETCHED_ELEMENTS)) =
            (&self.memory, self.layout.elements(indices))
        {
            memory.lock().prefetch_rows(self, indices, pushed_by);
        }
    }

    /// Returns whether readers pin so many versions that the next push must take memory for a copy.
    pub fn needs_memory(&self) -> bool {
        match &self.memory {
            SliceMemory::Exact(memory) => memory.lock().needs_memory(),
            SliceMemory::Hogwild(_) => false,
        }
    }

    /// Copies the optimizer state, all slots in order.
    pub fn pull_state(&self, client: u64) -> Result<Snapshot> {
        let snapshot = match &self.memory {
            SliceMemory::Exact(memory) => memory.lock().pull_state(self, client),
            SliceMemory::Hogwild(memory) => memory.pull_state(self, client),
        };
        snapshot.map_err(|error| self.name(error))
    }

    /// Copies the average of the values; fails unless the tensor keeps one.
    pub fn pull_average(&self, client: u64) -> Result<Snapshot> {
        Counters::count(&self.counters.pulls);
        let snapshot = match &self.memory {
            SliceMemory::Exact(memory) => memory.lock().pull_average(self, client),
            SliceMemory::Hogwild(memory) => self.spec.need_average().and_then(|()| memory.pull(self, client)),
        };
        snapshot.map_err(|error| self.name(error))
    }

    /// Number of probed updates of the first 64 elements, and of those that racing updates overwrote; 0 for
    /// `exact`.
    pub fn probed(&self) -> (u64, u64) {
        match &self.memory {
            SliceMemory::Exact(_) => (0, 0),
            SliceMemory::Hogwild(memory) => memory.probed(),
        }
    }

    /// The version, and how many of its changes were the client's own.
    pub fn version(&self, client: u64) -> (u64, u64) {
        match &self.memory {
            SliceMemory::Exact(memory) => memory.lock().version(client),
            SliceMemory::Hogwild(memory) => memory.version(client),
        }
    }

    /// Returns whether the last scan found values or state that have overflowed through many steps.
    pub(crate) fn overflowed(&self) -> bool {
        match &self.memory {
            SliceMemory::Exact(memory) => memory.lock().overflowed,
            SliceMemory::Hogwild(memory) => memory.overflowed(),
        }
    }

    /// Sets the moment if the slice has changed since the last call; 0 for older changes.
    pub(crate) fn note_change(&self, moment: u64) {
        let [version, changed] = &self.noted;
        let now = self.version(0).0;
        if version.swap(now, Ordering::Relaxed) != now {
            changed.store(moment, Ordering::Relaxed);
        }
    }

    /// The moment of the last change that [`Slice::note_change`] has found; 0 if there is none.
    pub(crate) fn changed_at(&self) -> u64 {
        self.noted[1].load(Ordering::Relaxed)
    }

    /// Numbers of applied gradients and of applied assignments.
    pub(crate) fn changes(&self) -> (u64, u64) {
        match &self.memory {
            SliceMemory::Exact(memory) => memory.lock().changes(),
            SliceMemory::Hogwild(memory) => memory.changes(),
        }
    }
}
