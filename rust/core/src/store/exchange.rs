//! One step of a worker in one call: pushes gradients and pulls the values of all tensors. Each slice is
//! copied out right after its own push, while it is in the CPU's cache.

use super::later::Later;
use super::places::Places;
use super::push::{EncodedParts, UnderWay};
use super::settle::{Answers, Begun};
use super::team::{Team, shared_out};
use super::{Store, Tensor};
use crate::base::dtype::{DType, View};
use crate::base::error::{Error, Kind, Result};
use crate::base::sync::{Arc, Mutex, Ordering, lock};
use crate::base::text;
use crate::push::outgoing;
use crate::slice::Slice;
use crate::slice::frame::Applied;
use crate::tensor::TensorSpec;
use crate::verbs::{GradientRef, PullView, PushOptions, Pushed, SliceVersion, Ticket, Versions};
use rayon::prelude::*;
use std::fmt;
use std::time::Duration;

/// Tensors that are pushed to and pulled repeatedly, looked up once.
#[derive(Debug)]
pub struct Exchange {
    names: Vec<Arc<str>>,
    places: Mutex<Places>,
}

/// The result of an exchange whose gradients passed every check.
#[derive(Debug)]
pub struct Exchanged {
    /// One receipt per gradient, in order, or what failed.
    pub pushed: Pushed,
    /// Versions of the pulled values; on an error, some values may not have been pulled. `None`: the push
    /// failed or [`How::before_pull`] returned false, and nothing was pulled.
    pub versions: Option<Result<Versions>>,
}

/// What became of an exchange whose gradients passed every check.
pub enum Outcome {
    /// Its push has an outcome.
    Done(Exchanged),
    /// A policy holds its push, and no tensor was pulled completely.
    Held(Arc<dyn Ticket<Pushed>>),
}

impl fmt::Debug for Outcome {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Done(exchanged) => f.debug_tuple("Done").field(exchanged).finish(),
            Self::Held(_) => f.debug_tuple("Held").finish_non_exhaustive(),
        }
    }
}

/// How an exchange proceeds, beside the options of its push.
#[derive(Clone, Copy, Default)]
pub struct How<'a> {
    /// Learning rates per tensor, which replace the options' rate; may be empty.
    pub rates: &'a [Option<f64>],
    /// Does the work instead of the store's own threads.
    pub team: Option<&'a dyn Team>,
    /// Called once all slices have applied the push; the values are pulled after it, if it returns true.
    pub before_pull: Option<&'a (dyn Fn() -> bool + Sync)>,
    /// A push that a policy holds is [`Outcome::Held`]; otherwise the exchange waits for it.
    pub leaves_held: bool,
}

impl fmt::Debug for How<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("How").field("rates", &self.rates).finish_non_exhaustive()
    }
}

/// Takes pulled values on any thread, as [`Caller::take`](crate::verbs::Caller::take): index of the tensor,
/// index of the first element, bytes.
pub type Take<'a> = &'a (dyn Fn(usize, usize, &[u8]) + Sync);

/// A slice of the k-th tensor and its gradient: its index among all slices of the push, that of its tensor among
/// those of the push, and the values of the whole tensor.
struct ExchangePart<'a> {
    k: usize,
    slice: &'a Arc<Slice>,
    gradient: Option<(usize, usize, View<'a>)>,
}

type PartResult = Option<Result<Applied>>;

/// The answer of a slice, if it had a gradient, and the version of its values, if they were pulled.
type Done = (Option<PartResult>, Option<Result<SliceVersion>>);

impl Exchange {
    /// The types of the tensors' values.
    pub fn dtypes(&self) -> Vec<DType> {
        lock(&self.places).tensors.iter().map(|tensor| tensor.spec.dtype).collect()
    }
}

impl Store {
    /// Looks up tensors for repeated exchanges; fails unless they have these shapes.
    pub fn exchange_of(&self, tensors: &[(Arc<str>, &[u64])]) -> Result<Exchange> {
        let places = self.look_up(tensors.iter().map(|(name, _)| &**name))?;
        for ((_, shape), tensor) in tensors.iter().zip(&places.tensors) {
            tensor.spec.need_float32("an exchange")?;
            same_shape(shape, &tensor.spec)?;
        }
        let names = tensors.iter().map(|(name, _)| name.clone()).collect();
        Ok(Exchange { names, places: Mutex::new(places) })
    }

    /// Pushes gradients to some of the tensors (`None`: not to this one), and pulls the values of all, which
    /// include the push. On an error, nothing has changed and `take` was not called.
    pub fn exchange(
        &self,
        exchange: &Exchange,
        gradients: &[Option<GradientRef<'_>>],
        options: &PushOptions,
        how: How<'_>,
        take: Take<'_>,
    ) -> Result<Outcome> {
        let _ends = self.shared.deadlines.end_complete_at_last();
        let mut all = lock(&exchange.places);
        if all.generation != self.shared.generation.load(Ordering::Acquire) {
            *all = self.look_up_again(exchange, &all)?;
        }
        let given = || {
            gradients.iter().zip(&all.tensors).filter_map(|(gradient, tensor)| Some(((*gradient)?, tensor)))
        };
        let mut feedback = options.feedback.as_deref().map(lock);
        outgoing::check_options(options, feedback.is_some())?;
        how.rates.iter().flatten().try_for_each(|lr| outgoing::check_lr(*lr))?;
        for (k, (gradient, tensor)) in gradients.iter().zip(&all.tensors).enumerate() {
            if let Some(gradient) = *gradient {
                outgoing::check_rate(&tensor.spec, how.rates.get(k).copied().flatten().or(options.lr))?;
                outgoing::check_shape(gradient, &tensor.spec)?;
            }
        }
        let values = given().map(|(gradient, _)| gradient);
        let largest = outgoing::check_finite(self.shared.isa, values, options, feedback.as_deref_mut())?;
        let pushed = Places::new(all.generation, given().map(|(_, tensor)| tensor.clone()).collect());

        let push = UnderWay { rates: how.rates, ..UnderWay::new(self.identity(), options, largest) };
        let (mut count, mut tensors) = (0, 0);
        let parts = gradients.iter().zip(&all.tensors).enumerate().flat_map(|(k, (gradient, tensor))| {
            let (first, given) = (count, tensors);
            count += if gradient.is_some() { tensor.slices.len() } else { 0 };
            tensors += usize::from(gradient.is_some());
            let values = gradient.map(|gradient| gradient.values);
            tensor.slices.iter().enumerate().map(move |(n, slice)| ExchangePart {
                k,
                slice,
                gradient: values.map(|values| (first + n, given, values)),
            })
        });
        if !options.is_plain() || feedback.is_some() {
            let (mut memory, mut sent) = (EncodedParts::default(), vec![0; pushed.tensors.len()]);
            let mut done = Vec::with_capacity(gradients.len());
            for part in parts {
                let mut answer = None;
                if let Some((n, given, values)) = part.gradient {
                    let (spec, which) = (part.slice.spec(), (n, part.k, part.slice));
                    let gradient = GradientRef::whole(&spec.name, &spec.shape, values);
                    let feedback = feedback.as_deref_mut();
                    match self.push_encoded_part(&push, which, gradient, feedback, &mut memory) {
                        Ok((result, bytes)) => {
                            sent[given] += bytes;
                            answer = Some(result);
                        }
                        // Other slices may have taken their part, so the error is the push's.
                        Err(error) => {
                            let pushed = Err(error.into());
                            return Ok(Outcome::Done(Exchanged { pushed, versions: None }));
                        }
                    }
                }
                done.push(self.pulled(how, &part, answer, take));
            }
            drop(feedback); // what is held returns to it
            let begun = |answers| push.begun(answers, memory.residues, Some(sent));
            return Ok(self.exchanged(&all, pushed, done, begun, (how, options.timeout), take));
        }
        let step = |part: &ExchangePart<'_>| {
            let answer =
                part.gradient.map(|(n, _, values)| self.push_values(&push, (n, part.k), part.slice, values));
            self.pulled(how, part, answer, take)
        };
        let done: Vec<_> = if let Some(team) = self.lent(how.team, all.elements) {
            shared_out(team, &parts.collect::<Vec<_>>(), |part| part.slice.len(), step)
        } else if let Some(pool) = self.pool(all.elements) {
            let parts: Vec<_> = parts.collect();
            pool.install(|| parts.par_iter().map(step).collect())
        } else {
            parts.map(|part| step(&part)).collect()
        };
        let begun = |answers| push.begun(answers, Vec::new(), None);
        Ok(self.exchanged(&all, pushed, done, begun, (how, options.timeout), take))
    }

    fn look_up_again(&self, exchange: &Exchange, known: &Places) -> Result<Places> {
        let found = self.look_up(exchange.names.iter().map(|name| &**name))?;
        for (now, before) in found.tensors.iter().zip(&known.tensors) {
            same_shape(&before.spec.shape, &now.spec)?;
            if now.spec.dtype != before.spec.dtype {
                let error =
                    Error::new(Kind::DType, "the tensor has another dtype").tensor(now.spec.name.clone());
                return Err(error.expected(before.spec.dtype.name(), now.spec.dtype.name()));
            }
        }
        Ok(found)
    }

    /// Pulls a slice right after its own push, unless values are pulled later or not at all.
    #[inline(always)]
    fn pulled(
        &self,
        how: How<'_>,
        part: &ExchangePart<'_>,
        answer: Option<PartResult>,
        take: Take<'_>,
    ) -> Done {
        let is_held = how.leaves_held && matches!(answer, Some(None));
        let version =
            (how.before_pull.is_none() && !is_held).then(|| self.pull_part((part.k, part.slice), take));
        (answer, version)
    }

    #[inline(always)]
    fn pull_part(&self, (k, slice): (usize, &Arc<Slice>), take: Take<'_>) -> Result<SliceVersion> {
        self.pull_slice(slice, PullView::Values, |at, bytes| take(k, at, bytes))
    }

    fn exchanged(
        &self,
        all: &Places,
        pushed: Places,
        done: Vec<Done>,
        begun: impl FnOnce(Answers) -> Begun,
        (how, timeout): (How<'_>, Duration),
        take: Take<'_>,
    ) -> Outcome {
        let mut answers = Vec::with_capacity(done.len());
        let mut versions = Vec::with_capacity(done.len());
        for (answer, version) in done {
            answers.extend(answer);
            versions.push(version);
        }
        let begun = begun(answers);
        let waits = begun.late.is_some();
        if waits && how.leaves_held {
            self.count(&pushed, &begun);
            return Outcome::Held(Later::start(&self.shared.deadlines, pushed, begun, timeout));
        }
        let pushed = self.settle(&pushed, begun, timeout);
        let pulls = how.before_pull.is_none_or(|then| pushed.is_ok() && then());
        if !pulls {
            return Outcome::Done(Exchanged { pushed, versions: None });
        }
        if waits || how.before_pull.is_some() {
            // The values include what a policy had held only from now on, so pull all again.
            versions = all.parts().map(|part| Some(self.pull_part(part, take))).collect();
        }
        let mut versions = versions.into_iter().flatten();
        let of = |tensor: &Arc<Tensor>| {
            let slices = versions.by_ref().take(tensor.slices.len()).collect::<Result<_>>()?;
            Ok((tensor.spec.name.clone(), slices))
        };
        let tensors = all.tensors.iter().map(of).collect::<Result<_>>();
        let versions = Some(tensors.map(|tensors| Versions::new(self.client, tensors)));
        Outcome::Done(Exchanged { pushed, versions })
    }
}

/// Fails unless the tensor has the shape of the memory for its values.
fn same_shape(expected: &[u64], spec: &TensorSpec) -> Result<()> {
    if spec.shape == expected {
        return Ok(());
    }
    let error = Error::new(Kind::Shape, "the tensor has another shape").tensor(spec.name.clone());
    Err(error.expected(text::shape(expected), text::shape(&spec.shape)))
}
