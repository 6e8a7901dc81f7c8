//! The in-process store: one shard in the caller's memory, with the same verbs as a cluster of servers.

use crate::codec::{Codec, CodecId, ErrorFeedback, Position};
use crate::dtype::{Array, View};
use crate::error::{Error, Kind, Result};
use crate::frame::{Action, Base, Identity, Push};
use crate::isa::Isa;
use crate::outcome::{Collect, Outcomes};
use crate::outgoing;
use crate::policy::{Immediate, Policy};
use crate::record::{NoSink, Sink};
use crate::shard::{Shard, ShardConfig};
use crate::slice::{Resolved, Slice};
use crate::sync::{Arc, AtomicU64, Mutex, Ordering, RwLock, lock};
use crate::tensor::{SliceId, TensorSpec};
use crate::verbs::{
    Done, Fate, Gradient, InDoubt, ParameterServer, Pulled, PushError, PushOptions, Pushed, Receipt,
    Sink as ValueSink, SliceVersion, State, Stats, Ticket, Versions,
};
use rayon::prelude::*;
use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::{OnceLock, PoisonError};
use std::time::Duration;

/// How a store is made.
#[derive(Clone, Debug)]
pub struct StoreOptions {
    /// Threads that one call may use, its own included; `None` = as many as the machine has cores.
    pub threads: Option<usize>,
    /// Most bytes of parameters and state.
    pub memory_limit: u64,
    /// When pushes are applied.
    pub policy: Arc<dyn Policy>,
    /// Where records go.
    pub sink: Arc<dyn Sink>,
}

impl Default for StoreOptions {
    fn default() -> Self {
        Self { threads: None, memory_limit: u64::MAX, policy: Arc::new(Immediate), sink: Arc::new(NoSink) }
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
}

#[derive(Debug)]
struct Shared {
    isa: Isa,
    shard: Shard,
    threads: usize,
    pool: OnceLock<Option<rayon::ThreadPool>>,
    tensors: RwLock<BTreeMap<Arc<str>, Arc<Tensor>>>,
    registering: Mutex<()>,
    next_slice: AtomicU64,
    next_client: AtomicU64,
}

#[derive(Debug)]
struct Tensor {
    spec: Arc<TensorSpec>,
    slices: Vec<Arc<Slice>>,
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
        let mut config = ShardConfig::new(0, options.memory_limit, isa);
        (config.policy, config.sink) = (options.policy, options.sink);
        let shared = Shared {
            isa,
            shard: Shard::new(config),
            threads,
            pool: OnceLock::new(),
            tensors: RwLock::default(),
            registering: Mutex::default(),
            next_slice: AtomicU64::new(1),
            next_client: AtomicU64::new(1),
        };
        Ok(Self::of(Arc::new(shared)))
    }

    fn of(shared: Arc<Shared>) -> Self {
        let client = shared.next_client.fetch_add(1, Ordering::Relaxed);
        let zero = || AtomicU64::new(0);
        Self { shared, client, sequence: zero(), pushed: zero(), bytes_pushed: zero(), bytes_saved: zero() }
    }

    fn tensor(&self, name: &str) -> Result<Arc<Tensor>> {
        let tensors = self.shared.tensors.read().unwrap_or_else(PoisonError::into_inner);
        tensors.get(name).cloned().ok_or_else(|| unknown(name))
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

    fn push_checked(
        &self,
        gradients: &[Gradient],
        options: &PushOptions,
    ) -> Result<(Vec<Arc<Tensor>>, Pushed)> {
        let tensors = gradients.iter().map(|g| self.tensor(&g.name)).collect::<Result<Vec<_>>>()?;
        let mut feedback = options.feedback.as_deref().map(lock);
        let specs = tensors.iter().map(|tensor| &*tensor.spec);
        outgoing::check(self.shared.isa, gradients, specs, options, feedback.as_deref_mut())?;
        let identity = self.identity();
        let parts = parts(&tensors);
        let collect = Collect::new(parts.len());
        let mut bytes = vec![0; gradients.len()];
        if options.codec == Codec::Float32 && feedback.is_none() {
            let elements = parts.iter().map(|part| part.range.len()).sum();
            let one = |(k, part): (usize, &Part)| {
                let body = gradients[part.tensor].values.view().get(part.range.clone()).bytes();
                self.push_part(&collect, k, part, identity, options, CodecId::Float32, body);
            };
            match self.pool(elements) {
                Some(pool) => pool.install(|| parts.par_iter().enumerate().for_each(one)),
                None => parts.iter().enumerate().for_each(one),
            }
            for part in &parts {
                bytes[part.tensor] += part.slice.bytes() as u64;
            }
        } else {
            let mut body = Vec::new();
            for (k, part) in parts.iter().enumerate() {
                self.encode(&mut body, gradients, part, identity, options, feedback.as_deref_mut())?;
                bytes[part.tensor] += body.len() as u64;
                self.push_part(&collect, k, part, identity, options, options.codec.id(), &body);
                if let (Some(feedback), true) = (feedback.as_deref_mut(), collect.was_refused(k)) {
                    let gradient = &gradients[part.tensor];
                    let (first, n) = (part.range.start, part.range.len());
                    feedback.give_back(
                        self.shared.isa,
                        &gradient.name,
                        first,
                        options.codec.id(),
                        &body,
                        n,
                    )?;
                }
            }
        }
        let pushed = self.settle(gradients, &parts, &collect, identity, options.timeout, &bytes);
        Ok((tensors, pushed))
    }

    fn encode(
        &self,
        body: &mut Vec<u8>,
        gradients: &[Gradient],
        part: &Part,
        identity: Identity,
        options: &PushOptions,
        feedback: Option<&mut ErrorFeedback>,
    ) -> Result<()> {
        let gradient = &gradients[part.tensor];
        let View::Float32(values) = gradient.values.view();
        let position = Position { first_element: part.range.start as u64, sequence: identity.sequence };
        let residual = match feedback {
            Some(feedback) => Some(&mut feedback.residual(&gradient.name, values.len())?[part.range.clone()]),
            None => None,
        };
        body.clear();
        options.codec.encode(self.shared.isa, &values[part.range.clone()], residual, position, body);
        Ok(())
    }

    #[allow(clippy::too_many_arguments)] // one push has that many sides
    fn push_part(
        &self,
        collect: &Arc<Collect>,
        k: usize,
        part: &Part,
        identity: Identity,
        options: &PushOptions,
        codec: CodecId,
        body: &[u8],
    ) {
        let base = options.based_on.as_ref().and_then(|versions| {
            let version = versions.tensor(&part.slice.spec().name)?.get(part.slice.index())?;
            let own = (versions.client == self.client).then_some(version.own);
            Some(Base { version: version.version, own })
        });
        let push = Push {
            slice: part.slice.id(),
            action: Action::Gradient,
            identity,
            base,
            lr: options.lr,
            scale: options.scale,
            count: part.range.len() as u64,
            codec,
            body,
            trusted: true,
        };
        let collect = collect.clone();
        self.shared.shard.push(&push, move |result| collect.put(k, result));
    }

    /// Waits for every slice and makes receipts of their answers.
    fn settle(
        &self,
        gradients: &[Gradient],
        parts: &[Part],
        collect: &Collect,
        identity: Identity,
        timeout: Duration,
        bytes: &[u64],
    ) -> Pushed {
        let results = collect.wait(timeout);
        let mut outcome = Outcomes::default();
        for (part, result) in parts.iter().zip(results) {
            let name = gradients[part.tensor].name.clone();
            match result {
                Some(Ok(applied)) => outcome.applied.push((part.tensor, part.range.clone(), applied)),
                Some(Err(error)) => outcome.refused.push((name, part.range.clone(), error)),
                None => outcome.in_doubt.push(Arc::new(HeldDoubt {
                    slice: part.slice.clone(),
                    range: part.range.clone(),
                    identity,
                })),
            }
        }
        self.bytes_pushed.fetch_add(bytes.iter().sum(), Ordering::Relaxed);
        let plain: u64 = parts.iter().map(|part| part.slice.bytes() as u64).sum();
        self.bytes_saved.fetch_add(plain.saturating_sub(bytes.iter().sum()), Ordering::Relaxed);
        self.pushed.fetch_add(1, Ordering::Relaxed);
        outcome.into_pushed(gradients, bytes)
    }

    fn change(
        &self,
        tensor: &Tensor,
        actions: &[(Action, &[u8])],
        timeout: Duration,
    ) -> Result<Receipt, PushError> {
        let identity = self.identity();
        let collect = Collect::new(tensor.slices.len());
        for (k, (slice, (action, body))) in tensor.slices.iter().zip(actions).enumerate() {
            let push = Push {
                slice: slice.id(),
                action: *action,
                identity,
                base: None,
                lr: None,
                scale: None,
                count: slice.len() as u64,
                codec: CodecId::plain(tensor.spec.dtype),
                body,
                trusted: false,
            };
            let collect = collect.clone();
            self.shared.shard.push(&push, move |result| collect.put(k, result));
        }
        let name = &tensor.spec.name;
        let gradients = [Gradient {
            name: name.clone(),
            shape: Vec::new(),
            values: Arc::new(Array::zeros(tensor.spec.dtype, 0)),
        }];
        let bytes = actions.iter().map(|(_, body)| body.len() as u64).sum();
        let parts: Vec<_> = tensor
            .slices
            .iter()
            .map(|slice| Part {
                tensor: 0,
                slice: slice.clone(),
                range: tensor.spec.slice_range(slice.index()),
            })
            .collect();
        let mut receipts = self.settle(&gradients, &parts, &collect, identity, timeout, &[bytes])?;
        receipts.pop().ok_or_else(|| Error::new(Kind::Internal, "a change without a receipt").into())
    }
}

/// The slices of a push, in the order of its tensors.
fn parts(tensors: &[Arc<Tensor>]) -> Vec<Part> {
    let of = |(k, tensor): (usize, &Arc<Tensor>)| {
        let part = move |slice: &Arc<Slice>| (k, slice.clone());
        tensor.slices.iter().map(part).collect::<Vec<_>>()
    };
    let all = tensors.iter().enumerate().flat_map(of);
    all.map(|(tensor, slice)| Part { tensor, range: slice.spec().slice_range(slice.index()), slice })
        .collect()
}

#[derive(Debug)]
struct Part {
    tensor: usize,
    slice: Arc<Slice>,
    range: Range<usize>,
}

/// A slice whose push a policy still held at the deadline.
#[derive(Debug)]
struct HeldDoubt {
    slice: Arc<Slice>,
    range: Range<usize>,
    identity: Identity,
}

impl InDoubt for HeldDoubt {
    fn tensor(&self) -> &Arc<str> {
        &self.slice.spec().name
    }
    fn shard(&self) -> u32 {
        0
    }
    fn elements(&self) -> Range<usize> {
        self.range.clone()
    }
    fn result(&self, _timeout: Duration) -> Result<Fate> {
        Ok(match self.slice.resolve(self.identity)? {
            Resolved::Applied(applied) => Fate::Applied { version: applied.version },
            Resolved::Fenced => Fate::Fenced,
            Resolved::Unknown => Fate::Unknown,
        })
    }
}

impl ParameterServer for Store {
    fn client(&self) -> u64 {
        self.client
    }

    fn another(&self) -> Result<Arc<dyn ParameterServer>> {
        Ok(Arc::new(Self::of(self.shared.clone())))
    }

    fn register(&self, spec: TensorSpec, values: View<'_>, timeout: Duration) -> Result<()> {
        spec.validate()?;
        outgoing::check_values(self.shared.isa, values, &spec)?;
        let _one_at_a_time = lock(&self.shared.registering);
        if let Ok(tensor) = self.tensor(&spec.name) {
            return same_spec(&tensor.spec, &spec);
        }
        let spec = Arc::new(spec);
        let ids: Vec<_> = (0..spec.slice_count())
            .map(|k| (SliceId(self.shared.next_slice.fetch_add(1, Ordering::Relaxed)), k))
            .collect();
        self.shared.shard.create(&spec, 0, &ids)?;
        let slices = ids.iter().map(|(id, _)| self.shared.shard.slice(*id)).collect::<Result<Vec<_>>>()?;
        let tensor = Arc::new(Tensor { spec: spec.clone(), slices });
        let actions: Vec<(Action, &[u8])> =
            spec.slices().map(|range| (Action::Assign, values.get(range).bytes())).collect();
        if let Err(error) = self.change(&tensor, &actions, timeout) {
            self.shared.shard.remove(&ids.iter().map(|(id, _)| *id).collect::<Vec<_>>());
            return Err(match error {
                PushError::Refused(error) => error,
                PushError::Partial(partial) => partial.error,
            });
        }
        let mut tensors = self.shared.tensors.write().unwrap_or_else(PoisonError::into_inner);
        tensors.insert(spec.name.clone(), tensor);
        Ok(())
    }

    fn unregister(&self, name: &str, _timeout: Duration) -> Result<()> {
        let mut tensors = self.shared.tensors.write().unwrap_or_else(PoisonError::into_inner);
        let tensor = tensors.remove(name).ok_or_else(|| unknown(name))?;
        drop(tensors);
        self.shared.shard.remove(&tensor.slices.iter().map(|slice| slice.id()).collect::<Vec<_>>());
        Ok(())
    }

    fn spec(&self, name: &str, _timeout: Duration) -> Result<Arc<TensorSpec>> {
        Ok(self.tensor(name)?.spec.clone())
    }

    fn names(&self, _timeout: Duration) -> Result<Vec<Arc<str>>> {
        Ok(self.shared.tensors.read().unwrap_or_else(PoisonError::into_inner).keys().cloned().collect())
    }

    fn push(&self, gradients: &[Gradient], options: &PushOptions) -> Pushed {
        self.push_checked(gradients, options)?.1
    }

    fn push_async(&self, gradients: Vec<Gradient>, options: PushOptions) -> Result<Arc<dyn Ticket<Pushed>>> {
        Ok(Arc::new(Done(self.push_checked(&gradients, &options)?.1)))
    }

    fn push_pull(
        &self,
        gradients: &[Gradient],
        options: &PushOptions,
        sink: &mut ValueSink<'_>,
    ) -> Result<(Vec<Receipt>, Versions), PushError> {
        let (_, pushed) = self.push_checked(gradients, options)?;
        let receipts = pushed?;
        let names: Vec<_> = gradients.iter().map(|g| g.name.clone()).collect();
        Ok((receipts, self.pull(&names, options.timeout, sink)?))
    }

    fn pull(&self, names: &[Arc<str>], _timeout: Duration, sink: &mut ValueSink<'_>) -> Result<Versions> {
        let tensors = names.iter().map(|name| self.tensor(name)).collect::<Result<Vec<_>>>()?;
        let mut versions = Versions { client: self.client, tensors: Vec::with_capacity(names.len()) };
        for (k, tensor) in tensors.iter().enumerate() {
            let mut of_slices = Vec::with_capacity(tensor.slices.len());
            for slice in &tensor.slices {
                let snapshot = slice.pull(self.client);
                sink(k, tensor.spec.slice_range(slice.index()).start, snapshot.as_ref());
                of_slices.push(SliceVersion {
                    slice: slice.id(),
                    version: snapshot.version,
                    own: snapshot.own,
                });
            }
            versions.tensors.push((tensor.spec.name.clone(), of_slices));
        }
        Ok(versions)
    }

    fn pull_async(&self, names: Vec<Arc<str>>, timeout: Duration) -> Result<Arc<dyn Ticket<Result<Pulled>>>> {
        let tensors = names.iter().map(|name| self.tensor(name)).collect::<Result<Vec<_>>>()?;
        let mut values: Vec<_> =
            tensors.iter().map(|tensor| Array::zeros(tensor.spec.dtype, tensor.spec.elements())).collect();
        let versions = self.pull(&names, timeout, &mut |k, first, bytes: &[u8]| {
            values[k].write(first, bytes);
        })?;
        Ok(Arc::new(Done(Ok(Pulled { values, versions }))))
    }

    fn assign(&self, gradient: &Gradient, timeout: Duration) -> Result<Receipt, PushError> {
        let tensor = self.tensor(&gradient.name)?;
        outgoing::check_shape(gradient, &tensor.spec)?;
        let values = gradient.values.view();
        outgoing::check_values(self.shared.isa, values, &tensor.spec)?;
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
            let snapshot = slice.pull_state(self.client);
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
        let bodies = outgoing::state_bodies(&tensor.spec, state)?;
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

    fn stats(&self, _timeout: Duration) -> Result<Stats> {
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

/// A second registration must be the same as the first.
pub fn same_spec(first: &TensorSpec, second: &TensorSpec) -> Result<()> {
    if first == second {
        return Ok(());
    }
    Err(Error::new(Kind::Config, "the tensor is registered with another spec")
        .tensor(first.name.clone())
        .expected(first, second))
}
