//! The state of the link to one shard.
//!
//! A frame keeps its tag, and an identified one its identity, over all connections. It leaves the queue
//! exactly once: when it is answered, or when its call abandons it. An identified frame that was sent and
//! abandoned leaves a doubt behind, and a question about it joins the end of the queue.

use crate::address::is_loopback;
use crate::link::call::{Call, CallPart, Outcome};
use crate::link::payload::Payload;
use crate::link::queue::{Frame, Known, MAX_UNANSWERED_PUSHES, Pending, Queue, Sender, Waiter};
use crate::link::route::ServerRoute;
use crate::link::unary;
use crate::state::doubt::Doubt;
use crate::state::runtime::{Driver, lock, random};
use crate::state::shared::Shared;
use crate::state::stats;
use crate::state::waiting::{self, WaitsFor};
use bytes::Bytes;
use fastps_core::error::{Error, Kind, Result};
use fastps_core::tensor::SliceId;
use fastps_core::verbs::Fate;
use fastps_proto::v1 as pb;
use fastps_transport::convert;
use fastps_transport::convert::header::{self, Target};
use std::collections::HashMap;
use std::fmt;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, Weak};
use std::task::{Context, Poll};
use std::time::Instant;
use tokio::sync::{Notify, watch};
use tonic::transport::Channel;

/// What became of an abandoned frame.
pub(crate) enum Abandoned {
    /// Certainly not applied; says why it was not.
    NotSent(Error),
    /// One doubt for each part.
    Sent(Vec<Arc<Doubt>>),
    /// The answer has just come.
    Answered,
}

/// The link to one shard.
pub(crate) struct Link {
    shard: u32,
    /// Shards of its cluster.
    pub(crate) shards: usize,
    /// Whether payloads carry a CRC-32C.
    checksums: bool,
    pub(crate) address: String,
    /// For control calls; a closed link has none, so that the connection ends.
    channel: Mutex<Option<Channel>>,
    pub(crate) lease: std::time::Duration,
    /// The server is another one than the client met first.
    restarted: AtomicBool,
    /// The server has a data directory.
    keeps_data: AtomicBool,
    pub(crate) driver: Weak<Driver>,
    pub(crate) route: ServerRoute,
    pub(crate) shared: Arc<Shared>,
    pub(crate) queue: Mutex<Queue>,
    /// Tells the driver that the link was closed or that its lease is lost.
    pub(crate) changed: Notify,
    /// What became of the first attempt to connect.
    first: watch::Sender<Option<Result<()>>>,
}

impl Link {
    pub(crate) fn new(
        shared: Arc<Shared>,
        address: String,
        channel: Channel,
        client: u64,
        hello: &pb::HelloResponse,
        driver: &Arc<Driver>,
        route: ServerRoute,
    ) -> Arc<Self> {
        let queue = Queue::new(client, hello.server);
        Arc::new(Self {
            shard: hello.shard,
            shards: hello.cluster.len(),
            checksums: shared.checksums.unwrap_or_else(|| route.tls.is_none() && !is_loopback(&address)),
            address,
            channel: Mutex::new(Some(channel)),
            lease: std::time::Duration::from_millis(u64::from(hello.lease_ms.max(300))),
            restarted: AtomicBool::new(false),
            keeps_data: AtomicBool::new(unary::keeps_data(hello)),
            driver: Arc::downgrade(driver),
            route,
            shared,
            queue: Mutex::new(queue),
            changed: Notify::new(),
            first: watch::Sender::new(None),
        })
    }

    /// An attempt to connect is over.
    pub(crate) fn note_attempt(&self, error: Option<&Error>) {
        self.first.send_if_modified(|first| {
            let is_first = first.is_none();
            first.get_or_insert_with(|| error.cloned().map_or(Ok(()), Err));
            is_first
        });
    }

    /// Waits for the first attempt to connect. Fails if it has met a limit, which others would meet, too;
    /// what else went wrong is tried again.
    pub(crate) async fn begun(&self, deadline: Instant) -> Result<()> {
        let mut first = self.first.subscribe();
        let tried = tokio::time::timeout_at(deadline.into(), first.wait_for(Option::is_some)).await;
        match tried.ok().and_then(|first| first.ok()?.clone()) {
            Some(Err(mut error)) if error.kind == Kind::Capacity => {
                error.message = format!("cannot connect to {}: {}", self.address, error.message);
                Err(error.shard(self.shard))
            }
            _ => Ok(()),
        }
    }

    pub(crate) fn shard(&self) -> u32 {
        self.shard
    }

    /// This link's incarnation.
    pub(crate) fn client(&self) -> u64 {
        lock(&self.queue).client
    }

    /// Whether the client is one of a group's workers.
    pub(crate) fn has_places(&self) -> bool {
        !lock(&self.shared.places).is_empty()
    }

    pub(crate) fn channel(&self) -> Result<Channel> {
        lock(&self.channel).clone().ok_or_else(closed)
    }

    pub(crate) fn is_closed(&self) -> bool {
        lock(&self.queue).closed
    }

    /// A slice that is no more.
    pub(crate) fn forget(&self, slice: SliceId) {
        lock(&self.queue).slices.remove(&slice.0);
    }

    /// Whether anything waits to be sent or answered.
    pub(crate) fn has_frames(&self) -> bool {
        !lock(&self.queue).frames.is_empty()
    }

    /// Whether it has a connection, for all that is known.
    pub(crate) fn is_connected(&self) -> bool {
        lock(&self.queue).session != 0
    }

    /// Whether the present session must end for the sake of a caller's memory.
    pub(crate) fn is_recalled(&self) -> bool {
        lock(&self.queue).recalled
    }

    /// Ends the present session, so that it lets go of what it has not sent; what is not answered is sent on
    /// the next.
    pub(crate) fn recall(&self) {
        let mut queue = lock(&self.queue);
        if queue.session != 0 && !std::mem::replace(&mut queue.recalled, true) {
            self.changed.notify_one();
        }
    }

    /// The server's incarnation, as its hello told it.
    pub(crate) fn server(&self) -> u64 {
        lock(&self.queue).server
    }

    /// Queues the frames of a call in their order, under this sequence number.
    pub(crate) fn enqueue(&self, call: &Arc<Call>, frames: Vec<Frame>, sequence: u64) {
        let mut queue = lock(&self.queue);
        if queue.closed {
            drop(queue);
            for Frame { parts, .. } in frames {
                refuse(call, parts, &closed());
            }
            return;
        }
        let sender = Sender { client: 0, sequence, base_of: queue.client };
        let mut fenced = Vec::new();
        for Frame { parts, header, payload } in frames {
            // Under the lock under which a lease is renewed, so that none slips through to its new
            // incarnation.
            if let Some(error) = self.shared.fences(&header) {
                fenced.push((parts, error));
                continue;
            }
            let tag = queue.push(header, payload, Waiter::Parts(call.clone(), parts.clone()), sender);
            call.parts[parts].iter().for_each(|part| part.tag.store(tag, Ordering::Release));
        }
        queue.wake();
        drop(queue);
        for (parts, error) in fenced {
            refuse(call, parts, &error);
        }
    }

    /// The next frame for the stream of this session; `None` ends it.
    pub(crate) fn poll_frame(&self, session: u64, context: &mut Context<'_>) -> Poll<Option<pb::Frame>> {
        let mut guard = lock(&self.queue);
        let queue = &mut *guard;
        if queue.closed || queue.session != session {
            return Poll::Ready(None);
        }
        if !queue.lease_lost
            && let Some(question) = queue.question()
        {
            return Poll::Ready(Some(question));
        }
        // Until a restarted server has told what is left, it changes nothing for this client.
        while !queue.lease_lost
            && queue.to_ask.is_empty()
            && let Some((tag, pending)) = queue.frames.range_mut(queue.cursor..).next()
        {
            if pending.identified() {
                let slices = &mut queue.slices;
                if pending.slices().any(|slice| {
                    slices.get(&slice).is_some_and(|known| known.unanswered >= MAX_UNANSWERED_PUSHES)
                }) {
                    break;
                }
                pending.slices().for_each(|slice| slices.entry(slice).or_default().unanswered += 1);
            }
            queue.cursor = tag + 1;
            let Some(payload) = pending.payload.read() else {
                continue;
            };
            pending.attempts += 1;
            if pending.attempts > 1 && fastps_core::fault::fault("resend_as_new") {
                pending.sender.sequence += 1 << 32;
            }
            stats::sent(&self.shared.counters, &pending.header, payload.len(), pending.attempts);
            let crc32c = (self.checksums && !payload.is_empty()).then(|| convert::crc32c(&payload));
            let header = pending.complete(*tag, queue.client, crc32c);
            return Poll::Ready(Some(pb::Frame { header: Some(header), payload }));
        }
        queue.stream = Some(context.waker().clone());
        Poll::Pending
    }

    /// A doubt about a frame that was sent, and the question that will settle it.
    pub(crate) fn doubt(&self, queue: &mut Queue, pending: &Pending, part: &CallPart) -> Arc<Doubt> {
        let residue = lock(&part.residue).take();
        let doubt =
            Doubt::new(self.shared.process, part.name.clone(), self.shard, part.elements.clone(), residue);
        self.shared.note_doubt(&doubt);
        let pb::Header { group, epoch, .. } = pending.header;
        let question = header::resolve(Target { slice: SliceId(part.slice), group, epoch });
        queue.push(question, Payload::Owned(Bytes::new()), Waiter::Doubt(doubt.clone()), pending.sender);
        queue.wake();
        doubt
    }

    /// Takes a frame out because its call has ended; `parts` are all that it carries.
    pub(crate) fn abandon(&self, parts: &[CallPart]) -> Abandoned {
        let mut queue = lock(&self.queue);
        let tag = parts.first().map_or(0, CallPart::tag);
        let (Some(pending), [part, ..]) = (queue.frames.remove(&tag), parts) else {
            return Abandoned::Answered;
        };
        let abandoned = if pending.attempts > 0 && pending.identified() {
            let doubts: Vec<_> = parts.iter().map(|part| self.doubt(&mut queue, &pending, part)).collect();
            if queue.session != 0 {
                let of_slices = doubts.iter().cloned().zip(parts.iter().map(|part| part.slice));
                queue.late.insert(tag, of_slices.collect());
            }
            Abandoned::Sent(doubts)
        } else {
            Abandoned::NotSent(part.refused(self.not_sent(&queue)))
        };
        self.check_drained(&queue);
        abandoned
    }

    /// Why a frame that its call or its client has given up was not answered, or not even sent.
    fn not_sent(&self, queue: &Queue) -> Error {
        let (what, kind) = if queue.closed {
            ("the client was closed", Kind::Connection)
        } else {
            ("the deadline passed", Kind::Deadline)
        };
        let address = &self.address;
        match &queue.last_error {
            Some(error) => {
                let message = format!("{what} without a connection to {address}: {}", error.message);
                Error::new(Kind::Connection, message)
            }
            None => Error::new(kind, format!("{what} before {address} answered")),
        }
    }

    /// Once the last frame under a lost incarnation is answered, the driver goes on under a new one.
    pub(crate) fn check_drained(&self, queue: &Queue) {
        if queue.is_drained() {
            self.changed.notify_one();
        }
    }

    /// The server has said that it does not know this incarnation.
    pub(crate) fn lease_is_lost(&self, client: u64) {
        let mut queue = lock(&self.queue);
        if queue.client == client {
            queue.lease_lost = true;
            self.check_drained(&queue);
        }
    }

    /// Whether the present session must end because its lease is lost.
    pub(crate) fn is_drained(&self) -> bool {
        lock(&self.queue).is_drained()
    }

    /// Why a tensor that was here is not here any more, as far as that is known.
    pub(crate) fn gone(&self, name: &str) -> String {
        match (self.restarted.load(Ordering::Relaxed), self.keeps_data.load(Ordering::Relaxed)) {
            (true, false) => {
                format!(
                    "the server restarted without data: tensor {name:?} is gone; start it with --data-dir"
                )
            }
            (true, true) => format!("the server restarted, and its data directory has no tensor {name:?}"),
            (false, _) => format!("tensor {name:?} is not registered any more"),
        }
    }

    /// For what an unanswered frame waits.
    pub(crate) fn waits_for(&self) -> (WaitsFor, String) {
        let queue = lock(&self.queue);
        if queue.session == 0 {
            return waiting::server(&self.address, queue.last_error.as_ref().map(|error| &*error.message));
        }
        let text = format!("waiting for an answer of shard {} at {}", self.shard, self.address);
        (WaitsFor::Answer, text)
    }

    /// Starts a session: everything unanswered will be sent, in its order.
    pub(crate) fn begin(&self) -> u64 {
        let mut queue = lock(&self.queue);
        queue.sessions += 1;
        queue.session = queue.sessions;
        queue.cursor = 0;
        queue.recalled = false;
        queue.slices.values_mut().for_each(|known| known.unanswered = 0);
        queue.late.clear();
        (queue.ask_cursor, queue.asked) = (0, HashMap::new());
        queue.session
    }

    /// The server answers on this session.
    pub(crate) fn opened(&self) {
        lock(&self.queue).last_error = None;
    }

    /// Ends a session, or an attempt to begin one.
    pub(crate) fn end(&self, error: Error) {
        let mut queue = lock(&self.queue);
        if queue.session != 0 {
            stats::count(&self.shared.counters.reconnects, 1);
        }
        queue.session = 0;
        queue.late.clear();
        queue.last_error = Some(error);
        queue.wake();
    }

    /// The server's incarnation as a hello told it. Another one than before has a map of its own. It may have
    /// recovered what the former one knew of this client: then it has renewed the client's session, and what
    /// was sent is sent again, under its identity.
    pub(crate) fn met(&self, hello: &pb::HelloResponse) {
        let mut queue = lock(&self.queue);
        self.keeps_data.store(unary::keeps_data(hello), Ordering::Relaxed);
        if std::mem::replace(&mut queue.server, hello.server) != hello.server {
            self.restarted.store(true, Ordering::Relaxed);
            queue.ask_what_is_left();
            let lost = std::mem::take(&mut queue.lost);
            drop(queue);
            // What the server before this one had lost, and what this one has, are told apart.
            if !lost.is_empty() {
                self.shared.note_lost(lost);
            }
            self.shared.map_is_stale.store(true, Ordering::Release);
            // Changes that were told may be gone, so nothing is known of what lies between.
            self.shared.incarnations.fetch_add(1, Ordering::AcqRel);
        }
    }

    /// A new incarnation, because the server has forgotten the present one; unsent frames will go under it.
    pub(crate) fn renew(&self) -> Result<u64> {
        let client = random()?;
        let mut queue = lock(&self.queue);
        queue.client = client;
        queue.lease_lost = false;
        queue.slices.values_mut().for_each(Known::renew);
        self.shared.incarnations.fetch_add(1, Ordering::AcqRel);
        self.shared.lose_places();
        let fenced: Vec<_> = queue
            .frames
            .extract_if(.., |_, p| p.attempts == 0 && self.shared.fences(&p.header).is_some())
            .map(|(_, pending)| pending)
            .collect();
        self.forget_sent(queue);
        for Pending { header, waiter, .. } in fenced {
            if let (Waiter::Parts(call, parts), Some(error)) = (waiter, self.shared.fences(&header)) {
                refuse(&call, parts, &error);
            }
        }
        Ok(client)
    }

    /// The fate of what was sent is unknown from now on.
    fn forget_sent(&self, mut queue: std::sync::MutexGuard<'_, Queue>) {
        let lost = |_: &u64, p: &mut Pending| {
            p.attempts > 0 && p.identified() || matches!(p.waiter, Waiter::Doubt(_))
        };
        let lost: Vec<_> = queue.frames.extract_if(.., lost).map(|(_, p)| p.waiter).collect();
        for pending in queue.frames.values_mut().filter(|p| p.attempts > 0) {
            (pending.attempts, pending.sender.client) = (0, 0);
        }
        queue.late.clear();
        drop(queue);
        for waiter in lost {
            match waiter {
                Waiter::Doubt(doubt) => doubt.settle(Fate::Unknown),
                Waiter::Parts(call, indices) => {
                    for index in indices {
                        let part = &call.parts[index];
                        let residue = lock(&part.residue).take();
                        let (name, elements) = (part.name.clone(), part.elements.clone());
                        let doubt = Doubt::new(self.shared.process, name, self.shard, elements, residue);
                        self.shared.note_doubt(&doubt);
                        doubt.settle(Fate::Unknown);
                        call.deliver(index, Outcome::InDoubt(doubt), None);
                    }
                }
            }
        }
    }

    /// Ends the link and every wait for it.
    pub(crate) fn close(&self) {
        let mut queue = lock(&self.queue);
        if std::mem::replace(&mut queue.closed, true) {
            return;
        }
        queue.wake();
        self.changed.notify_one();
        *lock(&self.channel) = None;
        let unsent = queue.frames.extract_if(.., |_, p| p.attempts == 0 || !p.identified());
        let unsent: Vec<_> = unsent.map(|(_, p)| p.waiter).collect();
        let error = self.not_sent(&queue);
        self.forget_sent(queue);
        for waiter in unsent {
            match waiter {
                Waiter::Doubt(doubt) => doubt.settle(Fate::Unknown),
                Waiter::Parts(call, parts) => refuse(&call, parts, &error),
            }
        }
    }
}

fn refuse(call: &Call, parts: Range<usize>, error: &Error) {
    for part in parts {
        call.deliver(part, Outcome::Failed(call.parts[part].refused(error.clone())), None);
    }
}

/// The error of everything that is asked of a closed client.
pub(crate) fn closed() -> Error {
    Error::new(Kind::Connection, "this client is closed")
}

impl fmt::Debug for Link {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Link")
            .field("shard", &self.shard)
            .field("address", &self.address)
            .finish_non_exhaustive()
    }
}
