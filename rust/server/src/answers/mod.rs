//! The answers that a stream owes its client, and the memory that they take until the client reads them.
//!
//! Values stay pinned in their slice until the connection asks for them and encodes them. At most
//! [`MAX_ENCODED_ANSWERS`] encoded answers per stream wait in the connection, so a reader that stalls takes
//! no more memory than it has; its pins can be taken back at any time by resetting its stream.

use crate::measures::{Measures, OpenRequest};
use fastps_core::error::{Error, Result};
use fastps_core::failpoint::reach;
use fastps_core::frame::Applied;
use fastps_core::shard::{Charge, Meter, Purpose};
use fastps_core::slice::Snapshot;
use fastps_durable::Journal;
use fastps_proto::MAX_MESSAGE_BYTES;
use fastps_proto::v1 as pb;
use fastps_transport::Medium;
use fastps_transport::convert::{self, Ack};
use fastps_transport::memory_budget::{Busy, MemoryBudget, OWED_ANSWER_BYTES, StreamBudget};
use fastps_transport::wire::MAX_FRAME;
use futures_util::Stream;
use std::collections::BTreeMap;
use std::pin::Pin as Pinned;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, ready};
use tokio::sync::mpsc::{OwnedPermit, Receiver};
use tokio::sync::{OwnedSemaphorePermit, watch};
use tonic::Status;

/// Answers that one stream may owe: pushes that a policy holds, and receipts that the client has not read.
pub(crate) const MAX_OWED_ANSWERS: usize = 4096;
/// Encoded answers that hyper has at a time: one that it sends, and the next.
const MAX_ENCODED_ANSWERS: u64 = 2;
/// Bytes of earlier answers that hyper may still hold when it asks for the next.
const LEFTOVER_BYTES: usize = 512 << 10;
/// Memory of a stream that tonic serves, taken at its start: a message being put together, and the answers
/// owed. A native stream takes what its connection receives and owes.
const FOREIGN_STREAM_BYTES: usize =
    MAX_OWED_ANSWERS * size_of::<QueuedAnswer>() + LEFTOVER_BYTES + MAX_MESSAGE_BYTES;
const _: () = assert!(size_of::<QueuedAnswer>() <= OWED_ANSWER_BYTES);

/// One slot in the queue of answers: a frame, or the status that ends the stream.
pub(crate) struct QueuedAnswer {
    pub(crate) what: Result<Owed, Status>,
    /// The request, unless it could not be read.
    asked: Option<OpenRequest>,
    /// Kept until the answer is written.
    pub(crate) busy: Busy,
}

/// A slot reserved for an answer.
pub(crate) struct AnswerSlot {
    permit: OwnedPermit<QueuedAnswer>,
    busy: Busy,
    asked: Option<OpenRequest>,
    /// What must happen before it is sent to everything that the answer reports.
    until: Until,
}

/// Calls back once something has happened to all that is logged when it is called.
pub(crate) type When = Box<dyn FnOnce(Box<dyn FnOnce() + Send>) + Send + Sync>;

/// What an answer waits for.
#[derive(Default)]
pub(crate) enum Until {
    #[default]
    Now,
    /// It is durable.
    Durable(Arc<Journal>),
    /// It is also copied. If the answer turns out to be a gradient's receipt, it waits as that does.
    Copied(Arc<Journal>, Ack, When),
    /// It is also in what every later owner of the shard has.
    Kept(When),
}

impl AnswerSlot {
    pub(crate) fn new(permit: OwnedPermit<QueuedAnswer>, budget: &MemoryBudget) -> Self {
        Self { permit, busy: budget.busy(), asked: None, until: Until::Now }
    }

    /// The slot of the answer to this request.
    pub(crate) fn to(self, asked: OpenRequest) -> Self {
        Self { asked: Some(asked), ..self }
    }

    /// The answer waits until all that is logged when it is made is durable, or copied. A refusal changes nothing,
    /// and does not wait.
    pub(crate) fn after(self, until: Until) -> Self {
        Self { until, ..self }
    }

    /// The answer is the receipt of a gradient, which waits for no more than its client has asked for.
    pub(crate) fn into_receipt(self) -> Self {
        let until = match self.until {
            Until::Copied(_, Ack::Applied, _) => Until::Now,
            Until::Copied(journal, _, _) => Until::Durable(journal),
            until => until,
        };
        Self { until, ..self }
    }

    pub(crate) fn send(mut self, what: Result<Owed, Status>) {
        match std::mem::take(&mut self.until) {
            Until::Durable(journal) if what.is_ok() => {
                journal.when_durable(journal.position(), move || self.send_now(what));
            }
            Until::Copied(_, _, when) | Until::Kept(when) if what.is_ok() => {
                when(Box::new(move || self.send_now(what)));
            }
            _ => self.send_now(what),
        }
    }

    pub(crate) fn send_now(self, what: Result<Owed, Status>) {
        reach("before_ack");
        self.permit.send(QueuedAnswer { what, asked: self.asked, busy: self.busy });
    }
}

/// An answer that waits for its turn.
pub(crate) enum Owed {
    Frame(Box<pb::Frame>),
    Values {
        tag: u64,
        applied: Option<Applied>,
        pin: Pin,
    },
    /// Values of rows, with a header that says more about them; its memory.
    Rows {
        header: Box<pb::Header>,
        pin: Pin,
        charge: Charge,
    },
}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// State that the two halves of a stream share: its memory, and the reason for its reset.
#[derive(Debug)]
pub(crate) struct StreamState {
    reset: watch::Sender<Option<Error>>,
    /// For encoded answers, as large as the largest so far; a native client's are not encoded.
    encoded: Option<Mutex<Charge>>,
    _memory: StreamBudget,
}

impl StreamState {
    /// Takes the memory of a new stream.
    pub(crate) fn new(meter: &Arc<Meter>, budget: &Arc<MemoryBudget>, native: bool) -> Result<Arc<Self>> {
        let bytes = if native { 0 } else { FOREIGN_STREAM_BYTES };
        Ok(Arc::new(Self {
            reset: watch::Sender::new(None),
            encoded: if native { None } else { Some(Mutex::new(meter.take(Purpose::Answers, 0)?)) },
            _memory: budget.open_stream(bytes as u64, u64::from(MAX_FRAME))?,
        }))
    }

    /// Takes memory for encoded answers of this size.
    pub(crate) fn reserve_encoded(&self, bytes: usize) -> Result<()> {
        self.encoded
            .as_ref()
            .map_or(Ok(()), |charge| locked(charge).grow_to(MAX_ENCODED_ANSWERS * bytes as u64))
    }

    /// Ends the stream.
    pub(crate) fn reset(&self, reason: &Error) {
        self.reset.send_replace(Some(reason.clone()));
    }

    /// Waits until the stream is reset.
    pub(crate) async fn was_reset(&self) {
        let _ = self.reset.subscribe().wait_for(Option::is_some).await;
    }

    fn status(&self) -> Option<Status> {
        self.reset.borrow().as_ref().map(convert::status)
    }
}

/// All pins of a shard, the oldest first.
#[derive(Debug, Default)]
pub(crate) struct Pins(Mutex<PinTable>);

#[derive(Debug, Default)]
struct PinTable {
    next: u64,
    by_age: BTreeMap<u64, (Snapshot, Arc<StreamState>)>,
}

/// Values that wait to be encoded, and one of the connection's permits.
#[derive(Debug)]
pub(crate) struct Pin {
    pins: Arc<Pins>,
    age: u64,
    _permit: OwnedSemaphorePermit,
}

impl Pins {
    pub(crate) fn add(
        self: &Arc<Self>,
        snapshot: Snapshot,
        stream: &Arc<StreamState>,
        permit: OwnedSemaphorePermit,
    ) -> Pin {
        let mut table = locked(&self.0);
        table.next += 1;
        let age = table.next;
        table.by_age.insert(age, (snapshot, stream.clone()));
        Pin { pins: self.clone(), age, _permit: permit }
    }

    /// Takes back everything that the stream with the oldest pin has pinned, and ends it. False: nothing is
    /// pinned.
    pub(crate) fn reset_oldest(&self, reason: &Error) -> bool {
        let mut table = locked(&self.0);
        let Some((_, (_, stream))) = table.by_age.pop_first() else {
            return false;
        };
        table.by_age.retain(|_, (_, other)| !Arc::ptr_eq(other, &stream));
        stream.reset(reason);
        true
    }
}

impl Pin {
    /// The values, unless they were taken back; they stay pinned until the pin is dropped.
    pub(crate) fn lend(&self) -> Option<Snapshot> {
        locked(&self.pins.0).by_age.get(&self.age).map(|(snapshot, _)| snapshot.clone())
    }

    /// The values, unless they were taken back.
    fn take(&self) -> Option<Snapshot> {
        locked(&self.pins.0).by_age.remove(&self.age).map(|(snapshot, _)| snapshot)
    }
}

impl Drop for Pin {
    fn drop(&mut self) {
        drop(self.take());
    }
}

/// The stream of answers as tonic encodes it.
pub(crate) struct Answers {
    pub(crate) queue: Receiver<QueuedAnswer>,
    pub(crate) shared: Arc<StreamState>,
    pub(crate) measures: Arc<Measures>,
    pub(crate) medium: Medium,
}

impl Answers {
    /// The next answer, which is counted as sent.
    pub(crate) fn poll_answer(&mut self, context: &mut Context<'_>) -> Poll<Option<QueuedAnswer>> {
        let answer = ready!(self.queue.poll_recv(context));
        if let Some(asked) = answer.as_ref().and_then(|answer| answer.asked) {
            self.measures.answered(asked);
        }
        Poll::Ready(answer)
    }

    /// Counts values that are sent, not lent.
    pub(crate) fn count_sent(&self, values: &Snapshot) {
        self.measures.sent(values.codec, values.as_ref().len(), self.medium);
    }
}

impl Stream for Answers {
    type Item = Result<pb::Frame, Status>;

    fn poll_next(mut self: Pinned<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        if let Some(status) = self.shared.status() {
            return Poll::Ready(Some(Err(status)));
        }
        Poll::Ready(match ready!(self.poll_answer(context)).map(|answer| answer.what) {
            None => None,
            Some(Err(status)) => Some(Err(status)),
            Some(Ok(Owed::Frame(frame))) => Some(Ok(*frame)),
            Some(Ok(Owed::Rows { header, pin, charge })) => match pin.take() {
                Some(snapshot) => {
                    self.count_sent(&snapshot);
                    Some(Ok(pb::Frame { header: Some(*header), payload: convert::keeping(snapshot, charge) }))
                }
                None => self.shared.status().map(Err),
            },
            Some(Ok(Owed::Values { tag, applied, pin })) => match pin.take() {
                Some(snapshot) => {
                    self.count_sent(&snapshot);
                    Some(Ok(convert::snapshot(tag, applied.as_ref(), snapshot, ())))
                }
                None => self.shared.status().map(Err),
            },
        })
    }
}
