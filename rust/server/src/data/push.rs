//! Pushes of one slice, which may wait for readers to release memory.

use super::{Exchange, READER_CHECK_INTERVAL, READER_TIMEOUT, owed};
use crate::answers::AnswerSlot;
use fastps_core::error::{Error, Kind, Result};
use fastps_core::frame::{Applied, Push};
use fastps_core::tensor::SliceId;
use fastps_transport::convert;
use std::time::Instant;
use tokio::sync::oneshot;

/// A push's wait for readers.
#[derive(Debug, Default)]
pub(super) struct ReaderWait {
    since: Option<Instant>,
    /// Set if none was there when the push was last refused.
    in_vain: bool,
}

impl Exchange {
    /// A push whose answer is a receipt.
    pub(super) async fn push(
        &self,
        tag: u64,
        push: &Push<'_>,
        reservation: Option<u64>,
        mut slot: AnswerSlot,
    ) {
        let mut wait = ReaderWait::default();
        loop {
            match self.push_once(tag, push, reservation, slot) {
                None => return,
                Some((back, error)) if !self.wait_for_readers(push.slice, &mut wait).await => {
                    return self.refuse(back, tag, error);
                }
                Some((back, _)) => slot = back,
            }
        }
    }

    /// Returns the slot if there is no memory for the push right now.
    fn push_once(
        &self,
        tag: u64,
        push: &Push<'_>,
        reservation: Option<u64>,
        slot: AnswerSlot,
    ) -> Option<(AnswerSlot, Error)> {
        let (slice, client) = (push.slice, push.identity.client);
        let stream = self.clone();
        let (full, mut refused) = oneshot::channel();
        self.node.shard.push(push, move |result| match result {
            Ok(applied) => {
                stream.count(client, &applied);
                if let Some(reservation) = reservation {
                    stream.node.reservations.arrived(slice, reservation);
                }
                slot.send(Ok(owed(convert::receipt(tag, &applied))));
            }
            Err(error) if error.kind == Kind::Capacity => {
                // A push that a policy held is refused after this wait has ended.
                if let Err((slot, error)) = full.send((slot, error)) {
                    stream.refuse(slot, tag, error);
                }
            }
            Err(error) => stream.refuse(slot, tag, error),
        });
        refused.close();
        refused.try_recv().ok()
    }

    /// Waits for readers that keep old versions to release them, then resets the slowest one. Returns false
    /// if readers are not the cause of the lack of memory.
    pub(super) async fn wait_for_readers(&self, slice: SliceId, wait: &mut ReaderWait) -> bool {
        if !self.node.shard.slice(slice).is_ok_and(|slice| slice.needs_memory()) {
            // The last may have gone since the push was refused.
            return !std::mem::replace(&mut wait.in_vain, true);
        }
        wait.in_vain = false;
        if wait.since.get_or_insert_with(Instant::now).elapsed() >= READER_TIMEOUT
            && !self.node.reset_slowest_reader()
        {
            return false;
        }
        // A native connection that was reset releases its memory in this time.
        tokio::time::sleep(READER_CHECK_INTERVAL).await;
        true
    }

    /// Applies a push whose answer is the new values. Later frames do not wait while a policy holds it.
    pub(super) async fn push_pull(&self, tag: u64, push: &Push<'_>, slot: AnswerSlot) {
        let (slice, client) = (push.slice, push.identity.client);
        let mut wait = ReaderWait::default();
        let outcome = loop {
            let (done, mut outcome) = oneshot::channel();
            self.node.shard.push(push, move |result| drop(done.send(result)));
            match outcome.try_recv() {
                Ok(Err(error))
                    if error.kind == Kind::Capacity && self.wait_for_readers(slice, &mut wait).await => {}
                Ok(result) => return self.after_push(tag, slice, client, result, slot).await,
                Err(_) => break outcome,
            }
        };
        let stream = self.clone();
        tokio::spawn(async move {
            let lost = || Err(Error::new(Kind::Internal, "a push was not completed"));
            let result = outcome.await.unwrap_or_else(|_| lost());
            stream.after_push(tag, slice, client, result, slot).await;
        });
    }

    async fn after_push(
        &self,
        tag: u64,
        slice: SliceId,
        client: u64,
        result: Result<Applied>,
        slot: AnswerSlot,
    ) {
        match result {
            Ok(applied) => {
                self.count(client, &applied);
                let pull = || self.node.shard.pull(client, slice);
                self.answer_values(slot, tag, Some(applied), pull).await;
            }
            Err(error) => self.refuse(slot, tag, error),
        }
    }

    pub(super) fn count(&self, client: u64, applied: &Applied) {
        if !applied.duplicate {
            self.node.sessions.count_applied(client, 1);
            self.node.measures.applied(applied);
        }
    }
}
