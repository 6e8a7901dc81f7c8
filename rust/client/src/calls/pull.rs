//! Pulls of values, of optimizer state and of versions.

use crate::calls::small::{Body, Kinship, SmallSlice, SmallSlices};
use crate::calls::submit::Draft;
use crate::client::Client;
use crate::link::call::payload::Payload;
use crate::link::call::{Call, CallPart, Outcome};
use crate::link::wait::CallHandle;
use crate::state::map::Entry;
use crate::state::runtime::lock;
use crate::state::shared::Shared;
use crate::state::stats;
use bytes::Bytes;
use fastps_core::dtype::{Array, DType};
use fastps_core::error::{Error, Kind, Result};
use fastps_core::frame::Base;
use fastps_core::isa::Isa;
use fastps_core::tensor::SliceId;
use fastps_core::verbs::{
    Caller, OptimizerState, PullOptions, PullView, Pulled, RoundingCaller, SliceVersion, Ticket, Versions,
};
use fastps_proto::v1 as pb;
use fastps_transport::convert::header;
use fastps_transport::convert::{Read, Retry, retry};
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

impl Client {
    /// Queues pulls of these tensors; `bfloat16`: which of them come in bfloat16.
    pub(crate) fn start_pull(
        &self,
        entries: &[Arc<Entry>],
        epoch: u64,
        (what, bfloat16): (Read, &[bool]),
        deadline: Instant,
    ) -> CallHandle {
        if what != Read::Version {
            stats::count(&self.shared.counters.pulls, 1);
        }
        let mut drafts = Vec::new();
        let mut small = SmallSlices::new(|kin: Kinship, parts, _: &[Option<Base>]| {
            coded(kin.bfloat16, header::whole_pulls(kin.target(epoch), what, parts))
        });
        let shares = matches!(what, Read::Values | Read::Average);
        for (tensor, entry) in entries.iter().enumerate() {
            let dtype = entry.spec.dtype;
            let bfloat16 = bfloat16.get(tensor).copied().unwrap_or(false);
            let element_bytes = match what {
                Read::Values | Read::Average if bfloat16 => Some(DType::BFloat16.size()),
                Read::Values => Some(dtype.size()),
                Read::Average => Some(dtype.computed().size()),
                Read::State => Some(dtype.computed().size() * entry.spec.slots().len()),
                Read::Version => None,
            };
            for (k, elements) in entry.spec.slices().enumerate() {
                let answer_bytes = element_bytes.map(|bytes| bytes * elements.len());
                if shares && self.is_small(entry, k, 0, answer_bytes) {
                    let (codec, base, body) = (None, None, Body::Ready(&[]));
                    drafts.extend(small.add(SmallSlice {
                        tensor,
                        entry,
                        k,
                        codec,
                        bfloat16,
                        base,
                        reservation: 0,
                        body,
                        answer_bytes,
                    }));
                    continue;
                }
                let header = coded(bfloat16, header::read(entry.target(k, epoch), what));
                let payload = Payload::Owned(Bytes::new());
                drafts.push(Draft::new(tensor, entry, k, header, answer_bytes, payload));
            }
        }
        drafts.extend(small.finish());
        let _in_order = self.lock_sequence();
        self.submit(drafts, Vec::new(), deadline, None)
    }

    /// Queues pulls of values or averages. Fails unless all tensors can be read so. Returns, too, whether what
    /// comes is still to be rounded: a server of an earlier version refuses a pull in bfloat16.
    pub(crate) fn start_pull_as(
        &self,
        entries: &[Arc<Entry>],
        epoch: u64,
        options: &PullOptions,
        deadline: Instant,
    ) -> Result<(CallHandle, bool)> {
        options.check(entries.iter().map(|entry| &*entry.spec))?;
        let what = match options.view {
            PullView::Values => Read::Values,
            PullView::Average => Read::Average,
        };
        let rounds = self.links.iter().any(|link| !link.pull_codec.load(Ordering::Relaxed));
        let bfloat16 = if rounds { &[][..] } else { &options.bfloat16[..] };
        Ok((self.start_pull(entries, epoch, (what, bfloat16), deadline), rounds))
    }

    /// Waits for a pull and hands out its values.
    pub(crate) fn finish_pull(&self, call: &CallHandle, caller: &mut dyn Caller) -> Result<()> {
        self.finish(call, caller)?;
        first_error(&self.shared, call)
    }

    /// Pulls a tensor's state.
    pub(crate) fn pull_state(
        &self,
        entry: &Arc<Entry>,
        epoch: u64,
        deadline: Instant,
    ) -> Result<OptimizerState> {
        let (elements, slots) = (entry.spec.elements(), entry.spec.slots());
        let dtype = entry.spec.dtype.computed();
        let mut state = OptimizerState {
            steps: vec![0; entry.spec.slice_count()],
            slots: slots.into_iter().map(|slot| (slot, Array::zeros(dtype, elements))).collect(),
        };
        let call = self.start_pull(std::slice::from_ref(entry), epoch, (Read::State, &[]), deadline);
        let mut take = |_: usize, first: usize, values: &[u8]| {
            let run = values.len() / state.slots.len().max(1);
            for (k, (_, slot)) in state.slots.iter_mut().enumerate() {
                slot.write(first, &values[k * run..(k + 1) * run]);
            }
        };
        call.wait(Duration::MAX, Some(&mut take))?;
        first_error(&self.shared, &call)?;
        for (step, (_, outcome)) in state.steps.iter_mut().zip(call.outcomes()) {
            if let Outcome::Answered(answer) = outcome {
                *step = answer.step;
            }
        }
        Ok(state)
    }
}

fn coded(bfloat16: bool, pull: pb::Header) -> pb::Header {
    if bfloat16 { header::in_bfloat16(pull) } else { pull }
}

pub(crate) fn first_error(shared: &Shared, call: &Call) -> Result<()> {
    for (part, outcome) in call.outcomes() {
        match outcome {
            Outcome::Answered(_) => {}
            Outcome::Failed(error) => {
                if retry(error.kind) == Retry::Map {
                    shared.map_is_stale.store(true, Ordering::Release);
                }
                return Err(error);
            }
            Outcome::Open | Outcome::InDoubt(_) => {
                return Err(part.refused(Error::new(Kind::Internal, "a slice was lost")));
            }
        }
    }
    Ok(())
}

/// The versions in the answers of a call, tensor by tensor.
pub(crate) fn versions(call: &Call, client: u64) -> Versions {
    let mut outcomes = call.outcomes();
    // Small slices come last.
    outcomes.sort_by_key(|(part, _)| part.tensor);
    let tensors = outcomes.chunk_by(|(a, _), (b, _)| a.tensor == b.tensor).map(|slices| {
        let version = |(part, outcome): &(&CallPart, Outcome)| match outcome {
            Outcome::Answered(answer) => {
                let (version, own) = (answer.applied.version, answer.applied.own);
                Some(SliceVersion { slice: SliceId(part.slice), version, own })
            }
            _ => None,
        };
        (slices[0].0.name.clone(), slices.iter().filter_map(version).collect())
    });
    Versions::new(client, tensors.collect())
}

/// The caller, or one that rounds for it what a server has not.
pub(crate) fn rounded<'a>(
    rounds: bool,
    options: &PullOptions,
    entries: &[Arc<Entry>],
    caller: &'a mut dyn Caller,
) -> Result<RoundingCaller<'a>> {
    let entries = if rounds { entries } else { &[] };
    Ok(RoundingCaller::new(Isa::get()?, options, entries.iter().map(|entry| &*entry.spec), caller))
}

/// A pull under way that keeps its values until they are taken.
#[derive(Debug)]
pub(crate) struct PullTicket {
    pub(crate) shared: Arc<Shared>,
    pub(crate) call: CallHandle,
    pub(crate) client: u64,
    pub(crate) options: PullOptions,
    /// Set if what comes is still to be rounded.
    pub(crate) rounds: bool,
    /// The tensors pulled.
    pub(crate) entries: Vec<Arc<Entry>>,
    /// Set once the values were taken.
    pub(crate) taken: Mutex<bool>,
}

impl PullTicket {
    fn collect(&self) -> Result<Pulled> {
        first_error(&self.shared, &self.call)?;
        if std::mem::replace(&mut *lock(&self.taken), true) {
            return Err(Error::new(Kind::Config, "the values of this pull were taken before"));
        }
        let zeros = |(k, entry): (usize, &Arc<Entry>)| {
            Array::zeros(self.options.dtype(k, &entry.spec), entry.spec.elements())
        };
        let mut values: Vec<_> = self.entries.iter().enumerate().map(zeros).collect();
        let mut write = |k: usize, first: usize, bytes: &[u8]| {
            values[k].write(first, bytes);
        };
        let mut caller = rounded(self.rounds, &self.options, &self.entries, &mut write)?;
        for (part, bytes) in self.call.take_arrived() {
            caller.take(part.tensor, part.elements.start, &bytes);
        }
        drop(caller);
        Ok(Pulled { values, versions: versions(&self.call, self.client) })
    }
}

impl Ticket<Result<Pulled>> for PullTicket {
    fn is_done(&self) -> bool {
        self.call.is_done()
    }

    fn wait(&self, timeout: Duration) -> Option<Result<Pulled>> {
        match self.call.wait(timeout, None) {
            Ok(true) => Some(self.collect()),
            Ok(false) => None,
            Err(error) => Some(Err(error)),
        }
    }

    fn on_done(&self, callback: Box<dyn FnOnce() + Send>) {
        self.call.on_done(callback);
    }
}
