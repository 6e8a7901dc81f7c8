//! Registration and removal of a store's tensors. A shared store publishes a new tensor to all of its
//! processes.

use super::places::Places;
use super::{Store, Tensor, unknown};
use crate::base::dtype::View;
use crate::base::error::{Error, Kind, Result};
use crate::base::sync::{Arc, Ordering, lock, write};
use crate::push::{outgoing, registration};
use crate::slice::frame::Action;
use crate::tensor::shared_directory::{Directory, SharedTensor};
use crate::tensor::{SliceId, TensorSpec};
use crate::verbs::{NewTensor, PushError, TensorRegistry};
use std::time::Duration;

impl TensorRegistry for Store {
    fn last_changes(&self, names: &[Arc<str>], _timeout: Duration) -> Result<Vec<Option<Duration>>> {
        Ok(vec![None; names.len()])
    }

    fn register_all(&self, tensors: Vec<NewTensor<'_>>, timeout: Duration) -> Result<()> {
        registration::check(self.shared.isa, &tensors)?;
        let _one_at_a_time = lock(&self.shared.registering);
        if let Some(directory) = &self.shared.directory {
            return self.publish(directory, &tensors, timeout);
        }
        let new = self.missing(&tensors)?;
        let mut made = Vec::with_capacity(new.len());
        for NewTensor { spec, values } in &new {
            match self.fill(spec, *values, timeout) {
                Ok(tensor) => made.push(tensor),
                Err(error) => {
                    for tensor in &made {
                        self.free(tensor);
                    }
                    return Err(registration::tell(error, tensors.len(), tensors.len() - new.len(), 0));
                }
            }
        }
        let mut known = write(&self.shared.tensors);
        known.extend(made.into_iter().map(|tensor| (tensor.spec.name.clone(), tensor)));
        Ok(())
    }

    fn unregister(&self, name: &str, _timeout: Duration) -> Result<()> {
        if self.shared.directory.is_some() {
            self.tensor(name)?;
            let error =
                Error::new(Kind::Config, "a shared store keeps its tensors: other processes may step them");
            return Err(error.tensor(name));
        }
        let _ends = self.shared.deadlines.end_complete_at_last();
        let _one_at_a_time = lock(&self.shared.registering);
        self.check_no_space(name)?;
        let mut tensors = write(&self.shared.tensors);
        let tensor = tensors.remove(name).ok_or_else(|| unknown(name, &tensors))?;
        self.shared.generation.fetch_add(1, Ordering::Release);
        drop(tensors);
        self.free(&tensor);
        Ok(())
    }

    fn spec(&self, name: &str, _timeout: Duration) -> Result<Arc<TensorSpec>> {
        Ok(self.tensor(name)?.spec.clone())
    }

    fn names(&self, _timeout: Duration) -> Result<Vec<Arc<str>>> {
        self.refresh()?;
        let mut names: Vec<_> = self.tensors().keys().cloned().collect();
        names.sort();
        Ok(names)
    }
}

impl Store {
    /// Those of the tensors that do not exist. Fails if one exists with another spec, or has a bad name.
    fn missing<'a, 'b>(&self, tensors: &'b [NewTensor<'a>]) -> Result<Vec<&'b NewTensor<'a>>> {
        let known = self.tensors();
        let mut missing = Vec::with_capacity(tensors.len());
        for new in tensors {
            if let Some(tensor) = known.get(&new.spec.name) {
                same_spec(&tensor.spec, &new.spec)?;
            } else {
                new.spec.check_new_names()?;
                missing.push(new);
            }
        }
        Ok(missing)
    }

    /// A tensor with these values, not listed yet.
    fn fill(&self, spec: &TensorSpec, values: View<'_>, timeout: Duration) -> Result<Arc<Tensor>> {
        let spec = Arc::new(spec.clone());
        let tensor = Arc::new(self.create(&spec, None)?);
        let body = |range| outgoing::assigned_body(self.shared.isa, values.get(range), &spec);
        let actions: Vec<_> = spec.slices().map(|range| (Action::Assign, body(range))).collect();
        if let Err(error) = self.change(&Places::new(0, vec![tensor.clone()]), &actions, timeout) {
            self.free(&tensor);
            return Err(match error {
                PushError::Refused(error) => error,
                PushError::Partial(partial) => partial.error,
            });
        }
        Ok(tensor)
    }

    /// Frees the slices of a tensor.
    fn free(&self, tensor: &Tensor) {
        self.shared.shard.remove(&tensor.slices.iter().map(|slice| slice.id()).collect::<Vec<_>>());
    }

    /// Registers tensors with all processes; the caller makes sure that this process registers no other
    /// meanwhile.
    fn publish(&self, directory: &Directory, tensors: &[NewTensor<'_>], timeout: Duration) -> Result<()> {
        for new in tensors {
            new.spec.need_float32("a shared store")?;
        }
        let _locked = directory.lock(timeout)?;
        self.refresh()?;
        let new = self.missing(tensors)?;
        // Tensors that do not fit this process's own memory limit must not be published.
        let mut held = Vec::with_capacity(new.len());
        for NewTensor { spec, .. } in &new {
            held.push(self.shared.shard.take_memory(spec, 0..spec.slice_count())?);
        }
        drop(held);
        let mut published = Ok(());
        let mut exist = tensors.len() - new.len();
        for NewTensor { spec, values } in new {
            published = directory.append(spec, values.bytes());
            if published.is_err() {
                break;
            }
            exist += 1;
        }
        let published = published.map_err(|error| registration::tell(error, tensors.len(), exist, 0));
        self.refresh().and(published)
    }

    /// Adds the tensors that other processes have registered.
    pub(super) fn refresh(&self) -> Result<()> {
        let Some(directory) = &self.shared.directory else { return Ok(()) };
        directory.news(|shared| {
            let spec = shared.spec().clone();
            let tensor = self.create(&spec, Some(shared))?;
            write(&self.shared.tensors).insert(spec.name.clone(), Arc::new(tensor));
            Ok(())
        })
    }

    /// Creates a tensor's slices, in private memory or in `shared` memory.
    fn create(&self, spec: &Arc<TensorSpec>, shared: Option<Arc<SharedTensor>>) -> Result<Tensor> {
        let ids: Vec<_> = (0..spec.slice_count())
            .map(|k| (SliceId(self.shared.next_slice.fetch_add(1, Ordering::Relaxed)), k))
            .collect();
        let group = self.group(&spec.group);
        self.shared.shard.create_in(shared.as_ref(), spec, group, &ids)?;
        let slices = ids.iter().map(|(id, _)| self.shared.shard.slice(*id)).collect::<Result<Vec<_>>>()?;
        Ok(Tensor { spec: spec.clone(), slices, elements: spec.elements(), shared })
    }
}

/// Fails unless a second registration has the same spec as the first.
pub fn same_spec(first: &TensorSpec, second: &TensorSpec) -> Result<()> {
    match first.difference(second) {
        None => Ok(()),
        Some((what, is, given)) => Err(Error::new(
            Kind::Precondition,
            format!("the tensor is registered with another {what}; unregister() frees the name"),
        )
        .tensor(first.name.clone())
        .expected(is, given)),
    }
}
