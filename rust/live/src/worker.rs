//! One worker: the steps of `fastps.Worker` in each mode, on a shard. It never waits: a completion receives
//! each answer.

use crate::server::{GROUP, Server, gradient};
use crate::settings::{Settings, Training};
use fastps_core::codec::{Codec, ErrorFeedback, Position};
use fastps_core::error::{Error, Kind, Result};
use fastps_core::frame::{Applied, Base, Identity, Push};
use fastps_core::group::Advanced;
use fastps_core::identity::Completion;
use fastps_core::local_step::local_step;
use fastps_core::mode::{Clocks, MembershipRequest, Mode};
use std::collections::VecDeque;
use std::sync::{Arc, Mutex, PoisonError};

/// Outcome of a step.
#[derive(Debug, Default)]
pub(crate) struct Ack {
    /// Changes by others since the values of the gradient; the largest of the tensors.
    pub(crate) staleness: Option<u64>,
    /// The smallest factor that the server put on the gradient; `None` if nothing was applied.
    pub(crate) scale: Option<f32>,
    /// Bytes of the encoded gradients.
    pub(crate) bytes: u64,
    /// The version that the gradient made; the largest of the tensors.
    pub(crate) version: u64,
    /// Error of a refused part; then the four fields above are meaningless.
    pub(crate) refused: Option<Error>,
}

/// The answer to one call, once it arrives.
type Answer<T> = Arc<Mutex<Option<Result<T>>>>;

fn taken<T>(answer: &Answer<T>) -> Option<Result<T>> {
    answer.lock().unwrap_or_else(PoisonError::into_inner).take()
}

/// A part of a push: the answer of one tensor, and the gradient sent.
struct Part {
    tensor: usize,
    answer: Answer<Applied>,
    body: Vec<u8>,
}

/// A worker's phase in a warm start.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Warm {
    /// It waits for the end.
    Waits,
    /// It is the only one that trains.
    Leads,
    /// There is no warm start, or it is over.
    Over,
}

/// A client that computes gradients at its own copy of the values.
pub(crate) struct Worker {
    client: u64,
    sequence: u64,
    seat: MembershipRequest,
    training: Training,
    warm: Warm,
    /// Its copy of the values, which is stale.
    pub(crate) values: Vec<f32>,
    /// The versions of these values.
    pub(crate) installed: Vec<Base>,
    /// Fetches under way, each with the step after which it is installed.
    fetches: VecDeque<(u64, Vec<f32>, Vec<Base>)>,
    steps: u64,
    /// Its clock in the group.
    clock: u64,
    /// The gradients of local steps since the last push, and the versions that the first was computed at.
    sum: Vec<f32>,
    sum_base: Option<Vec<Base>>,
    feedback: ErrorFeedback,
    under_way: Vec<Part>,
    /// The answer to its report of a step, for modes in which others wait.
    reported: Option<Answer<Clocks>>,
    ack: Ack,
    /// Learning rate instead of the optimizer's.
    pub(crate) lr: Option<f64>,
}

impl Worker {
    /// Joins the group of the tensors, as a new client.
    pub(crate) fn join(server: &mut Server, settings: &Settings, index: usize) -> Result<Self> {
        let client = server.admit();
        let mode = match settings.training {
            Training::WarmStart(steps) => Mode::WarmStart { steps },
            other => other.group(),
        };
        let seat = MembershipRequest::new(mode, Some(index as u32), format!("worker {index}"));
        let shard = &server.shard;
        let joined = shard.join(GROUP, client, &seat);
        let joined = joined.inspect_err(|_| shard.forget_client(client))?;
        let mut worker = Self {
            client,
            sequence: 0,
            seat,
            training: settings.training,
            warm: Warm::Over,
            values: vec![0.0; server.len()],
            installed: Vec::new(),
            fetches: VecDeque::new(),
            steps: 0,
            clock: joined.clock,
            sum: vec![0.0; server.len()],
            sum_base: None,
            feedback: ErrorFeedback::new(),
            under_way: Vec::new(),
            reported: None,
            ack: Ack::default(),
            lr: None,
        };
        if let Training::WarmStart(_) = settings.training {
            worker.warm = Warm::Waits;
            worker.end_or_lead(server)?;
        }
        worker.fetch(server)?;
        Ok(worker)
    }

    /// Leaves its group and ends its session; nothing more is pushed.
    pub(crate) fn leave(self, server: &Server) {
        for warm in [true, false] {
            server.shard.leave(GROUP, self.client, warm);
        }
        server.shard.forget_client(self.client);
    }

    /// The norm of the residual of error feedback; `None` without one.
    pub(crate) fn residual(&mut self, server: &Server, settings: &Settings) -> Option<f64> {
        if !feeds_back(settings) {
            return None;
        }
        let mut sum = 0.0;
        for tensor in &server.tensors {
            let residual = self.feedback.residual(tensor.name(), tensor.slice.len()).ok()?;
            sum += residual.iter().map(|r| f64::from(*r) * f64::from(*r)).sum::<f64>();
        }
        Some(libm::sqrt(sum))
    }

    // -- a step ---------------------------------------------------------------------------------------------

    /// Takes a step with a gradient that no other worker has to follow: pushes and fetches as the mode
    /// requires.
    pub(crate) fn step(&mut self, server: &Server, settings: &Settings, gradient: &[f32]) -> Result<Ack> {
        self.ack = Ack::default();
        if let Training::Local { push_every, pull_every, lr, overlap } = self.training {
            return self.local_step(server, settings, gradient, (push_every, pull_every, lr, overlap));
        }
        self.steps += 1;
        let correction = if self.warm == Warm::Leads { Some(ALONE) } else { settings.correction };
        self.push(server, settings, gradient, &self.installed.clone(), correction)?;
        self.finish(server, settings)?;
        self.fetch(server)?;
        if self.warm == Warm::Leads {
            self.stepped_alone(server)?;
        }
        Ok(std::mem::take(&mut self.ack))
    }

    fn local_step(
        &mut self,
        server: &Server,
        settings: &Settings,
        gradient: &[f32],
        (push_every, pull_every, lr, overlap): (u64, u64, f64, bool),
    ) -> Result<Ack> {
        self.check_finite(server, gradient, false)?;
        let first = self.sum_base.is_none();
        local_step(server.isa, &mut self.values, &mut self.sum, gradient, lr, first);
        let base = self.sum_base.get_or_insert_with(|| self.installed.clone()).clone();
        self.steps += 1;
        let fetches = self.steps.is_multiple_of(pull_every);
        let mut pushed = Ok(());
        if self.steps.is_multiple_of(push_every) {
            self.sum_base = None;
            let sum = std::mem::take(&mut self.sum);
            pushed =
                self.push(server, settings, &sum, &base, None).and_then(|()| self.finish(server, settings));
            self.sum = sum;
        }
        if fetches && overlap {
            let mut values = vec![0.0; server.len()];
            let versions = server.pull(self.client, &mut values)?;
            self.fetches.push_back((self.steps + pull_every, values, versions));
        } else if fetches {
            self.fetch(server)?;
        }
        while self.fetches.front().is_some_and(|(due, ..)| *due <= self.steps) {
            if let Some((_, values, versions)) = self.fetches.pop_front() {
                (self.values, self.installed) = (values, versions);
            }
        }
        pushed.map(|()| std::mem::take(&mut self.ack))
    }

    /// Pushes a gradient, and reports the step, for which others may wait.
    pub(crate) fn begin(&mut self, server: &Server, settings: &Settings, gradient: &[f32]) -> Result<()> {
        self.ack = Ack::default();
        self.push(server, settings, gradient, &self.installed.clone(), None)?;
        self.steps += 1;
        if let Training::Together(Mode::Bounded { .. }) = self.training {
            self.clock += 1;
            self.reported = Some(self.advance(server, false));
        }
        Ok(())
    }

    /// Returns whether the worker no longer has to wait: `end`, or its first step, may follow.
    pub(crate) fn ready(&mut self, server: &Server) -> Result<bool> {
        if self.warm == Warm::Waits {
            let over = self.end_or_lead(server)?;
            if over {
                self.fetch(server)?;
            }
            return Ok(over);
        }
        if !self.is_answered() {
            return Ok(false);
        }
        let Some(report) = &self.reported else { return Ok(true) };
        match taken(report) {
            None => Ok(false),
            Some(clocks) => {
                self.reported = None;
                clocks.map(|_| true)
            }
        }
    }

    /// Returns whether all parts of the push under way are answered.
    fn is_answered(&self) -> bool {
        let answered = |part: &Part| part.answer.lock().unwrap_or_else(PoisonError::into_inner).is_some();
        self.under_way.iter().all(answered)
    }

    /// Outcome of the push under way of a worker that will not end its step; `None` if nothing was applied.
    pub(crate) fn acknowledged(&mut self, server: &Server, settings: &Settings) -> Option<Ack> {
        if self.under_way.is_empty() || !self.is_answered() {
            return None;
        }
        self.ack = Ack::default();
        self.finish(server, settings).ok()?;
        Some(std::mem::take(&mut self.ack))
    }

    /// Ends a step whose wait is over, and fetches.
    pub(crate) fn end(&mut self, server: &Server, settings: &Settings) -> Result<Ack> {
        self.finish(server, settings)?;
        self.fetch(server)?;
        Ok(std::mem::take(&mut self.ack))
    }

    // -- pushes and fetches ---------------------------------------------------------------------------------

    fn fetch(&mut self, server: &Server) -> Result<()> {
        self.installed = server.pull(self.client, &mut self.values)?;
        Ok(())
    }

    /// Fails unless all values, and their sums with the residual, are finite, as in the product.
    fn check_finite(&mut self, server: &Server, gradient: &[f32], with_residual: bool) -> Result<()> {
        for tensor in &server.tensors {
            let values = &gradient[tensor.range.clone()];
            let residual = if with_residual {
                Some(&*self.feedback.residual(tensor.name(), values.len())?)
            } else {
                None
            };
            fastps_core::finite::check(server.isa, values, residual)
                .map_err(|error| error.tensor(tensor.name().clone()))?;
        }
        Ok(())
    }

    /// Sends a gradient to all tensors. Fails, before sending any, if it is not finite.
    fn push(
        &mut self,
        server: &Server,
        settings: &Settings,
        values: &[f32],
        base: &[Base],
        correction: Option<fastps_core::correction::Correction>,
    ) -> Result<()> {
        let (codec, feeds_back) = (settings.codec, feeds_back(settings));
        self.check_finite(server, values, feeds_back)?;
        self.sequence += 1;
        let identity = Identity { client: self.client, sequence: self.sequence };
        for (k, tensor) in server.tensors.iter().enumerate() {
            let values = &values[tensor.range.clone()];
            let residual =
                if feeds_back { Some(self.feedback.residual(tensor.name(), values.len())?) } else { None };
            let mut body = Vec::new();
            let position = Position { first_element: 0, sequence: self.sequence };
            codec.encode(server.isa, values, residual, position, &mut body);
            let push = Push {
                identity,
                base: Some(base[k]),
                lr: self.lr,
                correction,
                ..gradient(&tensor.slice, codec.id(), &body)
            };
            let answer = Answer::default();
            let late = answer.clone();
            let later = || -> Completion { Box::new(move |result| note(&late, result)) };
            if let Some(result) = server.shard.push_to(&tensor.slice, &push, later) {
                note(&answer, result);
            }
            self.under_way.push(Part { tensor: k, answer, body });
        }
        Ok(())
    }

    /// Takes the answers to the push under way. Stale gradients are dropped; other refusals return to the
    /// residual.
    fn finish(&mut self, server: &Server, settings: &Settings) -> Result<()> {
        let (mut ack, mut refused) = (Ack::default(), None);
        for part in std::mem::take(&mut self.under_way) {
            let Some(answer) = taken(&part.answer) else {
                return Err(Error::new(Kind::Internal, "a push was ended before its answer"));
            };
            match answer {
                Ok(applied) => {
                    ack.staleness = ack.staleness.max(applied.staleness);
                    ack.scale = Some(ack.scale.map_or(applied.scale, |scale| scale.min(applied.scale)));
                    ack.bytes += part.body.len() as u64;
                    ack.version = ack.version.max(applied.version);
                }
                Err(error) => {
                    let tensor = &server.tensors[part.tensor];
                    if error.kind != Kind::StalePush && feeds_back(settings) {
                        let (codec, n) = (settings.codec.id(), tensor.slice.len());
                        self.feedback.give_back(server.isa, tensor.name(), 0, codec, &part.body, n)?;
                    }
                    refused = refused.or(Some(error));
                }
            }
        }
        self.ack = if refused.is_some() { Ack { refused, ..Ack::default() } } else { ack };
        Ok(())
    }

    // -- others ---------------------------------------------------------------------------------------------

    fn advance(&self, server: &Server, warm: bool) -> Answer<Clocks> {
        let answer = Answer::default();
        let ack = answer.clone();
        let done: Advanced = Box::new(move |result| note(&ack, result));
        server.shard.groups().advance(GROUP, self.client, warm, self.clock, done);
        answer
    }

    /// Ends the warm start for this worker if it is over, or lets it lead; false while it waits.
    fn end_or_lead(&mut self, server: &Server) -> Result<bool> {
        let Some(clocks) = taken(&self.advance(server, true)) else { return Ok(false) };
        if clocks?.leads {
            self.warm = Warm::Leads;
        } else {
            self.end_warm_start(server)?;
        }
        Ok(true)
    }

    /// Counts a step of the warm start, which may end it.
    fn stepped_alone(&mut self, server: &Server) -> Result<()> {
        self.clock += 1;
        match taken(&self.advance(server, true)).transpose()? {
            Some(clocks) if !clocks.leads => self.end_warm_start(server),
            _ => Ok(()),
        }
    }

    fn end_warm_start(&mut self, server: &Server) -> Result<()> {
        let seat = MembershipRequest { mode: Mode::Free, ..self.seat.clone() };
        server.shard.join(GROUP, self.client, &seat)?;
        server.shard.leave(GROUP, self.client, true);
        (self.warm, self.training) = (Warm::Over, Training::Async);
        Ok(())
    }
}

/// The correction of the worker that leads a warm start: that of `fastps.Async()`.
const ALONE: fastps_core::correction::Correction = fastps_core::correction::Correction {
    delay_adaptive: true,
    max_staleness: None,
    reject: false,
    momentum_matching: false,
};

fn note<T>(answer: &Answer<T>, result: Result<T>) {
    *answer.lock().unwrap_or_else(PoisonError::into_inner) = Some(result);
}

/// Returns whether the codec's rounding errors are kept for the next push.
fn feeds_back(settings: &Settings) -> bool {
    settings.error_feedback && settings.codec != Codec::Float32
}
