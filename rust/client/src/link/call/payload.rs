//! The payload of a frame. A caller's memory is lent to the connection until it is written there, and a call
//! does not end before all of its memory is returned.

use crate::state::runtime::lock;
use bytes::Bytes;
use fastps_core::dtype::DType;
use fastps_core::verbs::Values;
use std::fmt;
use std::ops::Range;
use std::sync::{Arc, Mutex};

/// The payload of a frame to be sent.
#[derive(Clone, Debug)]
pub(crate) enum Payload {
    /// Bytes owned by the frame.
    Owned(Bytes),
    /// Elements of a caller's memory.
    Lent(Arc<Memory>, Range<usize>),
    /// Number of bytes that are encoded before the frame is queued.
    Later(usize),
}

impl Payload {
    /// The bytes to send; `None` if the memory was withdrawn.
    pub(crate) fn read(&self) -> Option<Bytes> {
        match self {
            Self::Owned(bytes) => Some(bytes.clone()),
            Self::Lent(memory, range) => Memory::lend(memory, range.clone()),
            Self::Later(_) => None,
        }
    }

    pub(crate) fn len(&self) -> usize {
        match self {
            Self::Owned(bytes) => bytes.len(),
            Self::Lent(memory, range) => memory.dtype.size() * range.len(),
            Self::Later(bytes) => *bytes,
        }
    }
}

/// A caller's values while its call lasts.
pub(crate) struct Memory {
    dtype: DType,
    state: Mutex<MemoryState>,
}

struct MemoryState {
    values: Option<Arc<dyn Values>>,
    readers: usize,
    /// Called when reading has ended.
    when_idle: Option<Box<dyn FnOnce() + Send>>,
}

impl Memory {
    pub(crate) fn new(values: Arc<dyn Values>) -> Arc<Self> {
        let dtype = values.view().dtype();
        Arc::new(Self {
            dtype,
            state: Mutex::new(MemoryState { values: Some(values), readers: 0, when_idle: None }),
        })
    }

    /// Sets the callback for the end of the last reader after withdrawal.
    pub(crate) fn when_idle(&self, callback: Box<dyn FnOnce() + Send>) {
        lock(&self.state).when_idle = Some(callback);
    }

    /// Bytes that read the caller's memory directly.
    fn lend(memory: &Arc<Self>, range: Range<usize>) -> Option<Bytes> {
        let mut state = lock(&memory.state);
        let values = state.values.clone()?;
        state.readers += 1;
        drop(state);
        Some(Bytes::from_owner(LentValues { memory: memory.clone(), values: Some(values), range }))
    }

    /// Ends reading: no new reader begins. The callback is called when the present ones are done.
    pub(crate) fn withdraw(&self) {
        let values = lock(&self.state).values.take();
        drop(values);
    }

    /// Returns whether there is no reader, now or later.
    pub(crate) fn is_idle(&self) -> bool {
        let state = lock(&self.state);
        state.values.is_none() && state.readers == 0
    }
}

impl fmt::Debug for Memory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Memory").finish_non_exhaustive()
    }
}

struct LentValues {
    memory: Arc<Memory>,
    values: Option<Arc<dyn Values>>,
    range: Range<usize>,
}

impl AsRef<[u8]> for LentValues {
    fn as_ref(&self) -> &[u8] {
        self.values.as_ref().map_or(&[], |values| values.view().get(self.range.clone()).bytes())
    }
}

impl Drop for LentValues {
    fn drop(&mut self) {
        // Dropped first: the callback may rely on it.
        self.values = None;
        let mut state = lock(&self.memory.state);
        state.readers -= 1;
        let ended = state.values.is_none() && state.readers == 0;
        let callback = if ended { state.when_idle.take() } else { None };
        drop(state);
        if let Some(callback) = callback {
            callback();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use fastps_core::dtype::{Array, View};

    #[test]
    fn withdrawal_ends_reading_once_the_loans_are_back() {
        let memory = Memory::new(Arc::new(Array::Float32(vec![1.0, 2.0, 3.0])));
        let bytes = Payload::Lent(memory.clone(), 1..3).read();
        assert_eq!(bytes.as_deref(), Some(View::Float32(&[2.0, 3.0]).bytes()));
        memory.withdraw();
        assert!(!memory.is_idle());
        assert!(Payload::Lent(memory.clone(), 0..1).read().is_none());
        assert_eq!(bytes.as_deref(), Some(View::Float32(&[2.0, 3.0]).bytes()));
        drop(bytes);
        assert!(memory.is_idle());
    }
}
