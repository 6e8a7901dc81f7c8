//! Replaces `shared.rs` under a model checker: one memory for several "processes" that are threads of a
//! model. Reads and writes are system calls, one at a time; the words of the head are atomics.

use super::cell::Line;
use crate::base::error::{Error, Kind, Result};
use crate::base::sync::{Arc, AtomicU64, Mutex, MutexGuard, Ordering, lock};
use std::time::Duration;

const WORDS: usize = 3;

#[derive(Clone, Debug)]
pub(crate) struct SharedMemory(Arc<ModelMemory>);

#[derive(Debug)]
struct ModelMemory {
    bytes: Mutex<Vec<u8>>,
    head: [AtomicU64; WORDS],
    lock: Mutex<()>,
}

impl SharedMemory {
    pub(crate) fn create() -> Result<Self> {
        let head = std::array::from_fn(|_| AtomicU64::new(0));
        Ok(Self(Arc::new(ModelMemory { bytes: Mutex::new(Vec::new()), head, lock: Mutex::new(()) })))
    }

    pub(crate) fn open(_pid: u32, _fd: i32) -> Result<Self> {
        Err(Error::new(Kind::Config, "a model has no addresses"))
    }

    pub(crate) fn fd(&self) -> i32 {
        0
    }

    pub(crate) fn lock(&self, _timeout: Duration) -> Result<MutexGuard<'_, ()>> {
        Ok(lock(&self.0.lock))
    }

    pub(crate) fn grow(&self, end: u64) -> Result<()> {
        let mut bytes = lock(&self.0.bytes);
        let len = bytes.len().max(end as usize);
        bytes.resize(len, 0);
        Ok(())
    }

    pub(crate) fn read(&self, at: u64, bytes: &mut [u8]) -> Result<()> {
        bytes.copy_from_slice(&lock(&self.0.bytes)[at as usize..][..bytes.len()]);
        Ok(())
    }

    pub(crate) fn write(&self, at: u64, bytes: &[u8]) -> Result<()> {
        lock(&self.0.bytes)[at as usize..][..bytes.len()].copy_from_slice(bytes);
        if at == 0 {
            for (word, value) in self.0.head.iter().zip(bytes.chunks_exact(8)) {
                word.store(bytemuck::pod_read_unaligned(value), Ordering::Release);
            }
        }
        Ok(())
    }

    pub(crate) fn map(&self, _at: u64, _len: usize) -> Result<Region> {
        Ok(Region(self.0.clone()))
    }
}

/// A model uses only the head.
#[derive(Debug)]
pub(crate) struct Region(Arc<ModelMemory>);

impl Region {
    pub(crate) fn as_ptr(&self) -> *const u8 {
        std::ptr::null()
    }

    pub(super) fn lines(&self, _at: usize, _count: usize) -> &[Line] {
        &[]
    }

    pub(crate) fn counters(&self, _at: usize, _count: usize) -> &[AtomicU64] {
        &self.0.head
    }
}
