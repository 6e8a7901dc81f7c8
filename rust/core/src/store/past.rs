//! A store of tensors as they once were: it is read like any other, and never changes.

use super::{Store, StoreOptions, Tensor};
use crate::base::error::{Error, Kind, Result};
use crate::base::mode::{Clocks, Joined, MembershipRequest};
use crate::base::sync::{Arc, RwLock, read, write};
use crate::coordination::batch::BatchTask;
use crate::coordination::portions::{Ask, PortionAnswer};
use crate::coordination::spaces::{BatchReport, ReplicaAnswer, ReplicaRequest, Seat, SeatRequest};
use crate::slice::Slice;
use crate::tensor::program::{Command, Program};
use crate::tensor::{SpaceId, TensorSpec, Versions};
use crate::verbs::{
    Caller, Gradient, Listener, NewTensor, OpenedSpace, OptimizerState, ParameterServer, PullOptions,
    PullTensors, Pulled, PushError, PushOptions, PushTensors, Pushed, Receipt, Rows, SpaceInfo, Stats,
    TensorRegistry, Ticket, TrainTogether, VectorPull, VectorSpaces,
};
use std::time::Duration;

/// A client of tensors as they were at a moment. Whatever would change them, or have workers train on them, is
/// refused with the reason.
#[derive(Debug)]
pub struct Past {
    /// `None`: closed. The memory is free when all clients of the moment are closed.
    store: RwLock<Option<Arc<Store>>>,
    place: Arc<str>,
}

impl Past {
    /// A store of these tensors, each with all its slices in order. `place`: where they are from, for errors.
    pub fn new(
        tensors: impl IntoIterator<Item = (TensorSpec, Vec<Arc<Slice>>)>,
        place: impl Into<Arc<str>>,
    ) -> Result<Self> {
        let store = Store::new(StoreOptions::default())?;
        let tensor = |(spec, slices): (TensorSpec, _)| {
            let (elements, spec) = (spec.elements(), Arc::new(spec));
            (spec.name.clone(), Arc::new(Tensor { spec, slices, elements, shared: None }))
        };
        write(&store.shared.tensors).extend(tensors.into_iter().map(tensor));
        Ok(Self { store: RwLock::new(Some(Arc::new(store))), place: place.into() })
    }

    fn store(&self) -> Result<Arc<Store>> {
        let closed =
            || Error::new(Kind::Config, "this moment is closed").expected("an open one", "a closed one");
        read(&self.store).clone().ok_or_else(closed)
    }

    fn refused(&self, what: &str) -> Error {
        let message = format!(
            "this store is a moment of the past in {}, and the past does not change. To train on from it, write it \
             to a directory, fastps.rewind(folder, out, to=...), and serve that: fastps fork OUT",
            self.place
        );
        Error::new(Kind::Precondition, message).expected("a call that reads", what)
    }
}

impl ParameterServer for Past {
    fn client(&self) -> u64 {
        read(&self.store).as_ref().map_or(0, |store| store.client())
    }

    fn another(&self) -> Result<Arc<dyn ParameterServer>> {
        let store = RwLock::new(Some(Arc::new(self.store()?.sibling())));
        Ok(Arc::new(Self { store, place: self.place.clone() }))
    }

    fn stats(&self, timeout: Duration) -> Result<Stats> {
        self.store()?.stats(timeout)
    }

    fn mark(&self, _name: &str, _timeout: Duration) -> Result<()> {
        Err(self.refused("mark"))
    }

    fn known_tensors(&self) -> usize {
        read(&self.store).as_ref().map_or(0, |store| store.known_tensors())
    }

    fn close(&self, _within: Duration) {
        drop(write(&self.store).take());
    }
}

impl TensorRegistry for Past {
    fn register_all(&self, _tensors: Vec<NewTensor<'_>>, _timeout: Duration) -> Result<()> {
        Err(self.refused("register"))
    }

    fn unregister(&self, name: &str, _timeout: Duration) -> Result<()> {
        Err(self.refused("unregister").tensor(name))
    }

    fn spec(&self, name: &str, timeout: Duration) -> Result<Arc<TensorSpec>> {
        self.store()?.spec(name, timeout)
    }

    fn names(&self, timeout: Duration) -> Result<Vec<Arc<str>>> {
        self.store()?.names(timeout)
    }

    fn last_changes(&self, names: &[Arc<str>], timeout: Duration) -> Result<Vec<Option<Duration>>> {
        self.store()?.last_changes(names, timeout)
    }
}

impl PullTensors for Past {
    fn pull_as(
        &self,
        names: &[Arc<str>],
        options: &PullOptions,
        timeout: Duration,
        caller: &mut dyn Caller,
    ) -> Result<Versions> {
        self.store()?.pull_as(names, options, timeout, caller)
    }

    fn pull_rows(&self, rows: &[Rows], timeout: Duration, caller: &mut dyn Caller) -> Result<Versions> {
        self.store()?.pull_rows(rows, timeout, caller)
    }

    fn pull_async_as(
        &self,
        names: Vec<Arc<str>>,
        options: PullOptions,
        timeout: Duration,
    ) -> Result<Arc<dyn Ticket<Result<Pulled>>>> {
        self.store()?.pull_async_as(names, options, timeout)
    }

    fn state(&self, name: &str, timeout: Duration) -> Result<OptimizerState> {
        self.store()?.state(name, timeout)
    }

    fn versions(&self, names: &[Arc<str>], timeout: Duration) -> Result<Versions> {
        self.store()?.versions(names, timeout)
    }
}

impl PushTensors for Past {
    fn push_for(&self, _caller: &mut dyn Caller, _gradients: &[Gradient], _options: &PushOptions) -> Pushed {
        Err(self.refused("push").into())
    }

    fn push_async(
        &self,
        _gradients: Vec<Gradient>,
        _options: PushOptions,
    ) -> Result<Arc<dyn Ticket<Pushed>>> {
        Err(self.refused("push_async"))
    }

    fn push_pull(
        &self,
        _gradients: &[Gradient],
        _options: &PushOptions,
        _caller: &mut dyn Caller,
    ) -> Result<(Vec<Receipt>, Versions), PushError> {
        Err(self.refused("push_pull").into())
    }

    fn assign_all(&self, values: &[Gradient], _timeout: Duration) -> Pushed {
        let error = self.refused("assign");
        Err(values.iter().fold(error, |error, values| error.tensor(values.name.clone())).into())
    }

    fn load_state(
        &self,
        name: &str,
        _state: &OptimizerState,
        _timeout: Duration,
    ) -> Result<Receipt, PushError> {
        Err(self.refused("load_state").tensor(name).into())
    }
}

impl TrainTogether for Past {
    fn join(&self, _group: &str, _seat: &MembershipRequest, _timeout: Duration) -> Result<Joined> {
        Err(self.refused("a worker that joins"))
    }

    fn leave(&self, _group: &str, _warm: bool, _timeout: Duration) -> Result<()> {
        Err(self.refused("a worker that leaves"))
    }

    fn advance(&self, _group: &str, _warm: bool, _steps: u64, _timeout: Duration) -> Result<Clocks> {
        Err(self.refused("a step"))
    }

    fn listen(&self, name: &Arc<str>, _at: &Versions, _timeout: Duration) -> Result<Listener> {
        Err(self.refused("a step").tensor(name.clone()))
    }

    fn portion(&self, _ask: &Ask, _wait: Duration, _timeout: Duration) -> Result<PortionAnswer> {
        Err(self.refused("a portion of samples"))
    }
}

impl VectorSpaces for Past {
    fn open_space(
        &self,
        _name: &Arc<str>,
        _tensors: &[Arc<str>],
        _vectors: &[Arc<str>],
        _keep_for: Duration,
        _timeout: Duration,
    ) -> Result<OpenedSpace> {
        Err(self.refused("vectors"))
    }

    fn close_space(&self, _space: SpaceId, _timeout: Duration) -> Result<()> {
        Err(self.refused("vectors"))
    }

    fn spaces(&self, timeout: Duration) -> Result<Vec<SpaceInfo>> {
        self.store()?.spaces(timeout)
    }

    fn coordinate(&self, _space: SpaceId, _request: &SeatRequest, _timeout: Duration) -> Result<Seat> {
        Err(self.refused("vectors"))
    }

    fn run_program(
        &self,
        _command: Command,
        _program: &Arc<Program>,
        _timeout: Duration,
    ) -> Result<Vec<Vec<f64>>> {
        Err(self.refused("vectors"))
    }

    fn pull_vector(&self, _pull: &VectorPull, _timeout: Duration, _caller: &mut dyn Caller) -> Result<()> {
        Err(self.refused("vectors"))
    }

    fn push_portion(
        &self,
        _space: SpaceId,
        _batch: u64,
        _portion: u32,
        _gradients: &[Gradient],
        _timeout: Duration,
    ) -> Result<bool> {
        Err(self.refused("vectors"))
    }

    fn batch(
        &self,
        _space: SpaceId,
        _term: u64,
        _task: &BatchTask,
        _wait: Duration,
        _timeout: Duration,
    ) -> Result<BatchReport> {
        Err(self.refused("vectors"))
    }

    fn batch_portion(
        &self,
        _request: &ReplicaRequest,
        _wait: Duration,
        _timeout: Duration,
    ) -> Result<ReplicaAnswer> {
        Err(self.refused("vectors"))
    }
}
