//! The in-process store: one shard in the caller's memory, with the same verbs as a cluster of servers.

mod exchange;
mod groups;
mod later;
mod live;
mod places;
mod portions;
mod push;
mod register;
mod settle;
mod team;

pub use exchange::{Exchange, Exchanged, Take};
pub use groups::still_behind;
pub use live::Live;
pub use push::Bound;
pub use register::same_spec;
pub use team::Team;

use crate::base::dtype::{Array, View};
use crate::base::error::{Error, Kind, Result};
use crate::base::isa::Isa;
use crate::base::mode::{Clocks, Joined, Seat};
use crate::base::sync::{Arc, AtomicU64, Mutex, Ordering, RwLock, lock, read};
use crate::coordination::portions::{Answer, Ask, Portions};
use crate::kernel::codec::CodecId;
use crate::push::check;
use crate::push::outcome::Collect;
use crate::push::sparse::Plan;
use crate::shard::{Shard, ShardConfig};
use crate::slice::Slice;
use crate::slice::frame::{Action, Identity, Push};
use crate::slice::policy::Policy;
use crate::slice::record::Sink;
use crate::slice::shared_directory::{Directory, SharedTensor};
use crate::tensor::TensorSpec;
use crate::verbs::{
    Caller, Done, Gradient, ParameterServer, Pulled, PushError, PushOptions, Pushed, Receipt, Rows,
    SliceVersion, State, Stats, Ticket, Versions,
};
use foldhash::fast::RandomState;
use groups::Seats;
use later::Later;
use places::Places;
use settle::Begun;
use std::collections::HashMap;
use std::sync::{OnceLock, RwLockReadGuard};
use std::time::Duration;

/// How a store is made.
#[derive(Clone, Debug)]
pub struct StoreOptions {
    /// Threads that one call may use, its own included; `None` = as many as the machine has cores.
    pub threads: Option<usize>,
    /// Most bytes of memory, of every purpose.
    pub memory_limit: u64,
    /// When pushes are applied.
    pub policy: Option<Arc<dyn Policy>>,
    /// Where records go, if anybody wants them.
    pub sink: Option<Arc<dyn Sink>>,
    /// Whose memory it is.
    pub memory: Memory,
}

/// Whose memory a store is.
#[derive(Clone, Debug, Default)]
pub enum Memory {
    /// This process's alone.
    #[default]
    Private,
    /// New memory that other processes can open by [`Store::address`].
    Shared,
    /// What another process calls by this address.
    Opened(String),
}

impl Default for StoreOptions {
    fn default() -> Self {
        Self { threads: None, memory_limit: u64::MAX, policy: None, sink: None, memory: Memory::Private }
    }
}

/// A client of an in-process store; [`ParameterServer::another`] makes more of the same store.
#[derive(Debug)]
pub struct Store {
    shared: Arc<Shared>,
    client: u64,
    sequence: AtomicU64,
    pushed: AtomicU64,
    bytes_pushed: AtomicU64,
    bytes_saved: AtomicU64,
    seats: Mutex<Seats>,
}

#[derive(Debug)]
struct Shared {
    isa: Isa,
    shard: Shard,
    /// The tensors of all processes, where the memory is shared.
    directory: Option<Directory>,
    threads: usize,
    pool: OnceLock<Option<rayon::ThreadPool>>,
    tensors: RwLock<Tensors>,
    /// Changes when a tensor goes: what bound lists know is then looked up again.
    generation: AtomicU64,
    registering: Mutex<()>,
    /// Names of groups; a group's number is its place.
    groups: Mutex<Vec<Arc<str>>>,
    portions: Mutex<Portions>,
    next_slice: AtomicU64,
    next_client: AtomicU64,
}

#[derive(Debug)]
struct Tensor {
    spec: Arc<TensorSpec>,
    slices: Vec<Arc<Slice>>,
    elements: usize,
    shared: Option<Arc<SharedTensor>>,
}

type Tensors = HashMap<Arc<str>, Arc<Tensor>, RandomState>;

impl Tensor {
    /// Of its values, not encoded.
    fn bytes(&self) -> u64 {
        (self.spec.dtype.size() * self.elements) as u64
    }
}

/// Elements above which one call is worth more than one thread.
const PARALLEL: usize = 1 << 19;

impl Store {
    /// An empty store.
    pub fn new(options: StoreOptions) -> Result<Self> {
        let cores = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
        let threads = options.threads.unwrap_or(cores);
        if threads == 0 {
            return Err(Error::new(Kind::Config, "invalid threads").expected("at least 1", threads));
        }
        let isa = Isa::get()?;
        let directory = match options.memory {
            Memory::Private => None,
            Memory::Shared => Some(Directory::create()?),
            Memory::Opened(address) => Some(Directory::open(&address)?),
        };
        let mut config = ShardConfig::new(0, options.memory_limit, isa);
        (config.policy, config.sink) = (options.policy, options.sink);
        let shard = Shard::new(config);
        let portions = Mutex::new(Portions::new(0, shard.meter().clone()));
        let shared = Shared {
            isa,
            shard,
            directory,
            threads,
            pool: OnceLock::new(),
            tensors: RwLock::default(),
            generation: AtomicU64::new(0),
            registering: Mutex::default(),
            groups: Mutex::default(),
            portions,
            next_slice: AtomicU64::new(1),
            next_client: AtomicU64::new(1),
        };
        let store = Self::of(Arc::new(shared));
        store.refresh()?;
        Ok(store)
    }

    fn of(shared: Arc<Shared>) -> Self {
        let client = shared.next_client.fetch_add(1, Ordering::Relaxed);
        let zero = || AtomicU64::new(0);
        let seats = Mutex::default();
        Self {
            shared,
            client,
            sequence: zero(),
            pushed: zero(),
            bytes_pushed: zero(),
            bytes_saved: zero(),
            seats,
        }
    }

    /// Another client of the same parameters: [`ParameterServer::another`] as a store.
    pub fn sibling(&self) -> Self {
        Self::of(self.shared.clone())
    }

    fn tensor(&self, name: &str) -> Result<Arc<Tensor>> {
        if let Some(tensor) = self.tensors().get(name) {
            return Ok(tensor.clone());
        }
        self.refresh()?;
        self.tensors().get(name).cloned().ok_or_else(|| unknown(name))
    }

    fn tensors(&self) -> RwLockReadGuard<'_, Tensors> {
        read(&self.shared.tensors)
    }

    fn identity(&self) -> Identity {
        Identity { client: self.client, sequence: self.sequence.fetch_add(1, Ordering::Relaxed) + 1 }
    }

    /// The store's own threads, started by the first call that is large enough for them.
    fn pool(&self, elements: usize) -> Option<&rayon::ThreadPool> {
        if elements < PARALLEL || self.shared.threads == 1 {
            return None;
        }
        let build = || rayon::ThreadPoolBuilder::new().num_threads(self.shared.threads).build().ok();
        self.shared.pool.get_or_init(build).as_ref()
    }

    /// Hands over a slice's values: the tensor's first element that they are of, their bytes.
    fn pull_slice(&self, slice: &Slice, take: impl FnOnce(usize, &[u8])) -> Result<SliceVersion> {
        let snapshot = slice.pull(self.client)?;
        take(slice.range().start, snapshot.as_ref());
        Ok(SliceVersion { slice: slice.id(), version: snapshot.version, own: snapshot.own })
    }

    fn change(
        &self,
        tensor: &Arc<Tensor>,
        actions: &[(Action, &[u8])],
        timeout: Duration,
    ) -> Result<Receipt, PushError> {
        let identity = self.identity();
        let late = OnceLock::new();
        let change = |(part, slice): (usize, &Arc<Slice>)| {
            let (action, body) = actions[part];
            let push = Push {
                slice: slice.id(),
                action,
                identity,
                base: None,
                lr: None,
                scale: None,
                momentum: None,
                correction: None,
                count: slice.len() as u64,
                indices: None,
                codec: CodecId::plain(tensor.spec.dtype),
                body,
                trusted: false,
                once: true,
            };
            self.shared.shard.push_to(slice, &push, || late.get_or_init(Arc::<Collect>::default).expect(part))
        };
        let answers = tensor.slices.iter().enumerate().map(change).collect();
        let bytes = actions.iter().map(|(_, body)| body.len() as u64).sum();
        let places = Places::new(0, vec![tensor.clone()]);
        let late = late.into_inner();
        let begun = Begun { identity, answers, late, residues: Vec::new(), sent: Some(vec![bytes]) };
        let mut receipts = self.settle(&places, begun, timeout)?;
        receipts.pop().ok_or_else(|| Error::new(Kind::Internal, "a change without a receipt").into())
    }
}

impl ParameterServer for Store {
    fn client(&self) -> u64 {
        self.client
    }

    fn another(&self) -> Result<Arc<dyn ParameterServer>> {
        Ok(Arc::new(self.sibling()))
    }

    fn register(&self, spec: TensorSpec, values: View<'_>, timeout: Duration) -> Result<()> {
        self.register_tensor(spec, values, timeout)
    }

    fn unregister(&self, name: &str, _timeout: Duration) -> Result<()> {
        self.unregister_tensor(name)
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

    fn push_for(&self, caller: &mut dyn Caller, gradients: &[Gradient], options: &PushOptions) -> Pushed {
        let borrowed: Vec<_> = gradients.iter().map(Gradient::borrow).collect();
        let (places, begun) = self.begin(&borrowed, options)?;
        if begun.late.is_none() {
            return self.settle(&places, begun, options.timeout);
        }
        self.count(&places, &begun);
        Later::start(places, begun, options.timeout).wait_for(caller)
    }

    fn push_async(&self, gradients: Vec<Gradient>, options: PushOptions) -> Result<Arc<dyn Ticket<Pushed>>> {
        let borrowed: Vec<_> = gradients.iter().map(Gradient::borrow).collect();
        let (places, begun) = self.begin(&borrowed, &options)?;
        if begun.late.is_some() {
            self.count(&places, &begun);
            return Ok(Later::start(places, begun, options.timeout));
        }
        match self.settle(&places, begun, options.timeout) {
            // What a check found is the call's own error, as it is over the network.
            Err(PushError::Refused(error)) => Err(error),
            pushed => Ok(Arc::new(Done(pushed))),
        }
    }

    fn push_pull(
        &self,
        gradients: &[Gradient],
        options: &PushOptions,
        caller: &mut dyn Caller,
    ) -> Result<(Vec<Receipt>, Versions), PushError> {
        let receipts = self.push_for(caller, gradients, options)?;
        let names: Vec<_> = gradients.iter().map(|g| g.name.clone()).collect();
        Ok((receipts, self.pull(&names, options.timeout, caller)?))
    }

    fn pull(&self, names: &[Arc<str>], _timeout: Duration, caller: &mut dyn Caller) -> Result<Versions> {
        let tensors = names.iter().map(|name| self.tensor(name)).collect::<Result<Vec<_>>>()?;
        let mut versions = Versions { client: self.client, tensors: Vec::with_capacity(names.len()) };
        for (k, tensor) in tensors.iter().enumerate() {
            let mut of_slices = Vec::with_capacity(tensor.slices.len());
            for slice in &tensor.slices {
                of_slices.push(self.pull_slice(slice, |at, bytes| caller.take(k, at, bytes))?);
            }
            versions.tensors.push((tensor.spec.name.clone(), of_slices));
        }
        Ok(versions)
    }

    fn pull_rows(&self, rows: &[Rows], _timeout: Duration, caller: &mut dyn Caller) -> Result<Versions> {
        let plan = |rows: &Rows| {
            let tensor = self.tensor(&rows.name)?;
            Ok((Plan::new(&tensor.spec, &rows.indices)?, tensor))
        };
        let plans = rows.iter().map(plan).collect::<Result<Vec<_>>>()?;
        let mut versions = Versions { client: self.client, tensors: Vec::with_capacity(rows.len()) };
        let mut values = Vec::new();
        for (k, (plan, tensor)) in plans.iter().enumerate() {
            let mut of_slices = Vec::with_capacity(plan.parts().len());
            for part in plan.parts() {
                let slice = &tensor.slices[part.slice];
                values.clear();
                of_slices.push(slice.pull_rows(self.client, plan.indices(part), &mut values)?);
                plan.scatter(part.elements.start, &values, |at, values| caller.take(k, at, values));
            }
            versions.tensors.push((tensor.spec.name.clone(), of_slices));
        }
        Ok(versions)
    }

    fn pull_async(&self, names: Vec<Arc<str>>, timeout: Duration) -> Result<Arc<dyn Ticket<Result<Pulled>>>> {
        let tensors = names.iter().map(|name| self.tensor(name)).collect::<Result<Vec<_>>>()?;
        let mut values: Vec<_> =
            tensors.iter().map(|tensor| Array::zeros(tensor.spec.dtype, tensor.spec.elements())).collect();
        let versions = self.pull(&names, timeout, &mut |k: usize, first: usize, bytes: &[u8]| {
            values[k].write(first, bytes);
        })?;
        Ok(Arc::new(Done(Ok(Pulled { values, versions }))))
    }

    fn assign(&self, gradient: &Gradient, timeout: Duration) -> Result<Receipt, PushError> {
        let tensor = self.tensor(&gradient.name)?;
        check::check_shape(gradient.borrow(), &tensor.spec)?;
        let values = gradient.values.view();
        check::check_values(self.shared.isa, values, &tensor.spec)?;
        let actions: Vec<(Action, &[u8])> =
            tensor.spec.slices().map(|range| (Action::Assign, values.get(range).bytes())).collect();
        self.change(&tensor, &actions, timeout)
    }

    fn state(&self, name: &str, _timeout: Duration) -> Result<State> {
        let tensor = self.tensor(name)?;
        let elements = tensor.spec.elements();
        let names = tensor.spec.optimizer.slots();
        let mut state = State {
            steps: Vec::new(),
            slots: names.into_iter().map(|name| (name, Array::zeros(tensor.spec.dtype, elements))).collect(),
        };
        for slice in &tensor.slices {
            let snapshot = slice.pull_state(self.client)?;
            state.steps.push(snapshot.step);
            let range = tensor.spec.slice_range(slice.index());
            for (k, (_, values)) in state.slots.iter_mut().enumerate() {
                values.write(range.start, &snapshot.as_ref()[k * slice.bytes()..][..slice.bytes()]);
            }
        }
        Ok(state)
    }

    fn load_state(&self, name: &str, state: &State, timeout: Duration) -> Result<Receipt, PushError> {
        let tensor = self.tensor(name)?;
        let bodies = check::state_bodies(&tensor.spec, state)?;
        let actions: Vec<(Action, &[u8])> = bodies
            .iter()
            .zip(&state.steps)
            .map(|(body, step)| (Action::AssignState { step: *step }, body.as_slice()))
            .collect();
        self.change(&tensor, &actions, timeout)
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
        Ok(Versions { client: self.client, tensors: names.iter().map(of).collect::<Result<_>>()? })
    }

    fn join(&self, group: &str, seat: &Seat, _timeout: Duration) -> Result<Joined> {
        self.join_group(group, seat)
    }

    fn leave(&self, group: &str, warm: bool, _timeout: Duration) -> Result<()> {
        self.leave_group(group, warm);
        Ok(())
    }

    fn advance(&self, group: &str, warm: bool, steps: u64, timeout: Duration) -> Result<Clocks> {
        self.advance_in(group, warm, steps, timeout)
    }

    fn portion(&self, ask: &Ask, wait: Duration, _timeout: Duration) -> Result<Answer> {
        self.ask_for_portion(ask, wait)
    }

    fn stats(&self, _timeout: Duration) -> Result<Stats> {
        self.refresh()?;
        let counters = self.shared.shard.counters();
        let counters = counters.into_iter().map(|(name, value)| (name.to_owned(), value)).collect();
        let own = [
            ("pushes", &self.pushed),
            ("bytes_pushed", &self.bytes_pushed),
            ("bytes_saved", &self.bytes_saved),
        ];
        let client = own.map(|(name, counter)| (name.to_owned(), counter.load(Ordering::Relaxed))).to_vec();
        Ok(Stats { shards: vec![(String::new(), counters)], client })
    }

    fn close(&self) {
        self.shared.shard.forget_client(self.client);
        lock(&self.shared.portions).forget_client(self.client);
    }
}

impl Drop for Store {
    fn drop(&mut self) {
        self.close();
    }
}

fn unknown(name: &str) -> Error {
    Error::new(Kind::UnknownTensor, "no tensor of this name is registered").tensor(name)
}
