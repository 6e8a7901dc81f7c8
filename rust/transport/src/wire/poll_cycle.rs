//! One poll cycle of a connection's task: it reads a frame, uses it, and writes the answers. It does not read
//! while it writes, so other connections of its thread wait for at most one frame of this one.

use super::Pace;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// Shared by a connection's task, its socket's reader and its streams, all of which one thread polls.
#[derive(Clone, Debug)]
pub struct PollCycle(Arc<CycleState>);

#[derive(Debug)]
struct CycleState {
    /// Set when a stream has given its connection something to write.
    sent: AtomicBool,
    /// Set during the half that writes: nothing is read.
    writing: AtomicBool,
    pace: Pace,
}

impl Default for PollCycle {
    fn default() -> Self {
        let no = || AtomicBool::new(false);
        Self(Arc::new(CycleState { sent: no(), writing: no(), pace: Pace::new() }))
    }
}

impl PollCycle {
    /// The pace at which large frames arrive.
    pub fn pace(&self) -> &Pace {
        &self.0.pace
    }

    /// Notes that there is something to write.
    pub(super) fn sent(&self) {
        self.0.sent.store(true, Ordering::Relaxed);
    }

    pub(super) fn is_writing(&self) -> bool {
        self.0.writing.load(Ordering::Relaxed)
    }

    /// Polls the connection once more if a stream has something to write. The first poll has registered the
    /// task for incoming data.
    pub fn write<T>(&self, poll: impl FnOnce() -> T) -> Option<T> {
        self.0.sent.swap(false, Ordering::Relaxed).then(|| {
            self.0.writing.store(true, Ordering::Relaxed);
            let polled = poll();
            self.0.writing.store(false, Ordering::Relaxed);
            polled
        })
    }
}

#[cfg(test)]
mod tests {
    use super::super::Framed;
    use super::*;
    use std::future::poll_fn;
    use std::pin::Pin;
    use std::task::Poll;
    use tokio::io::{AsyncRead, AsyncReadExt, ReadBuf};

    #[tokio::test]
    async fn while_it_writes_nothing_is_read() {
        let cycle = PollCycle::default();
        let frame = [0, 0, 3, 0, 0, 0, 0, 0, 1, 7, 8, 9];
        let mut framed = Framed::new(&frame[..], 0, cycle.clone());
        assert_eq!(cycle.write(|| ()), None, "there is nothing to write");
        cycle.sent();
        let mut buffer_bytes = [0; 16];
        let polled = poll_fn(|cx| {
            let mut buffer = ReadBuf::new(&mut buffer_bytes);
            Poll::Ready(cycle.write(|| Pin::new(&mut framed).poll_read(cx, &mut buffer).is_ready()))
        });
        assert_eq!(polled.await, Some(false));
        assert_eq!(cycle.write(|| ()), None, "what was to be written is");
        let mut got = Vec::new();
        framed.read_to_end(&mut got).await.unwrap();
        assert_eq!(got, frame);
    }
}
