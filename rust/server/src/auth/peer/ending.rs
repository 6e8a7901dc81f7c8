//! The end of a connection, which other threads may ask for.

use fastps_core::error::Error;
use futures_util::task::AtomicWaker;
use std::sync::OnceLock;
use std::task::{Context, Poll};

/// The reason why a connection must end, once there is one.
#[derive(Debug, Default)]
pub(crate) struct Ending {
    reason: OnceLock<Error>,
    waker: AtomicWaker,
}

impl Ending {
    /// Ends the connection; only the first reason counts.
    pub(crate) fn end(&self, reason: Error) {
        if self.reason.set(reason).is_ok() {
            self.waker.wake();
        }
    }

    /// The reason, if the connection must end.
    pub(crate) fn reason(&self) -> Option<&Error> {
        self.reason.get()
    }

    /// Ready with the reason once the connection must end.
    pub(crate) fn poll(&self, cx: &Context<'_>) -> Poll<&Error> {
        self.waker.register(cx.waker());
        self.reason().map_or(Poll::Pending, Poll::Ready)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use fastps_core::error::Kind;
    use std::future::poll_fn;
    use std::sync::Arc;

    #[tokio::test]
    async fn a_waiting_connection_learns_that_it_must_end() {
        let ending = Arc::new(Ending::default());
        let other = ending.clone();
        let waiting = tokio::spawn(async move { poll_fn(|cx| other.poll(cx).map(Clone::clone)).await });
        tokio::task::yield_now().await;
        assert!(!waiting.is_finished());
        for kind in [Kind::Unauthenticated, Kind::Capacity] {
            ending.end(Error::new(kind, "over"));
        }
        assert_eq!(waiting.await.unwrap().kind, Kind::Unauthenticated);
    }
}
