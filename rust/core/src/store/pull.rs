//! Pulls from a store, slice by slice into the caller's memory.

use super::{Store, Tensor};
use crate::base::dtype::Array;
use crate::base::error::Result;
use crate::base::sync::Arc;
use crate::push::sparse::Plan;
use crate::slice::Slice;
use crate::tensor::{SliceVersion, Versions};
use crate::verbs::{
    Caller, Done, OptimizerState, PullOptions, PullTensors, PullView, Pulled, RoundingCaller, Rows, Ticket,
};
use std::time::Duration;

impl Store {
    /// Passes a slice's values, or their average, to `take`: the index of its first element in the tensor, and the bytes.
    pub(super) fn pull_slice(
        &self,
        slice: &Slice,
        view: PullView,
        take: impl FnOnce(usize, &[u8]),
    ) -> Result<SliceVersion> {
        let snapshot = match view {
            PullView::Values => slice.pull(self.client)?,
            PullView::Average => slice.pull_average(self.client)?,
        };
        take(slice.range().start, snapshot.as_ref());
        Ok(SliceVersion { slice: slice.id(), version: snapshot.version, own: snapshot.own })
    }
}

impl PullTensors for Store {
    fn pull_as(
        &self,
        names: &[Arc<str>],
        options: &PullOptions,
        _timeout: Duration,
        caller: &mut dyn Caller,
    ) -> Result<Versions> {
        let tensors = names.iter().map(|name| self.tensor(name)).collect::<Result<Vec<_>>>()?;
        let specs = || tensors.iter().map(|tensor| &*tensor.spec);
        options.check(specs())?;
        let mut caller = RoundingCaller::new(self.shared.isa, options, specs(), caller);
        let mut versions = Vec::with_capacity(names.len());
        for (k, tensor) in tensors.iter().enumerate() {
            let mut of_slices = Vec::with_capacity(tensor.slices.len());
            for slice in &tensor.slices {
                of_slices.push(self.pull_slice(slice, options.view, |at, bytes| caller.take(k, at, bytes))?);
            }
            versions.push((tensor.spec.name.clone(), of_slices));
        }
        Ok(Versions::new(self.client, versions))
    }

    fn pull_rows(&self, rows: &[Rows], _timeout: Duration, caller: &mut dyn Caller) -> Result<Versions> {
        let plan = |rows: &Rows| {
            let tensor = self.tensor(&rows.name)?;
            Ok((Plan::new(&tensor.spec, &rows.indices)?, tensor))
        };
        let plans = rows.iter().map(plan).collect::<Result<Vec<_>>>()?;
        let mut versions = Vec::with_capacity(rows.len());
        let mut values = Vec::new();
        for (k, (plan, tensor)) in plans.iter().enumerate() {
            let mut of_slices = Vec::with_capacity(plan.parts().len());
            for part in plan.parts() {
                let slice = &tensor.slices[part.slice];
                values.clear();
                of_slices.push(slice.pull_rows(self.client, plan.indices(part), &mut values)?);
                plan.scatter(part.elements.start, &values, |at, values| caller.take(k, at, values));
            }
            versions.push((tensor.spec.name.clone(), of_slices));
        }
        Ok(Versions::new(self.client, versions))
    }

    fn pull_async_as(
        &self,
        names: Vec<Arc<str>>,
        options: PullOptions,
        timeout: Duration,
    ) -> Result<Arc<dyn Ticket<Result<Pulled>>>> {
        let tensors = names.iter().map(|name| self.tensor(name)).collect::<Result<Vec<_>>>()?;
        let zeros = |(k, tensor): (usize, &Arc<Tensor>)| {
            Array::zeros(options.dtype(k, &tensor.spec), tensor.spec.elements())
        };
        let mut values: Vec<_> = tensors.iter().enumerate().map(zeros).collect();
        let versions =
            self.pull_as(&names, &options, timeout, &mut |k: usize, first: usize, bytes: &[u8]| {
                values[k].write(first, bytes);
            })?;
        Ok(Arc::new(Done(Ok(Pulled { values, versions }))))
    }

    fn state(&self, name: &str, _timeout: Duration) -> Result<OptimizerState> {
        let tensor = self.tensor(name)?;
        let elements = tensor.spec.elements();
        let (names, dtype) = (tensor.spec.slots(), tensor.spec.dtype.computed());
        let mut state = OptimizerState {
            steps: Vec::new(),
            slots: names.into_iter().map(|name| (name, Array::zeros(dtype, elements))).collect(),
        };
        for slice in &tensor.slices {
            let snapshot = slice.pull_state(self.client)?;
            state.steps.push(snapshot.step);
            let range = tensor.spec.slice_range(slice.index());
            for (k, (_, values)) in state.slots.iter_mut().enumerate() {
                values.write(range.start, &snapshot.as_ref()[k * slice.slot_bytes()..][..slice.slot_bytes()]);
            }
        }
        Ok(state)
    }

    fn versions(&self, names: &[Arc<str>], _timeout: Duration) -> Result<Versions> {
        let of = |name: &Arc<str>| {
            let tensor = self.tensor(name)?;
            let slices = tensor.slices.iter().map(|slice| {
                let (version, own) = slice.version(self.client);
                SliceVersion { slice: slice.id(), version, own }
            });
            Ok((name.clone(), slices.collect()))
        };
        Ok(Versions::new(self.client, names.iter().map(of).collect::<Result<_>>()?))
    }
}
