//! One step of a worker in one call: pushes gradients and pulls the values of all tensors. Each slice is
//! copied out right after its own push, while it is in the CPU's cache.

use super::places::Places;
use super::push::UnderWay;
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
use crate::verbs::{GradientRef, PullView, PushOptions, Pushed, SliceVersion, Versions};
use rayon::prelude::*;

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
    /// Versions of the pulled values; on an error, some values may not have been pulled.
    pub versions: Result<Versions>,
}

/// Takes pulled values on any thread, as [`Caller::take`](crate::verbs::Caller::take): index of the tensor,
/// index of the first element, bytes.
pub type Take<'a> = &'a (dyn Fn(usize, usize, &[u8]) + Sync);

/// A slice of the k-th tensor and its gradient: its index among all slices of the push, and the values of the
/// whole tensor.
struct ExchangePart<'a> {
    k: usize,
    slice: &'a Arc<Slice>,
    gradient: Option<(usize, View<'a>)>,
}

type PartResult = Option<Result<Applied>>;

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

    /// Pushes uncompressed gradients to some of the tensors (`None`: not to this one), and pulls the values
    /// of all, which include the push. `rates` replaces the options' learning rate per tensor, and may be
    /// empty. `team` does the work instead of the store's own threads. On an error, nothing has changed and
    /// `take` was not called.
    pub fn exchange(
        &self,
        exchange: &Exchange,
        gradients: &[Option<GradientRef<'_>>],
        options: &PushOptions,
        rates: &[Option<f64>],
        team: Option<&dyn Team>,
        take: Take<'_>,
    ) -> Result<Exchanged> {
        let _ends = self.shared.deadlines.end_complete_at_last();
        let mut all = lock(&exchange.places);
        if all.generation != self.shared.generation.load(Ordering::Acquire) {
            *all = self.look_up_again(exchange, &all)?;
        }
        let given = || {
            gradients.iter().zip(&all.tensors).filter_map(|(gradient, tensor)| Some(((*gradient)?, tensor)))
        };
        outgoing::check_options(options, false)?;
        rates.iter().flatten().try_for_each(|lr| outgoing::check_lr(*lr))?;
        for (gradient, tensor) in given() {
            outgoing::check_shape(gradient, &tensor.spec)?;
        }
        let values = given().map(|(gradient, _)| gradient);
        let largest = outgoing::check_finite(self.shared.isa, values, options, None)?;
        let pushed = Places::new(all.generation, given().map(|(_, tensor)| tensor.clone()).collect());

        let push = UnderWay { rates, ..UnderWay::new(self.identity(), options, largest) };
        let mut count = 0;
        let parts = gradients.iter().zip(&all.tensors).enumerate().flat_map(|(k, (gradient, tensor))| {
            let first = count;
            count += if gradient.is_some() { tensor.slices.len() } else { 0 };
            let values = gradient.map(|gradient| gradient.values);
            tensor.slices.iter().enumerate().map(move |(n, slice)| ExchangePart {
                k,
                slice,
                gradient: values.map(|values| (first + n, values)),
            })
        });
        let step = |part: &ExchangePart<'_>| self.exchange_part(&push, part, take);
        let done: Vec<_> = if let Some(team) = self.lent(team, all.elements) {
            shared_out(team, &parts.collect::<Vec<_>>(), |part| part.slice.len(), step)
        } else if let Some(pool) = self.pool(all.elements) {
            let parts: Vec<_> = parts.collect();
            pool.install(|| parts.par_iter().map(step).collect())
        } else {
            parts.map(|part| step(&part)).collect()
        };
        Ok(self.exchanged(&all, &pushed, push, done, take))
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

    #[inline(always)]
    fn exchange_part(
        &self,
        push: &UnderWay<'_>,
        &ExchangePart { k, slice, gradient }: &ExchangePart<'_>,
        take: Take<'_>,
    ) -> (Option<PartResult>, Result<SliceVersion>) {
        let answer = gradient.map(|(part, values)| self.push_values(push, (part, k), slice, values));
        (answer, self.pull_slice(slice, PullView::Values, |at, bytes| take(k, at, bytes)))
    }

    fn exchanged(
        &self,
        all: &Places,
        pushed: &Places,
        push: UnderWay<'_>,
        done: Vec<(Option<PartResult>, Result<SliceVersion>)>,
        take: Take<'_>,
    ) -> Exchanged {
        let (timeout, waits) = (push.options.timeout, push.late.get().is_some());
        let mut answers = Vec::with_capacity(done.len());
        let mut versions = Vec::with_capacity(done.len());
        for (answer, version) in done {
            answers.extend(answer);
            versions.push(version);
        }
        let pushed = self.settle(pushed, push.begun(answers, Vec::new(), None), timeout);
        if waits {
            // The values include what a policy had held only from now on, so pull all again.
            let pull = |(k, slice): (usize, &Arc<Slice>)| {
                self.pull_slice(slice, PullView::Values, |at, bytes| take(k, at, bytes))
            };
            versions = all.parts().map(pull).collect();
        }
        let mut versions = versions.into_iter();
        let of = |tensor: &Arc<Tensor>| {
            let slices = versions.by_ref().take(tensor.slices.len()).collect::<Result<_>>()?;
            Ok((tensor.spec.name.clone(), slices))
        };
        let tensors = all.tensors.iter().map(of).collect::<Result<_>>();
        Exchanged { pushed, versions: tensors.map(|tensors| Versions::new(self.client, tensors)) }
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
