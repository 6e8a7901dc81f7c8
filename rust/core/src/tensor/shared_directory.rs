//! The directory of a shared store: a list of the tensors in its memory, which all of its processes read and
//! append to.
//!
//! ```text
//! page 0        magic, the store's number, the end of the list
//! an entry      magic, spec length, spec (JSON) | counters, a line per slice | values | state, slot by slot
//! the next      ...
//! ```
//!
//! Entries, counters, values and slots are page-aligned, and their offsets follow only from the spec. A
//! writer completes an entry before it moves the end of the list past it; after that, the entry's spec and
//! place never change, and it is never removed. So readers need no lock, and a process that dies while
//! appending leaves nothing visible. A writer needs the memory's lock, which the operating system releases
//! when its holder dies.

use super::{Apply, TensorSpec};
use crate::base::error::{Error, Kind, Result};
use crate::base::fault::fault;
use crate::base::sync::{Arc, Mutex, Ordering, lock};
use crate::memory::{Counts, RacyBuffer, Region, SharedMemory};
use std::time::Duration;

const PAGE: u64 = 4096;
const MAGIC: u64 = u64::from_le_bytes(*b"fastps01");
/// Number of 64-bit words in the head.
const WORDS: usize = 3;
const END: usize = 2;
/// Bytes of an entry before its spec.
const PREFIX: usize = 16;
/// Most bytes of a spec as JSON; its name and group are at most 1 KiB each.
const MAX_SPEC: usize = 64 << 10;
/// Most bytes of one write of initial state.
const CHUNK: usize = 1 << 20;

/// The list of a shared store's tensors, and how far this process has read it.
#[derive(Debug)]
pub struct Directory {
    memory: SharedMemory,
    head: Region,
    id: u64,
    read: Mutex<u64>,
}

/// A tensor's part of the memory.
#[derive(Debug)]
pub struct SharedTensor {
    region: Arc<Region>,
    spec: Arc<TensorSpec>,
    layout: EntryLayout,
}

/// Byte offsets of an entry's parts from its start.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct EntryLayout {
    counts: u64,
    values: u64,
    /// Bytes from one array to the next.
    array: u64,
    end: u64,
}

impl EntryLayout {
    fn of(spec: &TensorSpec, text: usize) -> Result<Self> {
        let pages = |bytes: u64| bytes.checked_next_multiple_of(PAGE);
        let layout = || {
            let counts = pages((PREFIX + text) as u64)?;
            let values = counts.checked_add(pages((spec.slice_count() * Counts::BYTES) as u64)?)?;
            let array = pages(RacyBuffer::bytes_for(spec.elements()))?;
            let arrays = array.checked_mul(1 + spec.slots().len() as u64)?;
            Some(Self { counts, values, array, end: values.checked_add(arrays)? })
        };
        layout()
            .ok_or_else(|| Error::new(Kind::Capacity, "the tensor is too large").tensor(spec.name.clone()))
    }
}

impl Directory {
    /// Creates shared memory with an empty list.
    pub fn create() -> Result<Self> {
        let memory = SharedMemory::create()?;
        memory.grow(PAGE)?;
        let id = std::hash::BuildHasher::hash_one(&std::hash::RandomState::new(), MAGIC);
        let words = [MAGIC, id, PAGE];
        memory.write(0, bytemuck::cast_slice(&words))?;
        let head = memory.map(0, PAGE as usize)?;
        Ok(Self { memory, head, id, read: Mutex::new(PAGE) })
    }

    /// Opens the memory that has this address in another process.
    pub fn open(address: &str) -> Result<Self> {
        let (pid, fd, id) = parse(address).ok_or_else(|| {
            Error::new(Kind::Config, "invalid address of a shared store")
                .expected("what Store.address gives", format!("{address:?}"))
        })?;
        let memory = SharedMemory::open(pid, fd)?;
        let mut words = [0; WORDS];
        memory.read(0, bytemuck::cast_slice_mut(&mut words))?;
        if words[..END] != [MAGIC, id] {
            return Err(Error::new(Kind::Unavailable, "another store has this address now")
                .expected(address, format_args!("{:x}", words[1])));
        }
        let head = memory.map(0, PAGE as usize)?;
        Ok(Self { memory, head, id, read: Mutex::new(PAGE) })
    }

    /// The address at which other processes of this user can open the memory while this process lives; a
    /// forked child has its own.
    pub fn address(&self) -> String {
        format!("shm:{}:{}:{:x}", std::process::id(), self.memory.fd(), self.id)
    }

    /// Waits for the lock that appending needs; it is released when the returned guard is dropped.
    pub fn lock(&self, timeout: Duration) -> Result<impl Sized> {
        if fault("directory_unlocked") { Ok(None) } else { self.memory.lock(timeout).map(Some) }
    }

    /// The list as another process of a loom model sees it.
    #[cfg(loom)]
    pub fn another(&self) -> Result<Self> {
        let (memory, head) = (self.memory.clone(), self.memory.map(0, PAGE as usize)?);
        Ok(Self { memory, head, id: self.id, read: Mutex::new(PAGE) })
    }

    /// Appends a tensor with these values. The caller must hold the lock, and must have checked that no
    /// tensor has this name.
    pub fn append(&self, spec: &TensorSpec, values: &[u8]) -> Result<()> {
        if spec.apply == Apply::Exact {
            return Err(Error::new(Kind::Config, "a shared store has no locks, so it takes no exact tensor")
                .tensor(spec.name.clone())
                .expected("apply=\"hogwild\"", "\"exact\""));
        }
        let text = serde_json::to_vec(spec)
            .map_err(|error| Error::new(Kind::Internal, error.to_string()).tensor(spec.name.clone()))?;
        let layout = EntryLayout::of(spec, text.len())?;
        let at = self.end();
        let end = at.checked_add(layout.end).ok_or_else(|| broken("it ends nowhere"))?;
        self.memory.grow(end).map_err(|error| error.tensor(spec.name.clone()))?;
        if fault("published_early") {
            self.head.counters(0, WORDS)[END].store(end, Ordering::Release);
        }
        let write = |from: u64, bytes: &[u8]| self.memory.write(at + from, bytes);
        write(0, bytemuck::cast_slice(&[MAGIC, text.len() as u64]))?;
        write(PREFIX as u64, &text)?;
        // Overwrite what a process that died while appending left behind: counters, values and state.
        let mut counts = vec![0_u64; (layout.values - layout.counts) as usize / 8];
        for slice in counts.chunks_exact_mut(Counts::BYTES / 8).take(spec.slice_count()) {
            (slice[Counts::VERSION], slice[Counts::ASSIGNS]) = (1, 1);
        }
        write(layout.counts, bytemuck::cast_slice(&counts))?;
        write(layout.values, values)?;
        let initial = vec![spec.optimizer.initial_state(); CHUNK.min(layout.array as usize) / 4];
        let state =
            (layout.values + layout.array..layout.end).step_by(CHUNK.min(layout.array.max(1) as usize));
        for from in state {
            let bytes: &[u8] = bytemuck::cast_slice(&initial);
            write(from, &bytes[..bytes.len().min((layout.end - from) as usize)])?;
        }
        self.head.counters(0, WORDS)[END].store(end, Ordering::Release);
        Ok(())
    }

    /// Passes each tensor that this process has not seen yet to `take`; if `take` fails, the next call begins
    /// with the same tensor.
    pub fn news(&self, mut take: impl FnMut(Arc<SharedTensor>) -> Result<()>) -> Result<()> {
        let mut read = lock(&self.read);
        let end = self.end();
        while *read < end {
            let tensor = self.entry(*read, end)?;
            let next = *read + tensor.layout.end;
            take(Arc::new(tensor))?;
            *read = next;
        }
        Ok(())
    }

    fn entry(&self, at: u64, end: u64) -> Result<SharedTensor> {
        let mut prefix = [0; PREFIX / 8];
        self.memory.read(at, bytemuck::cast_slice_mut(&mut prefix))?;
        let [magic, len] = prefix;
        if magic != MAGIC || len > MAX_SPEC as u64 {
            return Err(broken("no entry where one should be"));
        }
        let mut text = vec![0; len as usize];
        self.memory.read(at + PREFIX as u64, &mut text)?;
        let spec: TensorSpec = serde_json::from_slice(&text).map_err(|error| broken(&error.to_string()))?;
        spec.validate()?;
        let layout = EntryLayout::of(&spec, text.len())?;
        if at.checked_add(layout.end).is_none_or(|next| next > end) {
            return Err(broken("an entry that is longer than the list").tensor(spec.name));
        }
        let region = Arc::new(self.memory.map(at, layout.end as usize)?);
        Ok(SharedTensor { region, spec: Arc::new(spec), layout })
    }

    fn end(&self) -> u64 {
        self.head.counters(0, WORDS)[END].load(Ordering::Acquire)
    }
}

fn broken(what: &str) -> Error {
    Error::new(Kind::Internal, format!("a shared store with a broken list: {what}"))
}

/// Parses an address into process, descriptor and number of the store.
fn parse(address: &str) -> Option<(u32, i32, u64)> {
    let mut parts = address.strip_prefix("shm:")?.split(':');
    let (pid, fd) = (parts.next()?.parse().ok()?, parts.next()?.parse().ok()?);
    let id = u64::from_str_radix(parts.next()?, 16).ok()?;
    parts.next().is_none().then_some((pid, fd, id))
}

impl SharedTensor {
    /// The tensor's spec.
    pub fn spec(&self) -> &Arc<TensorSpec> {
        &self.spec
    }

    /// The counters of slice `index`.
    pub(crate) fn counts(&self, index: usize) -> Counts {
        Counts::shared(self.region.clone(), self.layout.counts as usize + index * Counts::BYTES)
    }

    /// An array of slice `index`: its values if `which` is 0, its state slots from 1.
    pub(crate) fn array(&self, index: usize, which: usize) -> RacyBuffer {
        let range = self.spec.slice_range(index);
        let array = self.layout.values as usize + which * self.layout.array as usize;
        RacyBuffer::shared(self.region.clone(), array + self.spec.dtype.size() * range.start, range.len())
    }

    /// Start of the values of all slices, which are contiguous. Other threads and processes change them at
    /// any time.
    pub(crate) fn values(&self) -> *const u8 {
        self.region.as_ptr().wrapping_add(self.layout.values as usize)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_are_read_whole_or_not_at_all() {
        assert_eq!(parse("shm:12:3:ff"), Some((12, 3, 255)));
        for bad in ["", "shm:", "shm:1:2", "shm:1:2:3:4", "shm:-1:2:3", "tcp:1:2:3", "shm:1:2:xyz"] {
            assert_eq!(parse(bad), None, "{bad}");
            assert_eq!(Directory::open(bad).unwrap_err().kind, Kind::Config, "{bad}");
        }
    }
}
