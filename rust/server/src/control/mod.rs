//! The control service: checks every call, and passes it to the file of its subject.

mod batches;
pub(crate) mod deadline;
mod hello;
mod memberships;
mod portions;
mod register;
mod spaces;

use crate::auth::caller::Caller;
use crate::auth::peer::Peer;
use crate::cluster::node::{EPOCH, Node};
use crate::control::register::Described;
use crate::persistence::checkpoint::{Checkpoints, held_too_long};
use crate::persistence::gate::check_number;
use fastps_core::error::{Error, Kind, Result};
use fastps_core::mode::Clocks;
use fastps_core::tensor::{MAX_NAME, SliceId};
use fastps_durable::{Cut, Event};
use fastps_proto::NeedsRole;
use fastps_proto::v1 as pb;
use fastps_proto::v1::control_server::Control;
use fastps_transport::convert::{self, Ack, check_mark_name};
use serde_json::json;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::sync::oneshot;
use tonic::{Request, Response, Status};

/// Sessions that one answer to Stats lists.
const MAX_LISTED_SESSIONS: usize = 8192;

/// How long one call may wait for other workers.
const MAX_WORKER_WAIT: Duration = Duration::from_secs(20);

/// Pause between two looks at a version that a worker computes for.
const LOOK_EVERY: Duration = Duration::from_millis(100);

/// The control service of one shard.
#[derive(Clone, Debug)]
pub(crate) struct ControlService {
    pub(crate) node: Arc<Node>,
    /// Snapshots that were asked for.
    pub(crate) checkpoints: Arc<Checkpoints>,
}

/// Conditions of a call.
enum Conditions {
    /// Tells how this server is, also one that does not own its shard.
    Report,
    /// Works while the server drains, too.
    Look,
    /// Changes something: answered once that is copied (if the log is), as in all that follow but an opening.
    Change,
    /// Answered once the change is durable (if the server keeps a log).
    Lasting,
    /// A step of a registration: refused unless it can be made durable, since other shards rely on it, and copied
    /// (if the log is).
    Step,
    /// A step that a restart undoes: refused like the others, and not awaited.
    Opening,
}

/// Which client a request speaks for; 0: no particular one.
trait SpeaksFor {
    /// Set when the request carries the client's secret.
    const IS_HELLO: bool = false;

    fn client(&self) -> u64 {
        0
    }
}

macro_rules! speak_for_their_client {
    ($($request:ident)*) => {
        $(impl SpeaksFor for pb::$request {
            fn client(&self) -> u64 {
                self.client
            }
        })*
    };
}

speak_for_their_client! {
    RegisterRequest ReserveRequest CommitRequest JoinRequest LeaveRequest AdvanceRequest PortionRequest
    OpenSpaceRequest CloseSpaceRequest CoordinateRequest BatchRequest BatchPortionRequest
}
impl SpeaksFor for pb::HelloRequest {
    const IS_HELLO: bool = true;

    fn client(&self) -> u64 {
        self.client
    }
}
impl SpeaksFor for pb::GetMapRequest {}
impl SpeaksFor for pb::SealRequest {}
impl SpeaksFor for pb::SettleRequest {}
impl SpeaksFor for pb::UnregisterRequest {}
impl SpeaksFor for pb::DropRequest {}
impl SpeaksFor for pb::StatsRequest {}
impl SpeaksFor for pb::CheckpointRequest {}
impl SpeaksFor for pb::ListSpacesRequest {}
impl SpeaksFor for pb::HoldRequest {}
impl SpeaksFor for pb::MarkRequest {}

impl ControlService {
    /// The author of a call, if its role suffices.
    fn caller<Q: NeedsRole>(&self, request: &Request<Q>) -> Result<Caller> {
        let peer = Peer::of(request).map_err(|status| convert::error_from_status(&status))?;
        let metadata = request.metadata();
        let known = self.node.security.access.admit(peer.origin(), metadata.as_ref(), Q::ROLE)?;
        let mut caller = Caller::new(peer, &known, metadata);
        caller.budget = self.node.security.budgets.of(&known.principal);
        Ok(caller)
    }

    /// Checks the caller, and that the session for which it speaks is its own; makes the call, and names the
    /// shard in errors.
    async fn call<Q: SpeaksFor + NeedsRole, A>(
        &self,
        request: Request<Q>,
        conditions: Conditions,
        handle: impl FnOnce(&Node, &Caller, Q) -> Result<A>,
    ) -> Result<Response<A>, Status> {
        let meant = self.node.check_addressee(request.metadata());
        let caller = meant.and_then(|()| self.caller(&request));
        let message = request.into_inner();
        let allowed = caller.and_then(|caller| {
            if !matches!(conditions, Conditions::Report) {
                self.node.check_owner()?;
                // Should another server own the shard when the answer leaves, the connection is ended instead.
                caller.peer.note_answered();
            }
            if !Q::IS_HELLO {
                self.node.sessions.check(message.client(), caller.proof())?;
            }
            match conditions {
                Conditions::Report | Conditions::Look => {}
                Conditions::Change | Conditions::Lasting => self.node.check_serving()?,
                Conditions::Step | Conditions::Opening => {
                    self.node.check_serving().and_then(|()| self.node.files.check_steps())?;
                }
            }
            Ok(caller)
        });
        let files = &self.node.files;
        let before = files.position();
        let mut answer = allowed.and_then(|caller| handle(&self.node, &caller, message));
        let after = files.position();
        match conditions {
            Conditions::Lasting if after != before => {
                let _ = files.durable_to(after).await;
            }
            // A repeat also waits for the first.
            Conditions::Step if answer.is_ok() => answer = files.safe_to(files.steps()).await.and(answer),
            Conditions::Report
            | Conditions::Look
            | Conditions::Change
            | Conditions::Lasting
            | Conditions::Step
            | Conditions::Opening => {}
        }
        if answer.is_ok() && after != before && !matches!(conditions, Conditions::Opening) {
            answer = files.copied_to(after).await.and(answer);
        }
        answer.map(Response::new).map_err(|error| convert::status(&self.node.sign(error)))
    }

    /// Asks shard 0 for facts that the call needs, if the caller may make it.
    async fn ask_coordinator<Q: SpeaksFor + NeedsRole>(
        &self,
        request: &Request<Q>,
        question: Option<pb::SettleRequest>,
    ) -> Result<Option<pb::SettleResponse>> {
        let Some(question) = question else { return Ok(None) };
        let caller = self.caller(request)?;
        let client = request.get_ref().client();
        self.node.check_serving()?;
        if client != 0 {
            self.node.sessions.admit(client, caller.proof(), Instant::now())?;
        }
        self.node.ask_coordinator_for(question).await.map(Some)
    }

    /// Waits until a version goes on without a worker that computes for it.
    async fn await_quorum(
        &self,
        request: Request<pb::AdvanceRequest>,
    ) -> Result<Response<pb::AdvanceResponse>, Status> {
        let asked = self.call(request, Conditions::Change, |_, _, m| Ok(m)).await?.into_inner();
        let pb::AdvanceRequest { client, group, slice, base_version, wait_ms, .. } = asked;
        let slice = SliceId(slice.unwrap_or_default());
        let until = Instant::now() + Duration::from_millis(wait_ms.into()).min(MAX_WORKER_WAIT);
        loop {
            let ready = self.node.shard.goes_on_without(group, slice, client, base_version);
            let ready = ready.map_err(|error| convert::status(&self.node.sign(error)))?;
            if ready || Instant::now() >= until {
                return Ok(Response::new(pb::AdvanceResponse { ready, ..Default::default() }));
            }
            tokio::time::sleep(LOOK_EVERY).await;
        }
    }

    /// An answer that names tensors, once the log is safe up to this position: a restart, and who takes the shard
    /// over, must know them all.
    async fn once_safe<A>(&self, answer: Response<(A, u64)>) -> Result<Response<A>, Status> {
        let (answer, position) = answer.into_inner();
        let safe = self.node.files.safe_to(position).await;
        let failed = |error: Error| convert::status(&self.node.sign(error));
        safe.map(|()| Response::new(answer)).map_err(failed)
    }
}

#[tonic::async_trait]
impl Control for ControlService {
    async fn hello(&self, request: Request<pb::HelloRequest>) -> Result<Response<pb::HelloResponse>, Status> {
        // A restart must remember which clients' pushes wait for the disk.
        let ack = Ack::from_wire(request.get_ref().ack);
        let conditions =
            if matches!(ack, Ok(Ack::Applied) | Err(_)) { Conditions::Change } else { Conditions::Lasting };
        let client = request.get_ref().client;
        let answer = self.call(request, conditions, |node, by, m| hello::greet(node, by, &m, ack)).await?;
        // A repeat also waits for the first: a session of which a taker of the shard would know nothing would lose
        // pushes without a word.
        let copied = self.node.files.copied_to(self.node.sessions.beginning(client)).await;
        copied.map(|()| answer).map_err(|error| convert::status(&self.node.sign(error)))
    }

    async fn get_map(
        &self,
        request: Request<pb::GetMapRequest>,
    ) -> Result<Response<pb::GetMapResponse>, Status> {
        let page = self.call(request, Conditions::Look, |node, by, m| {
            let owners = if m.after.is_empty() { node.owners() } else { Vec::new() };
            let mut map = node.map()?;
            let (entries, next) = map.page(&m.names, &m.after, m.page_size as usize, &by.principal.scope);
            Ok((pb::GetMapResponse { epoch: EPOCH, entries, next, owners }, map.noted()))
        });
        self.once_safe(page.await?).await
    }

    async fn register(
        &self,
        request: Request<pb::RegisterRequest>,
    ) -> Result<Response<pb::RegisterResponse>, Status> {
        let registered =
            self.call(request, Conditions::Change, |node, by, m| register::register(node, by, &m));
        self.once_safe(registered.await?).await
    }

    async fn reserve(
        &self,
        request: Request<pb::ReserveRequest>,
    ) -> Result<Response<pb::ReserveResponse>, Status> {
        let question = register::to_reserve(&self.node, request.get_ref());
        let asked = question.as_ref().map(|question| question.describe_each.clone()).unwrap_or_default();
        let first = Described::new(&asked, self.ask_coordinator(&request, question).await);
        self.call(request, Conditions::Opening, |node, by, m| register::reserve(node, by, m, first)).await
    }

    async fn seal(&self, request: Request<pb::SealRequest>) -> Result<Response<pb::SealResponse>, Status> {
        self.call(request, Conditions::Step, register::seal).await
    }

    async fn commit(
        &self,
        request: Request<pb::CommitRequest>,
    ) -> Result<Response<pb::CommitResponse>, Status> {
        self.call(request, Conditions::Step, register::commit).await
    }

    async fn settle(
        &self,
        request: Request<pb::SettleRequest>,
    ) -> Result<Response<pb::SettleResponse>, Status> {
        self.call(request, Conditions::Step, |node, by, m| {
            by.check_unlimited()?;
            node.answer_settle(&m)
        })
        .await
    }

    async fn unregister(
        &self,
        request: Request<pb::UnregisterRequest>,
    ) -> Result<Response<pb::UnregisterResponse>, Status> {
        self.call(request, Conditions::Step, |node, by, m| register::unregister(node, by, &m)).await
    }

    async fn drop(
        &self,
        mut request: Request<pb::DropRequest>,
    ) -> Result<Response<pb::DropResponse>, Status> {
        if let Ok(by) = self.caller(&request) {
            request.get_mut().slices.retain(|slice| register::may_drop(&self.node, &by, *slice));
        }
        let question = register::to_drop(&self.node, request.get_ref());
        let first = self.ask_coordinator(&request, question).await;
        // No shard relies on it, and it frees memory: it needs no intact log.
        self.call(request, Conditions::Lasting, |node, by, m| register::drop(node, by, m, first)).await
    }

    async fn join(&self, request: Request<pb::JoinRequest>) -> Result<Response<pb::JoinResponse>, Status> {
        let group = request.get_ref().group;
        // Other shards than shard 0 may have no slices of the group, and do not decide on its mode.
        let asks = !self.node.is_coordinator() && memberships::is_new(&self.node, request.get_ref());
        let question =
            asks.then(|| pb::SettleRequest { groups: vec![group], binding_of: group, ..Default::default() });
        let first = self.ask_coordinator(&request, question).await;
        self.call(request, Conditions::Change, |node, by, m| memberships::join(node, by, m, first)).await
    }

    async fn leave(&self, request: Request<pb::LeaveRequest>) -> Result<Response<pb::LeaveResponse>, Status> {
        self.call(request, Conditions::Look, |node, _, m| {
            node.sessions.forget_gradients(m.client, m.group);
            if node.shard.leave(m.group, m.client, m.warm) {
                let name = node.sessions.name(m.client);
                tracing::info!(
                    shard = node.index(),
                    group = m.group,
                    worker = name,
                    "a worker left its group"
                );
                node.files.note(|| Event::Left { client: m.client, group: m.group, warm: m.warm });
            }
            Ok(pb::LeaveResponse {})
        })
        .await
    }

    async fn advance(
        &self,
        request: Request<pb::AdvanceRequest>,
    ) -> Result<Response<pb::AdvanceResponse>, Status> {
        let &pb::AdvanceRequest { client, group, warm, wait_ms, .. } = request.get_ref();
        if request.get_ref().slice.is_some() {
            return self.await_quorum(request).await;
        }
        let outcome = self.call(request, Conditions::Change, |node, _, m| {
            node.sessions.touch(m.client, Instant::now())?;
            let (done, outcome) = oneshot::channel();
            let done = Box::new(move |result| drop(done.send(result)));
            node.shard.groups().advance(m.group, m.client, m.warm, m.clock, done);
            Ok(outcome)
        });
        let wait = Duration::from_millis(u64::from(wait_ms)).min(MAX_WORKER_WAIT);
        let outcome = tokio::time::timeout(wait, outcome.await?.into_inner()).await;
        let clocks = match outcome {
            Ok(Ok(result)) => result.map(Some),
            Ok(Err(_)) => {
                Err(Error::new(Kind::Unavailable, "another call of this worker waits in its place"))
            }
            Err(_) => Ok(None),
        };
        let clocks = clocks.map_err(|error| convert::status(&self.node.sign(error)))?;
        Ok(Response::new(if let Some(Clocks { slowest, leads }) = clocks {
            pb::AdvanceResponse { ready: true, slowest, leads, behind: Vec::new() }
        } else {
            let behind = self.node.shard.groups().behind(group, client, warm);
            pb::AdvanceResponse { behind, ..pb::AdvanceResponse::default() }
        }))
    }

    async fn stats(&self, request: Request<pb::StatsRequest>) -> Result<Response<pb::StatsResponse>, Status> {
        self.call(request, Conditions::Report, |node, by, m| {
            let scope = &by.principal.scope;
            // A limited principal sees its own sessions only.
            let of = by.principal.name.as_ref().filter(|_| !scope.is_everything());
            let counters =
                node.counters().into_iter().map(|(name, value)| (name.to_owned(), value)).collect();
            let (versions, changed_ms_ago) = node.last_changes(&m.changed, scope);
            Ok(pb::StatsResponse {
                counters,
                sessions: node
                    .sessions
                    .list(Instant::now(), MAX_LISTED_SESSIONS, of)
                    .iter()
                    .map(convert::worker_state_to_wire)
                    .collect(),
                changed_ms_ago,
                versions,
                shard: node.index(),
                cluster: node.cluster.to_vec(),
                version: env!("CARGO_PKG_VERSION").to_owned(),
                trouble: node.trouble().unwrap_or_default(),
                insecure: node.security.insecure,
                groups: node.group_states(scope).iter().map(convert::group_state_to_wire).collect(),
                owners: node.owners(),
            })
        })
        .await
    }

    async fn portion(
        &self,
        request: Request<pb::PortionRequest>,
    ) -> Result<Response<pb::PortionResponse>, Status> {
        let asked = self.call(request, Conditions::Change, portions::ask).await?.into_inner();
        let answer = portions::answer(&self.node, asked).await.map(convert::given_to_wire);
        answer.map(Response::new).map_err(|error| convert::status(&self.node.sign(error)))
    }

    async fn open_space(
        &self,
        request: Request<pb::OpenSpaceRequest>,
    ) -> Result<Response<pb::OpenSpaceResponse>, Status> {
        let question = spaces::to_open(&self.node, request.get_ref());
        let first = self.ask_coordinator(&request, question).await;
        self.call(request, Conditions::Step, |node, by, m| spaces::open(node, by, m, first?)).await
    }

    async fn close_space(
        &self,
        request: Request<pb::CloseSpaceRequest>,
    ) -> Result<Response<pb::CloseSpaceResponse>, Status> {
        let question = spaces::to_close(&self.node, request.get_ref());
        let first = self.ask_coordinator(&request, question).await;
        // It frees memory, so it needs no intact log.
        self.call(request, Conditions::Lasting, |node, by, m| {
            node.sessions.touch(m.client, Instant::now())?;
            spaces::close(node, by, m.space, first?.as_ref())?;
            Ok(pb::CloseSpaceResponse {})
        })
        .await
    }

    async fn list_spaces(
        &self,
        request: Request<pb::ListSpacesRequest>,
    ) -> Result<Response<pb::ListSpacesResponse>, Status> {
        self.call(request, Conditions::Look, |node, by, m| spaces::page(node, by, &m.after)).await
    }

    async fn coordinate(
        &self,
        request: Request<pb::CoordinateRequest>,
    ) -> Result<Response<pb::CoordinateResponse>, Status> {
        self.call(request, Conditions::Step, spaces::coordinate).await
    }

    async fn batch(&self, request: Request<pb::BatchRequest>) -> Result<Response<pb::BatchResponse>, Status> {
        let asked = self.call(request, Conditions::Change, batches::ask_batch).await?.into_inner();
        let answer = batches::answer_batch(&self.node, asked).await;
        answer.map(Response::new).map_err(|error| convert::status(&self.node.sign(error)))
    }

    async fn batch_portion(
        &self,
        request: Request<pb::BatchPortionRequest>,
    ) -> Result<Response<pb::BatchPortionResponse>, Status> {
        let asked = self.call(request, Conditions::Change, batches::ask_portion).await?.into_inner();
        let answer = batches::answer_portion(&self.node, asked).await;
        answer.map(Response::new).map_err(|error| convert::status(&self.node.sign(error)))
    }

    async fn checkpoint(
        &self,
        request: Request<pb::CheckpointRequest>,
    ) -> Result<Response<pb::CheckpointResponse>, Status> {
        let asked = self.call(request, Conditions::Change, |node, by, asked| {
            by.check_unlimited()?;
            check_cut(&asked)?;
            node.audit(by, "checkpoint", json!({"group": asked.group}))?;
            Ok(asked)
        });
        let asked = asked.await?;
        let pb::CheckpointRequest { group, cut: id } = asked.into_inner();
        let cut = (!group.is_empty()).then_some(Cut { id, group });
        let taken = self.checkpoints.take(cut).await;
        let answer = taken.map(|summary| pb::CheckpointResponse {
            snapshot: summary.generation,
            path: summary.path.display().to_string(),
            bytes: summary.bytes,
            slices: summary.slices,
        });
        answer.map(Response::new).map_err(|error| convert::status(&self.node.sign(error)))
    }

    async fn hold(&self, request: Request<pb::HoldRequest>) -> Result<Response<pb::HoldResponse>, Status> {
        self.call(request, Conditions::Change, |node, by, pb::HoldRequest { cut, hold_ms }| {
            by.check_unlimited()?;
            node.audit(by, "hold", json!({"ms": hold_ms}))?;
            if hold_ms == 0 {
                node.gate.open(cut);
            } else {
                check_number(cut)?;
                node.files.check_can_cut()?;
                node.gate.close(cut, Duration::from_millis(u64::from(hold_ms)))?;
            }
            Ok(pb::HoldResponse {})
        })
        .await
    }

    async fn mark(&self, request: Request<pb::MarkRequest>) -> Result<Response<pb::MarkResponse>, Status> {
        let marked = self.call(request, Conditions::Change, |node, by, pb::MarkRequest { name, cut }| {
            by.check_unlimited()?;
            check_mark_name(&name)?;
            node.files.check_history()?;
            node.audit(by, "mark", json!({"name": name}))?;
            let marked = node.gate.open_after(cut, || node.files.mark(cut, &name));
            Ok((pb::MarkResponse {}, marked.unwrap_or_else(|| Err(held_too_long()))?))
        });
        self.once_safe(marked.await?).await
    }
}

fn check_cut(asked: &pb::CheckpointRequest) -> Result<()> {
    let pb::CheckpointRequest { group, cut } = asked;
    if group.is_empty() && *cut != 0 {
        return Err(Error::new(Kind::Config, "a cut needs a group").expected("a group, or no cut", cut));
    }
    if group.len() <= MAX_NAME {
        return Ok(());
    }
    let error = Error::new(Kind::Config, "the name of the group is too long");
    Err(error.expected(format!("at most {MAX_NAME} bytes"), group.len()))
}
