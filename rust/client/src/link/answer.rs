//! Delivers an answer from the stream to the call, or to the doubt, that waits for it.

use crate::link::call::{ArrivedValues, Call, CallPart, Outcome, PartAnswer};
use crate::link::pending::{Pending, Waiter};
use crate::link::queue::{Queue, SliceReport};
use crate::link::state::Link;
use crate::options::Ack;
use crate::state::doubt::Doubt;
use crate::state::runtime::lock;
use crate::state::stats;
use bytes::Bytes;
use fastps_core::error::{Error, Result};
use fastps_core::frame::Applied;
use fastps_core::verbs::Fate;
use fastps_proto::v1 as pb;
use fastps_transport::convert::{self, Retry, is_conclusive, retry};
use std::ops::Range;
use std::sync::{Arc, MutexGuard};
use std::time::Duration;

/// Least delay before a refused frame is sent again.
const SHORTEST_PAUSE: Duration = Duration::from_millis(10);

/// A frame that was answered, and the call that waits for its parts.
struct Answered<'a> {
    tag: u64,
    pending: Pending,
    call: &'a Arc<Call>,
    parts: Range<usize>,
}

/// Meaning of an answer for the parts of its frame.
enum Verdict {
    /// They were answered, with values if any were requested.
    Answered(PartAnswer, Option<Bytes>),
    /// They were certainly not applied.
    Refused(Error),
    /// They may have been applied.
    Unclear(Error),
    /// Nothing was changed: the frame waits for the next incarnation.
    SendAgain,
}

impl Link {
    /// Delivers an answer, whose values may be lent. An error means that the server violates the protocol.
    pub(crate) fn answer(self: &Arc<Self>, frame: pb::Frame, lent: bool) -> Result<()> {
        let (tag, answer) = convert::answer_from_frame(frame)?;
        let mut queue = lock(&self.queue);
        if let Some(doubts) = queue.late.remove(&tag) {
            settle_late(queue, &doubts, answer);
        } else if let Some(about) = queue.asked.remove(&tag) {
            self.answer_what_is_left(queue, &about, answer);
        } else if let Some(pending) = queue.frames.remove(tag) {
            match pending.waiter.clone() {
                Waiter::Doubt(doubt) => self.answer_doubt(queue, tag, pending, &doubt, answer),
                Waiter::Parts(call, parts) => {
                    self.answer_call(queue, Answered { tag, pending, call: &call, parts }, answer, lent);
                }
            }
        }
        // Otherwise it answers a pull whose call has ended.
        Ok(())
    }

    /// Delivers the answer to the question that settles a doubt.
    fn answer_doubt(
        self: &Arc<Self>,
        mut queue: MutexGuard<'_, Queue>,
        tag: u64,
        mut pending: Pending,
        doubt: &Doubt,
        answer: convert::Answer,
    ) {
        match answer {
            // Unsettled: the server is still applying it, is out of memory, or is stopping. The question
            // waits for the retry time, or for the next connection.
            convert::Answer::Refused(error)
                if matches!(retry(error.kind), Retry::Later | Retry::Capacity) =>
            {
                pending.attempts = 0;
                queue.frames.insert(tag, pending);
                if let Some(pause) = error.retry_after_ms {
                    self.send_again_after(Duration::from_millis(pause), tag, queue.session);
                }
                self.check_drained(&queue);
            }
            answer => {
                if let Some(report) = report_of(&pending.header, &answer) {
                    queue.keep(pending.header.slice, report);
                }
                self.check_drained(&queue);
                drop(queue);
                doubt.settle(fate(&answer));
            }
        }
    }

    /// Delivers the answer to a frame of a call.
    fn answer_call(
        self: &Arc<Self>,
        mut queue: MutexGuard<'_, Queue>,
        answered: Answered<'_>,
        answer: convert::Answer,
        lent: bool,
    ) {
        let Answered { pending, call, parts, .. } = &answered;
        self.note(&mut queue, pending, call.identified, &answer);
        let verdict = match answer {
            convert::Answer::Parts { outcomes, payload } if outcomes.len() == pending.header.parts.len() => {
                drop(queue);
                return self.answer_parts(pending, call, parts.clone(), outcomes, payload);
            }
            convert::Answer::Scalars { refusals, payload } if pending.header.kind() == pb::Kind::Vector => {
                drop(queue);
                let outcomes = scalar_outcomes(parts.len(), refusals);
                return self.answer_parts(pending, call, parts.clone(), outcomes, payload);
            }
            convert::Answer::Refused(error)
                if retry(error.kind) == Retry::Later && convert::passes(&error) =>
            {
                return self.wait_and_send_again(queue, answered, error);
            }
            convert::Answer::Refused(error) => {
                let error = self.refusal(&call.parts[parts.start], error);
                self.judge_refusal(&mut queue, pending, call.identified, error)
            }
            answer => judge(pending, &call.parts[parts.start], call.identified, answer),
        };
        self.conclude(queue, answered, verdict, lent);
    }

    /// Repeats a frame that a stopping or recovering server refused: it keeps its identity, and waits for the
    /// server's retry time or for the next connection, until the deadline of its call.
    fn wait_and_send_again(
        self: &Arc<Self>,
        mut queue: MutexGuard<'_, Queue>,
        answered: Answered<'_>,
        error: Error,
    ) {
        let Answered { tag, mut pending, .. } = answered;
        if pending.attempts == 1 || !pending.identified() {
            // Certainly not applied: treat it as unsent.
            (pending.attempts, pending.sender.client) = (0, 0);
        }
        let pause = Duration::from_millis(error.retry_after_ms.unwrap_or(0)).max(SHORTEST_PAUSE);
        pending.refused = Some(error);
        queue.frames.insert(tag, pending);
        self.send_again_after(pause, tag, queue.session);
        self.check_drained(&queue);
    }

    /// Verdict on the refusal of a whole frame.
    fn judge_refusal(&self, queue: &mut Queue, pending: &Pending, identified: bool, error: Error) -> Verdict {
        // The refusal of a repeat may not cover earlier attempts.
        let certain = pending.attempts == 1 || !identified;
        // For a reservation's frames, `lease` is the reservation's.
        if retry(error.kind) == Retry::Session && pending.header.reservation == 0 {
            queue.lease_lost = true;
            // The others have continued without this worker: its gradient is of values that are gone.
            let fenced = pending.header.kind() == pb::Kind::Gradient && !self.shared.memberships.is_empty();
            return match (certain, fenced) {
                (true, true) => Verdict::Refused(error),
                (true, false) => Verdict::SendAgain,
                (false, _) => Verdict::Unclear(error),
            };
        }
        if certain || is_conclusive(error.kind) { Verdict::Refused(error) } else { Verdict::Unclear(error) }
    }

    /// Delivers the verdict on a frame's parts to the call.
    fn conclude(
        &self,
        mut queue: MutexGuard<'_, Queue>,
        answered: Answered<'_>,
        verdict: Verdict,
        lent: bool,
    ) {
        let Answered { tag, mut pending, call, parts } = answered;
        let (outcome, values) = match verdict {
            Verdict::Answered(answer, values) => {
                stats::answered(&self.shared.counters, &answer.applied, call.identified, values.as_ref());
                (Outcome::Answered(answer), values)
            }
            Verdict::Refused(error) => (Outcome::Failed(error), None),
            Verdict::Unclear(error) => {
                tracing::debug!(%error, "a push is in doubt");
                let doubt = |index: usize| self.doubt(&mut queue, &pending, &call.parts[index]);
                let doubts: Vec<_> = parts.clone().map(doubt).collect();
                self.check_drained(&queue);
                drop(queue);
                for (index, doubt) in parts.zip(doubts) {
                    call.deliver(index, Outcome::InDoubt(doubt), None);
                }
                return;
            }
            Verdict::SendAgain => {
                (pending.attempts, pending.sender.client) = (0, 0);
                queue.frames.insert(tag, pending);
                self.check_drained(&queue);
                return;
            }
        };
        self.check_drained(&queue);
        drop(queue);
        // A refusal of a message refuses all of it.
        for index in parts {
            let values = values.clone().map(|bytes| ArrivedValues { bytes, lent });
            call.deliver(index, outcome.clone(), values);
        }
    }

    /// Sends a frame again on the connection of this session, unless the session has ended by then.
    fn send_again_after(self: &Arc<Self>, pause: Duration, tag: u64, session: u64) {
        let (Some(driver), link) = (self.driver.upgrade(), Arc::downgrade(self)) else { return };
        driver.spawn(async move {
            tokio::time::sleep(pause).await;
            if let Some(link) = link.upgrade() {
                lock(&link.queue).send_again(tag, session);
            }
        });
    }

    /// Keeps what an answer reports about its slices, except for pulls by a client with `Ack::Logged` or
    /// `Ack::Copied`: they may show changes that are not in a log.
    fn note(&self, queue: &mut Queue, pending: &Pending, identified: bool, answer: &convert::Answer) {
        let header = &pending.header;
        // An answer about vectors holds no version of a slice.
        if header.is_of_vectors() || !identified && self.shared.ack != Ack::Applied {
            return;
        }
        if let convert::Answer::Parts { outcomes, .. } = answer
            && outcomes.len() == header.parts.len()
        {
            for (part, outcome) in header.parts.iter().zip(outcomes) {
                let report =
                    outcome.as_ref().ok().map(|applied| report(header, applied.version, applied.own));
                match report {
                    report if identified => queue.answered(part.slice, report),
                    Some(report) => queue.keep(part.slice, report),
                    None => {}
                }
            }
            return;
        }
        match report_of(header, answer) {
            report if identified && header.parts.is_empty() => queue.answered(header.slice, report),
            _ if identified => pending.slices().for_each(|slice| queue.answered(slice, None)),
            Some(report) => queue.keep(header.slice, report),
            None => {}
        }
    }

    /// Delivers a restarted server's answer about the state of some slices.
    fn answer_what_is_left(&self, mut queue: MutexGuard<'_, Queue>, about: &[u64], answer: convert::Answer) {
        match (answer, about) {
            (convert::Answer::Version { version, own }, [slice]) => {
                queue.left(self.shard(), *slice, version, own);
            }
            (convert::Answer::Parts { outcomes, .. }, _) if outcomes.len() == about.len() => {
                for (slice, outcome) in about.iter().zip(outcomes) {
                    match outcome {
                        Ok(at) => queue.left(self.shard(), *slice, at.version, at.own),
                        Err(_) => queue.gone(*slice),
                    }
                }
            }
            (convert::Answer::Refused(error), _) if retry(error.kind) == Retry::Session => {
                queue.lease_lost = true;
                self.check_drained(&queue);
            }
            // The server is about to stop: the next connection asks again.
            (convert::Answer::Refused(error), _) if retry(error.kind) == Retry::Later => {}
            (_, [slice]) => queue.gone(*slice),
            // A question about one slice needs no memory.
            _ => {
                queue.most_asked = 1;
                queue.ask_again();
                queue.wake();
            }
        }
        if queue.to_ask.is_empty() && !queue.lost.is_empty() {
            let lost = std::mem::take(&mut queue.lost);
            drop(queue);
            self.shared.lost.note(lost, &self.shared.map, &self.shared.counters);
        }
    }

    /// Delivers the answers to the parts of a message.
    fn answer_parts(
        &self,
        pending: &Pending,
        call: &Call,
        parts: Range<usize>,
        outcomes: Vec<Result<Applied>>,
        mut payload: Bytes,
    ) {
        let expected = |(k, outcome): (usize, &Result<Applied>)| {
            call.parts[parts.start + k].answer_bytes.filter(|_| outcome.is_ok()).unwrap_or(0)
        };
        let fits = payload.len() == outcomes.iter().enumerate().map(expected).sum::<usize>();
        if !pending.header.is_of_vectors() {
            stats::parts_answered(&self.shared.counters, &outcomes, call.identified, payload.len());
        }
        let (mut delivered, mut values) = (Vec::with_capacity(outcomes.len()), Vec::new());
        let mut run = Run::default();
        for (index, outcome) in parts.zip(outcomes) {
            let part = &call.parts[index];
            let error = match outcome {
                Ok(applied) if fits => {
                    if let Some(bytes) = part.answer_bytes {
                        if !run.continues_at(call, index) {
                            values.extend(run.end(&mut payload));
                        }
                        run.add(index, bytes);
                    }
                    delivered.push((index, Outcome::Answered(PartAnswer { applied, step: 0 })));
                    continue;
                }
                Ok(_) => part.frame_error("the server's answer does not fit its question"),
                // The refusal of a repeat may not cover earlier attempts.
                Err(error) if pending.attempts == 1 || is_conclusive(error.kind) || !call.identified => {
                    delivered.push((index, Outcome::Failed(self.refusal(part, error))));
                    continue;
                }
                Err(error) => self.refusal(part, error),
            };
            tracing::debug!(%error, "a push is in doubt");
            delivered.push((index, Outcome::InDoubt(self.doubt(&mut lock(&self.queue), pending, part))));
        }
        values.extend(run.end(&mut payload));
        call.deliver_all(
            delivered,
            values.into_iter().map(|(part, bytes)| (part, ArrivedValues { bytes, lent: false })),
        );
        self.check_drained(&lock(&self.queue));
    }
}

/// Outcomes of the parts of a program.
fn scalar_outcomes(parts: usize, refusals: Vec<(usize, Error)>) -> Vec<Result<Applied>> {
    let ran = Applied { version: 0, own: 0, staleness: None, scale: 1.0, momentum: None, duplicate: false };
    let mut outcomes = vec![Ok(ran); parts];
    for (part, error) in refusals {
        // A refusal of an unknown part answers none, so results are missing.
        if let Some(outcome) = outcomes.get_mut(part) {
            *outcome = Err(error);
        }
    }
    outcomes
}

/// Settles doubts by the late answer to their frame, which came before the answer to the question.
fn settle_late(mut queue: MutexGuard<'_, Queue>, doubts: &[(Arc<Doubt>, u64)], answer: convert::Answer) {
    for (_, slice) in doubts {
        queue.answered(*slice, None);
    }
    drop(queue);
    match answer {
        convert::Answer::Receipt(Applied { version, .. }) | convert::Answer::Values { version, .. } => {
            for (doubt, _) in doubts {
                doubt.settle(Fate::Applied { version });
            }
        }
        convert::Answer::Parts { outcomes, .. } => {
            for ((doubt, _), applied) in doubts.iter().zip(outcomes) {
                if let Ok(Applied { version, .. }) = applied {
                    doubt.settle(Fate::Applied { version });
                }
            }
        }
        // The question that follows decides.
        convert::Answer::Refused(_)
        | convert::Answer::Fenced
        | convert::Answer::Version { .. }
        | convert::Answer::Scalars { .. } => {}
    }
}

/// Verdict of an answer other than a refusal: the part was answered, if the answer fits its question.
fn judge(pending: &Pending, part: &CallPart, identified: bool, answer: convert::Answer) -> Verdict {
    let read = |version, own| Applied {
        version,
        own,
        staleness: None,
        scale: 1.0,
        momentum: None,
        duplicate: false,
    };
    match (identified, answer) {
        (true, convert::Answer::Receipt(applied)) if !pending.header.want_values => {
            Verdict::Answered(PartAnswer { applied, step: 0 }, None)
        }
        (true, convert::Answer::Values { applied: Some(applied), step, payload, .. })
            if Some(payload.len()) == part.answer_bytes =>
        {
            Verdict::Answered(PartAnswer { applied, step }, Some(payload))
        }
        (false, convert::Answer::Values { version, own, step, payload, .. })
            if Some(payload.len()) == part.answer_bytes =>
        {
            Verdict::Answered(PartAnswer { applied: read(version, own), step }, Some(payload))
        }
        // For a portion, only `duplicate` carries information.
        (false, convert::Answer::Receipt(applied)) if pending.header.portion.is_some() => {
            Verdict::Answered(PartAnswer { applied, step: 0 }, None)
        }
        (false, convert::Answer::Version { version, own }) if part.answer_bytes.is_none() => {
            Verdict::Answered(PartAnswer { applied: read(version, own), step: 0 }, None)
        }
        _ => {
            let error = part.frame_error("the server's answer does not fit its question");
            if identified { Verdict::Unclear(error) } else { Verdict::Refused(error) }
        }
    }
}

/// Values of consecutive parts, in the answer and among the elements: they are handed out as one.
#[derive(Default)]
struct Run {
    parts: Range<usize>,
    bytes: usize,
}

impl Run {
    fn continues_at(&self, call: &Call, next: usize) -> bool {
        let follow = |last: &CallPart, part: &CallPart| {
            last.tensor == part.tensor && last.elements.end == part.elements.start
        };
        self.parts.end == next && !self.parts.is_empty() && follow(&call.parts[next - 1], &call.parts[next])
    }

    fn add(&mut self, part: usize, bytes: usize) {
        if self.parts.is_empty() {
            self.parts.start = part;
        }
        (self.parts.end, self.bytes) = (part + 1, self.bytes + bytes);
    }

    /// The first part, and the values of all.
    fn end(&mut self, payload: &mut Bytes) -> Option<(usize, Bytes)> {
        let Self { parts, bytes } = std::mem::take(self);
        (!parts.is_empty()).then(|| (parts.start, payload.split_to(bytes)))
    }
}

/// State of a slice according to the answer to a frame without parts.
fn report_of(header: &pb::Header, answer: &convert::Answer) -> Option<SliceReport> {
    let (version, own) = match answer {
        convert::Answer::Receipt(applied) | convert::Answer::Values { applied: Some(applied), .. } => {
            (applied.version, applied.own)
        }
        convert::Answer::Values { version, own, .. } | convert::Answer::Version { version, own } => {
            (*version, *own)
        }
        convert::Answer::Parts { .. }
        | convert::Answer::Scalars { .. }
        | convert::Answer::Refused(_)
        | convert::Answer::Fenced => return None,
    };
    Some(report(header, version, own))
}

fn report(header: &pb::Header, version: u64, own: u64) -> SliceReport {
    SliceReport { group: header.group, epoch: header.epoch, version, own }
}

fn fate(answer: &convert::Answer) -> Fate {
    match answer {
        convert::Answer::Receipt(applied) => Fate::Applied { version: applied.version },
        convert::Answer::Fenced => Fate::Fenced,
        convert::Answer::Values { .. }
        | convert::Answer::Parts { .. }
        | convert::Answer::Scalars { .. }
        | convert::Answer::Version { .. }
        | convert::Answer::Refused(_) => Fate::Unknown,
    }
}
