//! What a frame carries, and the guard on a caller's memory: it is read when the stream is ready for the frame, and
//! never again once the call has ended.

use super::runtime::lock;
use bytes::Bytes;
use fastps_core::dtype::DType;
use fastps_core::verbs::Values;
use std::fmt;
use std::ops::Range;
use std::sync::{Arc, Condvar, Mutex, PoisonError};

/// The payload of a frame that waits to be sent.
#[derive(Clone, Debug)]
pub(super) enum Payload {
    /// Bytes of our own.
    Owned(Bytes),
    /// Elements of a caller's memory.
    Lent(Arc<Memory>, Range<usize>),
}

impl Payload {
    /// The bytes to send; `None` when the memory was withdrawn.
    pub(super) fn read(&self) -> Option<Bytes> {
        match self {
            Self::Owned(bytes) => Some(bytes.clone()),
            Self::Lent(memory, range) => Memory::lend(memory, range.clone()),
        }
    }

    pub(super) fn len(&self) -> usize {
        match self {
            Self::Owned(bytes) => bytes.len(),
            Self::Lent(memory, range) => memory.dtype.size() * range.len(),
        }
    }
}

/// A caller's values while its call lasts.
pub(super) struct Memory {
    dtype: DType,
    state: Mutex<State>,
    idle: Condvar,
}

struct State {
    values: Option<Arc<dyn Values>>,
    readers: usize,
}

impl Memory {
    pub(super) fn new(values: Arc<dyn Values>) -> Arc<Self> {
        let dtype = values.view().dtype();
        Arc::new(Self {
            dtype,
            state: Mutex::new(State { values: Some(values), readers: 0 }),
            idle: Condvar::new(),
        })
    }

    /// Bytes that read the caller's memory directly. The encoder copies them within the poll that asked for them, so
    /// they are short-lived.
    fn lend(memory: &Arc<Self>, range: Range<usize>) -> Option<Bytes> {
        let mut state = lock(&memory.state);
        let values = state.values.clone()?;
        state.readers += 1;
        drop(state);
        Some(Bytes::from_owner(Loan { memory: memory.clone(), values: Some(values), range }))
    }

    /// Ends all reading: returns when nobody reads, and nobody ever will again.
    pub(super) fn withdraw(&self) {
        let mut state = lock(&self.state);
        let values = state.values.take();
        while state.readers > 0 {
            state = self.idle.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        drop(state);
        drop(values);
    }
}

impl fmt::Debug for Memory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Memory").finish_non_exhaustive()
    }
}

struct Loan {
    memory: Arc<Memory>,
    values: Option<Arc<dyn Values>>,
    range: Range<usize>,
}

impl AsRef<[u8]> for Loan {
    fn as_ref(&self) -> &[u8] {
        self.values.as_ref().map_or(&[], |values| values.view().get(self.range.clone()).bytes())
    }
}

impl Drop for Loan {
    fn drop(&mut self) {
        // The reference goes first: whoever is told that reading has ended may rely on it.
        self.values = None;
        lock(&self.memory.state).readers -= 1;
        self.memory.idle.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use fastps_core::dtype::{Array, View};

    #[test]
    fn withdrawal_waits_for_readers_and_ends_reading() {
        let memory = Memory::new(Arc::new(Array::Float32(vec![1.0, 2.0, 3.0])));
        let bytes = Payload::Lent(memory.clone(), 1..3).read();
        assert_eq!(bytes.as_deref(), Some(View::Float32(&[2.0, 3.0]).bytes()));
        let other = {
            let memory = memory.clone();
            std::thread::spawn(move || memory.withdraw())
        };
        assert!(!other.is_finished());
        drop(bytes);
        assert!(other.join().is_ok());
        assert!(Payload::Lent(memory, 0..1).read().is_none());
    }
}
