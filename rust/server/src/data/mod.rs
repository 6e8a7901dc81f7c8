//! The data service: one task per stream reads frames in order and answers each with exactly one frame.
//!
//! A slot in the bounded queue of answers is taken before a frame is read, so a completion never waits, and
//! a client that does not read stops only its own stream.

mod parts;
mod push;
mod vectors;

use crate::answers::{AnswerSlot, Answers, MAX_OWED_ANSWERS, Owed, QueuedAnswer, StreamState, Until, When};
use crate::auth::budget::Account;
use crate::auth::budget::calls::sleep;
use crate::auth::caller::Caller;
use crate::auth::peer::Peer;
use crate::cluster::node::{ConnectionCounters, Node, Phase};
use crate::measures::OpenRequest;
use fastps_core::dtype::DType;
use fastps_core::error::{Error, Kind, Result};
use fastps_core::failpoint::reach;
use fastps_core::frame::{Applied, Identity};
use fastps_core::identity::Completion;
use fastps_core::slice::{Resolved, Slice, Snapshot};
use fastps_core::tensor::SliceId;
use fastps_proto::v1 as pb;
use fastps_proto::v1::data_server::Data;
use fastps_proto::{NeedsRole, role_of};
use fastps_transport::convert::{self, Ack, Request, Route, VectorRead, Verb};
use fastps_transport::memory_budget::MemoryBudget;
use fastps_transport::wire::{Messages, PollCycle, Spin};
use prost::Message;
use std::future::poll_fn;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::sync::OwnedSemaphorePermit;
use tokio::sync::mpsc::{Sender, channel};
use tonic::metadata::MetadataMap;
use tonic::{Status, Streaming};

/// How long a push waits for readers to release the memory that it needs, before the slowest one is reset.
const READER_TIMEOUT: Duration = Duration::from_millis(200);
const READER_CHECK_INTERVAL: Duration = Duration::from_millis(5);

/// The data service of one shard.
#[derive(Clone, Debug)]
pub(crate) struct DataService {
    pub(crate) node: Arc<Node>,
}

#[tonic::async_trait]
impl Data for DataService {
    type ExchangeStream = Answers;

    async fn exchange(
        &self,
        request: tonic::Request<Streaming<pb::Frame>>,
    ) -> Result<tonic::Response<Self::ExchangeStream>, Status> {
        let peer = Peer::of(&request)?;
        let shared = StreamState::new(self.node.shard.meter(), &peer.budget, false)
            .map_err(|error| convert::status(&self.node.sign(error)))?;
        let (measures, medium) = (self.node.measures.clone(), peer.medium);
        let stream = Exchange::open(&self.node, peer, shared.clone(), request.metadata());
        let stream = stream.map_err(|error| convert::status(&self.node.sign(error)))?;
        let (answers, queue) = channel(MAX_OWED_ANSWERS);
        let frames = FrameSource::Foreign(Box::new(request.into_inner()));
        tokio::spawn(async move { stream.serve(frames, answers).await });
        Ok(tonic::Response::new(Answers { queue, shared, measures, medium }))
    }
}

/// Source of a stream's frames.
pub(crate) enum FrameSource {
    Foreign(Box<Streaming<pb::Frame>>),
    Native(Messages, Spin, PollCycle),
}

impl FrameSource {
    async fn next(&mut self, budget: &MemoryBudget) -> Result<Option<pb::Frame>, Status> {
        match self {
            Self::Foreign(frames) => frames.message().await,
            Self::Native(frames, ..) if budget.waits_for_disk() => poll_fn(|cx| frames.poll_next(cx)).await,
            Self::Native(frames, spin, cycle) => {
                spin.wait(poll_fn(|cx| frames.poll_next(cx)), cycle.pace()).await
            }
        }
    }
}

/// One stream.
#[derive(Clone)]
pub(crate) struct Exchange {
    node: Arc<Node>,
    /// Each frame must be of a session that is the caller's own.
    caller: Arc<Caller>,
    shared: Arc<StreamState>,
}

fn owed(frame: pb::Frame) -> Owed {
    Owed::Frame(Box::new(frame))
}

fn tag_of(frame: &pb::Frame) -> u64 {
    frame.header.as_ref().map_or(0, |header| header.tag)
}

/// Fails unless a slice has the group and dtype of a request.
fn fits(slice: &Slice, route: Route, dtype: Option<DType>) -> Result<()> {
    if slice.group() != route.group {
        return Err(Error::new(Kind::Frame, "the slice belongs to another group")
            .expected(format!("group {}", slice.group()), format!("group {}", route.group)));
    }
    dtype.map_or(Ok(()), |dtype| fits_dtype(slice, dtype))
}

fn fits_dtype(slice: &Slice, dtype: DType) -> Result<()> {
    if dtype != slice.spec().dtype {
        return Err(Error::new(Kind::DType, "the tensor has another dtype")
            .expected(slice.spec().dtype.name(), dtype.name()));
    }
    Ok(())
}

impl Exchange {
    /// A stream with these headers, if its caller may open one.
    pub(crate) fn open(
        node: &Arc<Node>,
        peer: Peer,
        shared: Arc<StreamState>,
        metadata: &MetadataMap,
    ) -> Result<Self> {
        let role = pb::Frame::ROLE;
        let known = node.security.access.admit(peer.origin(), metadata.as_ref(), role)?;
        peer.authenticated();
        node.security.access.watch(&known, &shared);
        let mut caller = Caller::new(peer, &known, metadata);
        caller.budget = node.security.budgets.of(&known.principal);
        if let Some(budget) = &caller.budget {
            // A stream counts as a call.
            budget.charge(Account::Calls, 0, Instant::now())?;
        }
        Ok(Self { node: node.clone(), caller: Arc::new(caller), shared })
    }

    /// Returns whether the caller may read all values.
    pub(crate) fn reads_everything(&self) -> bool {
        self.caller.principal.scope.is_everything()
    }

    /// Reads and answers until either side ends the stream.
    pub(crate) async fn serve(&self, frames: FrameSource, answers: Sender<QueuedAnswer>) {
        tokio::select! {
            () = self.shared.was_reset() => {}
            () = self.answer(frames, answers) => {}
        }
    }

    async fn answer(&self, mut frames: FrameSource, answers: Sender<QueuedAnswer>) {
        let mut phase = self.node.phase.clone();
        loop {
            let next = async {
                let permit = answers.clone().reserve_owned().await.ok()?;
                if let Some(budget) = &self.caller.budget {
                    sleep(budget.owes(Instant::now())).await;
                }
                let frame = frames.next(&self.caller.peer.budget).await;
                Some((AnswerSlot::new(permit, &self.caller.peer.budget), frame))
            };
            let (slot, frame) = tokio::select! {
                // Ending our side of the stream lets the connection close gracefully.
                _ = phase.wait_for(|phase| *phase >= Phase::Stopping) => return,
                next = next => match next {
                    Some(next) => next,
                    None => return,
                },
            };
            match frame {
                Ok(Some(frame)) => {
                    reach("decoded");
                    match self.pace(&frame).await {
                        Ok(()) => self.handle(&frame, slot).await,
                        Err(error) => self.refuse(slot, tag_of(&frame), error),
                    }
                }
                Ok(None) => return,
                // The message is too large or no frame: nothing after it can be read.
                Err(status) => {
                    slot.send(Err(convert::unreadable(status, self.node.index())));
                    return;
                }
            }
        }
    }

    /// Waits until the principal's rate has room for the frame; later ones are not read meanwhile.
    async fn pace(&self, frame: &pb::Frame) -> Result<()> {
        let Some(budget) = self.caller.budget.as_ref().filter(|budget| budget.has_rates()) else {
            return Ok(());
        };
        sleep(budget.charge(Account::Frames, frame.encoded_len() as u64, Instant::now())?).await;
        Ok(())
    }

    async fn handle(&self, frame: &pb::Frame, slot: AnswerSlot) {
        ConnectionCounters::count(&self.node.counters.frames);
        self.node.measures.received(frame, self.caller.peer.medium);
        let asked = OpenRequest::now(frame);
        let slot = slot.to(asked);
        let tag = tag_of(frame);
        match self.admit(frame, asked.at) {
            Ok((request, ack)) => {
                let changes = request.verb.changes();
                if changes {
                    self.node.gate.pass().await;
                    self.node.files.wait_for_space().await;
                    // The session may have ended during the wait, and the slices forgotten the client.
                    if let Err(error) = self.sign_of_life(request.route.client, Instant::now()) {
                        return self.refuse(slot, tag, self.named(frame, error));
                    }
                }
                let until = self.until(&request.verb, ack);
                if !matches!(until, Until::Now) {
                    self.caller.peer.budget.wait_for_disk();
                }
                self.perform(&request, slot.after(until)).await;
            }
            Err(error) => self.refuse(slot, tag, self.named(frame, error)),
        }
    }

    /// What an answer waits for. Initial values are part of a registration, which waits for them. With a copy of the
    /// log, all that is no gradient waits for it: clients and other shards rely on that, whatever their receipts
    /// promise. Portions are in no log.
    fn until(&self, verb: &Verb<'_>, ack: Ack) -> Until {
        let files = &self.node.files;
        let is_logged = verb.changes() && !verb.is_initial() && !matches!(verb, Verb::Portion { .. });
        let Some(journal) = files.journal().filter(|_| is_logged) else { return Until::Now };
        let copies = files.log_copy().is_some();
        match ack {
            Ack::Copied if copies => {
                let files = files.clone();
                Until::Kept(Box::new(move |then| files.when_kept(files.position(), then)))
            }
            _ if copies && !verb.is_gradient() => {
                let files = files.clone();
                let when: When = Box::new(move |then| files.when_copied(files.position(), then));
                Until::Copied(journal.clone(), ack, when)
            }
            Ack::Logged | Ack::Copied => Until::Durable(journal.clone()),
            Ack::Applied => Until::Now,
        }
    }

    /// Adds to the error the name of the frame's tensor, if the frame can be read that far.
    fn named(&self, frame: &pb::Frame, error: Error) -> Error {
        let slice = frame.header.as_ref().map(|header| SliceId(header.slice));
        match slice.and_then(|slice| self.slice(slice).ok()) {
            Some(slice) if error.tensor.is_none() => error.tensor(slice.spec().name.clone()),
            _ => error,
        }
    }

    /// Validates a frame before it touches a slice. Returns what its answer promises.
    fn admit<'a>(&self, frame: &'a pb::Frame, now: Instant) -> Result<(Request<'a>, Ack)> {
        let node = &self.node;
        node.check_serving()?;
        self.caller.peer.note_answered();
        let request = convert::request_from_frame(frame)?;
        let client = request.route.client;
        let kind = frame.header.as_ref().map_or(pb::Kind::Unspecified, pb::Header::kind);
        self.caller.principal.authorize(role_of(kind))?;
        let asked = self.sign_of_life(client, now)?;
        let ack = match request.verb {
            // Coordinators rely on their commands. Portions are in no log.
            Verb::Run(_) => asked.max(Ack::Logged).min(node.files.strongest_ack()),
            Verb::Portion { .. } => Ack::Applied,
            _ => asked,
        };
        if matches!(request.verb, Verb::Push { .. } | Verb::PushParts(..) | Verb::Run(_)) {
            node.files.check_room()?;
            node.files.check(ack)?;
        }
        Node::check_epoch(request.route.epoch)?;
        match request.verb {
            // Each part is admitted separately.
            Verb::PushParts(..) | Verb::PullParts(_) | Verb::PullVersions(_) | Verb::Run(_) => {}
            Verb::Portion { dtype, .. } => {
                self.admit_to(request.slice, request.route, Some(dtype))?;
            }
            Verb::Push { dtype, reservation, .. } => {
                let slice = self.admit_to(request.slice, request.route, Some(dtype))?;
                self.admit_reserved(&slice, reservation, client, now)?;
            }
            // The outcome of an initial assignment may be asked in every state of its reservation.
            Verb::Resolve(_) => {
                self.admit_to(request.slice, request.route, None)?;
            }
            Verb::Pull { .. } | Verb::PullState | Verb::PullVersion | Verb::PullVector(_) => {
                let slice = self.admit_to(request.slice, request.route, None)?;
                self.admit_reserved(&slice, None, client, now)?;
            }
        }
        Ok((request, ack))
    }

    /// Renews the client's lease. Returns what its receipts promise.
    pub(super) fn sign_of_life(&self, client: u64, now: Instant) -> Result<Ack> {
        self.node.sessions.admit(client, self.caller.proof(), now)
    }

    /// A slice within the scope of the caller; another one is answered as unknown.
    fn slice(&self, id: SliceId) -> Result<Arc<Slice>> {
        let slice = self.node.shard.slice(id)?;
        if self.caller.may_use(&slice) { Ok(slice) } else { Err(self.node.shard.no_slice(id)) }
    }

    /// Checks a request against its slice.
    fn admit_to(&self, slice: SliceId, route: Route, dtype: Option<DType>) -> Result<Arc<Slice>> {
        let slice = self.slice(slice)?;
        fits(&slice, route, dtype).map_err(|error| error.tensor(slice.spec().name.clone()))?;
        Ok(slice)
    }

    /// Checks a request against its slice's reservation.
    fn admit_reserved(&self, slice: &Slice, given: Option<u64>, client: u64, now: Instant) -> Result<()> {
        let admitted = self.node.reservations.admit(slice.id(), given, client, now);
        admitted.map_err(|error| error.tensor(slice.spec().name.clone()))
    }

    async fn perform(&self, request: &Request<'_>, slot: AnswerSlot) {
        let Request { tag, slice, .. } = *request;
        let Route { client, group, .. } = request.route;
        let shard = &self.node.shard;
        if request.verb.is_gradient() {
            self.node.sessions.note_gradient(client, group);
        }
        match request.verb {
            Verb::Push { push, want_values: true, .. } => self.push_pull(tag, &push, slot).await,
            Verb::Push { push, reservation, .. } => self.push(tag, &push, reservation, slot).await,
            Verb::PushParts(parts, dtype) => self.push_parts(tag, request.route, &parts, dtype, slot).await,
            Verb::PullParts(parts) => self.pull_parts(tag, request.route, &parts, slot).await,
            Verb::Pull { average, bfloat16 } => {
                let as_is = || {
                    if average { shard.pull_average(client, slice) } else { shard.pull(client, slice) }
                };
                let pull = || if bfloat16 { shard.in_bfloat16(slice, as_is()?) } else { as_is() };
                self.answer_values(slot, tag, None, pull).await;
            }
            Verb::PullState => {
                self.answer_values(slot, tag, None, || shard.pull_state(client, slice)).await;
            }
            Verb::PullVersion => match shard.slice(slice) {
                Ok(slice) => {
                    slot.send(Ok(owed(convert::version(tag, slice.version(client)))));
                }
                Err(error) => self.refuse(slot, tag, error),
            },
            Verb::PullVersions(parts) => self.pull_versions(tag, request.route, &parts, slot).await,
            Verb::Resolve(identity) => self.resolve(tag, slice, identity, slot),
            Verb::Run(run) => self.run_program(tag, request.route, run, slot).await,
            Verb::PullVector(VectorRead { space, index, batch }) => {
                let pull = || shard.slice(slice)?.pull_vector(client, space, index, batch);
                self.answer_values(slot, tag, None, pull).await;
            }
            Verb::Portion { of, count, body, .. } => {
                self.push_portion((tag, slice, request.route), of, (count, body), slot);
            }
        }
    }

    /// Answers with the outcome of a push; for a gradient that waits for others, once it is known.
    fn resolve(&self, tag: u64, slice: SliceId, identity: Identity, slot: AnswerSlot) {
        let stream = self.clone();
        let mut slot = Some(slot);
        let later = || -> Completion {
            let slot = slot.take();
            Box::new(move |_| {
                if let Some(slot) = slot {
                    let resolved = stream.node.shard.resolve(slice, identity);
                    stream.answer_resolved(tag, resolved, slot);
                }
            })
        };
        let resolved = self.node.shard.resolve_later(slice, identity, later);
        if let (Some(resolved), Some(slot)) = (resolved, slot) {
            self.answer_resolved(tag, resolved, slot);
        }
    }

    fn answer_resolved(&self, tag: u64, resolved: Result<Resolved>, slot: AnswerSlot) {
        match resolved {
            Ok(Resolved::Applied(applied)) => {
                slot.into_receipt().send(Ok(owed(convert::receipt(tag, &applied.repeated()))));
            }
            Ok(Resolved::Fenced) => slot.send(Ok(owed(convert::fenced(tag)))),
            Ok(Resolved::Unknown) => {
                let error = Error::new(Kind::UnknownOutcome, "the slice does not remember that far back");
                self.refuse(slot, tag, error);
            }
            Err(error) => self.refuse(slot, tag, error),
        }
    }

    /// Answers with values, once the connection has a pin for them.
    async fn answer_values(
        &self,
        slot: AnswerSlot,
        tag: u64,
        applied: Option<Applied>,
        pull: impl Fn() -> Result<Snapshot>,
    ) {
        let permit = match self.pin().await {
            Ok(permit) => permit,
            Err(error) => return self.refuse(slot, tag, error),
        };
        let mut begin = None;
        loop {
            let pulled = pull().and_then(|snapshot| {
                self.shared.reserve_encoded(snapshot.as_ref().len())?;
                Ok(snapshot)
            });
            match pulled {
                Ok(snapshot) => {
                    self.charge_pulled(&snapshot);
                    let pin = self.node.pins.add(snapshot, &self.shared, permit);
                    slot.send(Ok(Owed::Values { tag, applied, pin }));
                    return;
                }
                Err(error) if applied.is_none() => return self.refuse(slot, tag, error),
                // The push was applied, so its answer may not be a refusal.
                Err(error) if begin.get_or_insert_with(Instant::now).elapsed() >= READER_TIMEOUT => {
                    slot.send(Err(convert::status(&self.node.sign(error))));
                    return;
                }
                Err(_) => tokio::time::sleep(READER_CHECK_INTERVAL).await,
            }
        }
    }

    /// Charges values to the caller's budget: its streams read on once they are paid for.
    fn charge_pulled(&self, values: &Snapshot) {
        if let Some(budget) = &self.caller.budget {
            budget.charge_past(Account::Pulls, values.as_ref().len() as u64, Instant::now());
        }
    }

    /// One of the connection's pins.
    async fn pin(&self) -> Result<OwnedSemaphorePermit> {
        let closed = |_| Error::new(Kind::Internal, "the connection's pins are closed");
        self.caller.peer.pins.clone().acquire_owned().await.map_err(closed)
    }

    fn refuse(&self, slot: AnswerSlot, tag: u64, error: Error) {
        self.node.measures.refused(error.kind);
        slot.send_now(Ok(owed(convert::refused(tag, &self.node.sign(error)))));
    }
}
