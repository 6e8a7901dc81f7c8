//! Vectors of an in-process store. Its coordinator and replicas wait for each other on their own threads.

use super::{Store, Tensor};
use crate::base::error::{Error, Kind, Result};
use crate::base::sync::{Arc, lock};
use crate::coordination::batch::BatchTask;
use crate::coordination::spaces::{
    BatchReport, Claimant, ReplicaAnswer, ReplicaRequest, Seat, SeatRequest, SpaceSpec, SpaceWaiter,
};
use crate::push::outgoing::portion_gradients;
use crate::slice::Slice;
use crate::tensor::program::{Command, Program};
use crate::tensor::{SpaceId, check_tensors};
use crate::verbs::{Caller, Gradient, OpenedSpace, SpaceInfo, VectorPull, VectorSpaces};
use rayon::prelude::*;
use std::sync::mpsc::{RecvTimeoutError, SyncSender, sync_channel};
use std::time::Duration;

/// A waiter that passes its answer to a thread.
fn passing<T: Send + 'static>(to: SyncSender<T>) -> SpaceWaiter<T> {
    Box::new(move |answer| {
        // A caller that stops waiting withdraws its waiter first, so no answer is lost here.
        let _ = to.send(answer);
    })
}

impl Store {
    /// The tensors of a space; fails unless they can have vectors together.
    fn tensors_of_space(&self, names: &[Arc<str>]) -> Result<Vec<Arc<Tensor>>> {
        let tensors = names.iter().map(|name| self.tensor(name)).collect::<Result<Vec<_>>>()?;
        let specs: Vec<_> = tensors.iter().map(|tensor| tensor.spec.clone()).collect();
        check_tensors(&specs)?;
        Ok(tensors)
    }

    /// The slices of a space, tensor by tensor.
    fn slices_of_space(&self, spec: &SpaceSpec) -> Result<Vec<Arc<Slice>>> {
        let tensors = spec.tensors.iter().map(|name| self.tensor(name)).collect::<Result<Vec<_>>>()?;
        Ok(tensors.iter().flat_map(|tensor| tensor.slices.iter().cloned()).collect())
    }

    /// Does something with every slice, on the store's own threads if it pays off.
    fn on_slices<T: Send>(
        &self,
        slices: &[Arc<Slice>],
        work: impl Fn(usize, &Arc<Slice>) -> Result<T> + Sync + Send,
    ) -> Result<Vec<T>> {
        match self.pool(slices.iter().map(|slice| slice.len()).sum()) {
            Some(pool) => {
                pool.install(|| slices.par_iter().enumerate().map(|(k, slice)| work(k, slice)).collect())
            }
            None => slices.iter().enumerate().map(|(k, slice)| work(k, slice)).collect(),
        }
    }

    /// Fails if a space is open over the tensor.
    pub(super) fn check_no_space(&self, name: &str) -> Result<()> {
        let spaces = lock(&self.shared.spaces).list();
        match spaces.iter().find(|(spec, _)| spec.tensors.iter().any(|tensor| **tensor == *name)) {
            None => Ok(()),
            Some((spec, _)) => {
                let message = format!("space {:?} is open over the tensor", spec.space.name);
                Err(Error::new(Kind::Precondition, message)
                    .tensor(name)
                    .expected("a closed space", "an open one"))
            }
        }
    }
}

impl VectorSpaces for Store {
    fn open_space(
        &self,
        name: &Arc<str>,
        tensors: &[Arc<str>],
        vectors: &[Arc<str>],
        keep_for: Duration,
        _timeout: Duration,
    ) -> Result<OpenedSpace> {
        // Registering, removing and opening go one at a time: a tensor with vectors is not removed.
        let _one_at_a_time = lock(&self.shared.registering);
        let of_space = self.tensors_of_space(tensors)?;
        let keep_for_ms = u64::try_from(keep_for.as_millis()).unwrap_or(u64::MAX);
        let (spec, new) =
            lock(&self.shared.spaces).open(self.client, name, (tensors, vectors), keep_for_ms)?;
        let slices: Vec<_> = of_space.iter().flat_map(|tensor| tensor.slices.iter()).collect();
        let (mut term, mut last) = (0, 0);
        for slice in &slices {
            match slice.open_space(&spec.space) {
                Ok(standing) => (term, last) = (standing.term.max(term), standing.number.max(last)),
                Err(error) => {
                    if new {
                        for slice in &slices {
                            slice.close_space(spec.space.id);
                        }
                        lock(&self.shared.spaces).close(spec.space.id);
                    }
                    return Err(error.shard(self.shared.shard.index()));
                }
            }
        }
        Ok(OpenedSpace { spec, new, term, last })
    }

    fn close_space(&self, space: SpaceId, _timeout: Duration) -> Result<()> {
        let _one_at_a_time = lock(&self.shared.registering);
        let Some(spec) = lock(&self.shared.spaces).close(space) else { return Ok(()) };
        for slice in self.slices_of_space(&spec)? {
            slice.close_space(space);
        }
        Ok(())
    }

    fn spaces(&self, _timeout: Duration) -> Result<Vec<SpaceInfo>> {
        let all = lock(&self.shared.spaces).list();
        Ok(all.into_iter().map(|(spec, coordinator)| SpaceInfo { spec, coordinator }).collect())
    }

    fn coordinate(&self, space: SpaceId, request: &SeatRequest, _timeout: Duration) -> Result<Seat> {
        lock(&self.shared.spaces).coordinate(Claimant::in_store(self.client), space, request)
    }

    fn run_program(
        &self,
        command: Command,
        program: &Arc<Program>,
        _timeout: Duration,
    ) -> Result<Vec<Vec<f64>>> {
        let spec = lock(&self.shared.spaces).spec(command.space)?;
        self.on_slices(&self.slices_of_space(&spec)?, |_, slice| slice.run_program(command, program))
    }

    fn pull_vector(&self, pull: &VectorPull, _timeout: Duration, caller: &mut dyn Caller) -> Result<()> {
        let spec = lock(&self.shared.spaces).spec(pull.space)?;
        for (k, name) in spec.tensors.iter().enumerate() {
            for slice in &self.tensor(name)?.slices {
                let snapshot = slice.pull_vector(self.client, pull.space, pull.vector, pull.batch)?;
                caller.take(k, slice.range().start, snapshot.as_ref());
            }
        }
        Ok(())
    }

    fn push_portion(
        &self,
        space: SpaceId,
        batch: u64,
        portion: u32,
        gradients: &[Gradient],
        _timeout: Duration,
    ) -> Result<bool> {
        let spec = lock(&self.shared.spaces).spec(space)?;
        let (mut slices, mut values) = (Vec::new(), Vec::new());
        let tensors = spec.tensors.iter().map(|name| self.tensor(name)).collect::<Result<Vec<_>>>()?;
        let specs: Vec<_> = tensors.iter().map(|tensor| tensor.spec.clone()).collect();
        for (tensor, gradient) in tensors.iter().zip(portion_gradients(&specs, gradients)?) {
            for slice in &tensor.slices {
                slices.push(slice.clone());
                values.push(gradient.values.view().get(slice.range()));
            }
        }
        let add = |k: usize, slice: &Arc<Slice>| slice.push_portion(space, batch, portion, values[k].bytes());
        Ok(self.on_slices(&slices, add)?.contains(&true))
    }

    fn batch(
        &self,
        space: SpaceId,
        term: u64,
        task: &BatchTask,
        wait: Duration,
        _timeout: Duration,
    ) -> Result<BatchReport> {
        let (to, answer) = sync_channel(1);
        let spaces = &self.shared.spaces;
        if let Some(report) =
            lock(spaces).batch(Claimant::in_store(self.client), (space, term), task, || passing(to))?
        {
            return Ok(report);
        }
        match answer.recv_timeout(wait) {
            Ok(report) => Ok(report),
            Err(_) => lock(spaces).withdraw_batch(space, term),
        }
    }

    fn batch_portion(
        &self,
        request: &ReplicaRequest,
        wait: Duration,
        _timeout: Duration,
    ) -> Result<ReplicaAnswer> {
        let (to, answer) = sync_channel(1);
        let spaces = &self.shared.spaces;
        if let Some(given) = lock(spaces).portion(self.client, request, || passing(to))? {
            return Ok(given);
        }
        match answer.recv_timeout(wait) {
            Err(RecvTimeoutError::Timeout) => {
                let nothing = lock(spaces).withdraw_portion(self.client, request);
                nothing.map_or_else(|| answer.recv().map_err(|_| gone()), Ok)
            }
            answer => answer.map_err(|_| gone()),
        }
    }
}

fn gone() -> Error {
    Error::new(Kind::Lease, "the store was closed, or another call waits in its place")
}
