//! The in-process store: one shard in the caller's memory, with the same verbs as a cluster of servers.

mod exchange;
mod groups;
mod portions;

pub use exchange::{Exchange, Exchanged, Take};
pub use groups::still_behind;

use crate::codec::{Codec, CodecId, ErrorFeedback, Position};
use crate::directory::{Directory, SharedTensor};
use crate::dtype::{Array, View};
use crate::error::{Error, Kind, Result};
use crate::frame::{Action, Applied, Base, Identity, Push};
use crate::held::{HeldDoubt, Residue};
use crate::isa::Isa;
use crate::mode::{Clocks, Joined, Seat};
use crate::outcome::{Collect, Outcomes};
use crate::outgoing;
use crate::policy::Policy;
use crate::portions::{Answer, Ask, Portions};
use crate::record::Sink;
use crate::shard::{Shard, ShardConfig};
use crate::slice::Slice;
use crate::sparse::{Gathered, Plan};
use crate::sync::{Arc, AtomicU64, Mutex, MutexGuard, Ordering, RwLock, lock, read, write};
use crate::tensor::{SliceId, TensorSpec};
use crate::verbs::{
    Caller, Done, Gradient, GradientRef, ParameterServer, Pulled, PushError, PushOptions, Pushed, Receipt,
    Rows, SliceVersion, State, Stats, Ticket, Versions,
};
use foldhash::fast::RandomState;
use groups::Seats;
use rayon::prelude::*;
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

/// Where the gradients of a push go.
#[derive(Debug)]
struct Places {
    generation: u64,
    tensors: Vec<Arc<Tensor>>,
    /// Of all tensors.
    elements: usize,
    /// Of all values, not encoded.
    bytes: u64,
    /// Sparse gradients: the rows that are pushed in place of the whole tensor.
    sparse: Vec<Option<Gathered>>,
}

impl Tensor {
    /// Of its values, not encoded.
    fn bytes(&self) -> u64 {
        (self.spec.dtype.size() * self.elements) as u64
    }
}

impl Places {
    fn new(generation: u64, tensors: Vec<Arc<Tensor>>) -> Self {
        let elements = tensors.iter().map(|tensor| tensor.elements).sum();
        let bytes = tensors.iter().map(|tensor| tensor.bytes()).sum();
        Self { generation, tensors, elements, bytes, sparse: Vec::new() }
    }

    /// All slices that the push touches, each with the index of its tensor.
    fn parts(&self) -> impl Iterator<Item = (usize, &Arc<Slice>)> {
        (0..self.tensors.len()).flat_map(|k| self.slices(k).map(move |slice| (k, slice)))
    }

    /// The slices of the k-th tensor that the push touches.
    fn slices(&self, k: usize) -> impl Iterator<Item = &Arc<Slice>> {
        let all = &self.tensors[k].slices;
        let rows = self.rows(k).map(|rows| rows.plan.parts());
        let dense = if rows.is_some() { &[] } else { all.as_slice() };
        dense.iter().chain(rows.unwrap_or_default().iter().map(|part| &all[part.slice]))
    }

    /// The rows that are pushed of the k-th tensor; `None`: all.
    fn rows(&self, k: usize) -> Option<&Gathered> {
        self.sparse.get(k)?.as_ref()
    }
}

/// What the slices of one push have in common.
struct UnderWay<'a> {
    identity: Identity,
    options: &'a PushOptions,
    /// Of the k-th tensor, in place of the one rate of all; may be empty.
    rates: &'a [Option<f64>],
    /// Made when a policy holds the first one.
    late: OnceLock<Arc<Collect>>,
}

impl<'o> UnderWay<'o> {
    fn new(identity: Identity, options: &'o PushOptions) -> Self {
        UnderWay { identity, options, rates: &[], late: OnceLock::new() }
    }

    /// The rate of the k-th tensor.
    #[inline(always)]
    fn lr(&self, k: usize) -> Option<f64> {
        self.rates.get(k).copied().flatten().or(self.options.lr)
    }

    /// What it does to one whole slice.
    #[inline(always)]
    fn of<'a>(&self, slice: &Slice, codec: CodecId, body: &'a [u8]) -> Push<'a> {
        Push {
            slice: slice.id(),
            action: Action::Gradient,
            identity: self.identity,
            base: None,
            lr: self.options.lr,
            scale: self.options.scale,
            momentum: None,
            correction: self.options.correction,
            count: slice.len() as u64,
            indices: None,
            codec,
            body,
            trusted: true,
            once: true,
        }
    }
}

/// What became of each slice, in the order of [`Places::parts`]; nothing yet of those that a policy holds.
type Answers = Vec<Option<Result<Applied>>>;

/// What a push that a policy holds waits for, and what it must not lose.
struct Held {
    late: Option<Arc<Collect>>,
    residues: Vec<(usize, Residue)>,
}

/// A tensor's values where they lie, in memory that other processes have, too.
#[derive(Clone, Debug)]
pub struct Live(Arc<SharedTensor>);

impl Live {
    /// What the tensor is.
    pub fn spec(&self) -> &TensorSpec {
        self.0.spec()
    }

    /// The first of as many values as the tensor has elements. Threads of other processes load and store them at any time:
    /// no reference to them may be made.
    pub fn as_ptr(&self) -> *const u8 {
        self.0.values()
    }
}

/// Gradients that are pushed again and again, and where they go.
#[derive(Debug)]
pub struct Bound {
    gradients: Arc<Vec<Gradient>>,
    places: Mutex<Places>,
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

    /// By what other processes of this user can open the store while this process lives, if its memory is shared; a
    /// forked child has an address of its own.
    pub fn address(&self) -> Option<String> {
        self.shared.directory.as_ref().map(Directory::address)
    }

    /// A tensor's values where they lie, for as long as what is returned lives; other threads and processes step them
    /// meanwhile.
    pub fn live(&self, name: &str) -> Result<Live> {
        let tensor = self.tensor(name)?;
        let shared = tensor.shared.clone().ok_or_else(|| {
            Error::new(Kind::Config, "only a shared store has values that can be looked at where they lie")
                .tensor(name)
                .expected("Store(shared=True)", "a store of one process")
        })?;
        Ok(Live(shared))
    }

    /// Takes up the tensors that other processes registered.
    fn refresh(&self) -> Result<()> {
        let Some(directory) = &self.shared.directory else { return Ok(()) };
        directory.news(|shared| {
            let spec = shared.spec().clone();
            let tensor = self.create(&spec, Some(shared))?;
            write(&self.shared.tensors).insert(spec.name.clone(), Arc::new(tensor));
            Ok(())
        })
    }

    /// Takes memory for a tensor, or takes up what is shared.
    fn create(&self, spec: &Arc<TensorSpec>, shared: Option<Arc<SharedTensor>>) -> Result<Tensor> {
        let ids: Vec<_> = (0..spec.slice_count())
            .map(|k| (SliceId(self.shared.next_slice.fetch_add(1, Ordering::Relaxed)), k))
            .collect();
        let group = self.group(&spec.group);
        self.shared.shard.create_in(shared.as_ref(), spec, group, &ids)?;
        let slices = ids.iter().map(|(id, _)| self.shared.shard.slice(*id)).collect::<Result<Vec<_>>>()?;
        Ok(Tensor { spec: spec.clone(), slices, elements: spec.elements(), shared })
    }

    /// Registers a tensor with all processes; the caller has seen to it that this one registers no other.
    fn publish(
        &self,
        directory: &Directory,
        spec: &TensorSpec,
        values: View<'_>,
        timeout: Duration,
    ) -> Result<()> {
        let _locked = directory.lock(timeout)?;
        self.refresh()?;
        if let Some(tensor) = self.tensors().get(&spec.name) {
            return same_spec(&tensor.spec, spec);
        }
        // What this process cannot hold, it publishes to nobody.
        drop(self.shared.shard.take_memory(spec, 0..spec.slice_count())?);
        directory.append(spec, values.bytes())?;
        self.refresh()
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

    /// Pushes gradients of memory that the caller lends for the call: [`ParameterServer::push`] without its owned list.
    pub fn push_borrowed(&self, gradients: &[GradientRef<'_>], options: &PushOptions) -> Pushed {
        let mut places = self.look_up(gradients.iter().map(|gradient| gradient.name))?;
        let specs = places.tensors.iter().map(|tensor| &*tensor.spec);
        let mut feedback = options.feedback.as_deref().map(lock);
        let both = gradients.iter().copied().zip(specs);
        outgoing::check(self.shared.isa, both.clone(), options, feedback.as_deref_mut())?;
        if gradients.iter().any(|gradient| gradient.indices.is_some()) {
            places.sparse = outgoing::gather(self.shared.isa, both, options)?;
            return self.push_sparse(&places, |k| gradients[k].values, options);
        }
        self.push_to(&places, |k| gradients[k].values, options, feedback)
    }

    /// Looks up where gradients go that will be pushed again and again, and checks their shapes.
    pub fn bind(&self, gradients: Arc<Vec<Gradient>>) -> Result<Bound> {
        let places = self.look_up(gradients.iter().map(|gradient| &*gradient.name))?;
        for (gradient, tensor) in gradients.iter().zip(&places.tensors) {
            outgoing::check_shape(gradient.borrow(), &tensor.spec)?;
        }
        Ok(Bound { gradients, places: Mutex::new(places) })
    }

    /// Pushes a bound list. Its tensors are looked up again only if one was unregistered since.
    pub fn push_bound(&self, bound: &Bound, options: &PushOptions) -> Pushed {
        let mut places = lock(&bound.places);
        let gradients = || bound.gradients.iter().map(Gradient::borrow);
        if places.generation != self.shared.generation.load(Ordering::Acquire) {
            *places = self.look_up(gradients().map(|gradient| gradient.name))?;
            for (gradient, tensor) in gradients().zip(&places.tensors) {
                outgoing::check_shape(gradient, &tensor.spec)?;
            }
        }
        let mut feedback = options.feedback.as_deref().map(lock);
        outgoing::check_options(options, feedback.is_some())?;
        outgoing::check_finite(self.shared.isa, gradients(), options, feedback.as_deref_mut())?;
        self.push_to(&places, |k| bound.gradients[k].values.view(), options, feedback)
    }

    fn look_up<'a>(&self, names: impl Iterator<Item = &'a str>) -> Result<Places> {
        let generation = self.shared.generation.load(Ordering::Acquire);
        let all = self.tensors();
        let mut tensors = Vec::new();
        let mut names = names.peekable();
        while let Some(tensor) = names.peek().and_then(|name| all.get(*name)) {
            tensors.push(tensor.clone());
            names.next();
        }
        drop(all);
        // Another process may have registered the rest.
        for name in names {
            tensors.push(self.tensor(name)?);
        }
        Ok(Places::new(generation, tensors))
    }

    /// Pushes what was checked; `values` of the k-th tensor.
    fn push_to<'a>(
        &self,
        places: &Places,
        values: impl Fn(usize) -> View<'a> + Sync,
        options: &PushOptions,
        feedback: Option<MutexGuard<'_, ErrorFeedback>>,
    ) -> Pushed {
        let push = UnderWay::new(self.identity(), options);
        if options.codec == Codec::Float32 && feedback.is_none() {
            let results = self.push_plain(places, &push, values);
            let held = Held { late: push.late.into_inner(), residues: Vec::new() };
            let sent = |k: usize| places.tensors[k].bytes();
            return self.settle(places, results, held, push.identity, options.timeout, sent);
        }
        let mut sent = vec![0; places.tensors.len()];
        let (results, residues) = self.push_encoded(places, &push, values, feedback, &mut sent)?;
        let held = Held { late: push.late.into_inner(), residues };
        self.settle(places, results, held, push.identity, options.timeout, |k| sent[k])
    }

    /// Pushes a list with sparse gradients in it.
    fn push_sparse<'a>(
        &self,
        places: &Places,
        values: impl Fn(usize) -> View<'a>,
        options: &PushOptions,
    ) -> Pushed {
        let push = UnderWay::new(self.identity(), options);
        let (codec, mut body) = (options.codec.id(), Vec::new());
        let (mut results, mut sent) = (Vec::new(), vec![0; places.tensors.len()]);
        for (k, tensor) in places.tensors.iter().enumerate() {
            let Some(Gathered { plan, values }) = places.rows(k) else {
                for slice in &tensor.slices {
                    self.encode(&mut body, values(k), slice, push.identity, options, None)?;
                    sent[k] += body.len() as u64;
                    let result = self.push_part(&push, (results.len(), k), slice, codec, &body);
                    results.push(result);
                }
                continue;
            };
            for (j, part) in plan.parts().iter().enumerate() {
                let (slice, values) = (&tensor.slices[part.slice], &values[part.elements.clone()]);
                let first_element = slice.range().start as u64;
                let position = Position { first_element, sequence: push.identity.sequence };
                let body = if options.codec == Codec::Float32 {
                    bytemuck::cast_slice(values)
                } else {
                    body.clear();
                    options.codec.encode(self.shared.isa, values, None, position, &mut body);
                    &body
                };
                let indices = plan.indices(part);
                sent[k] += (indices.bytes().len() + body.len()) as u64;
                let part = Push {
                    base: self.base(options, (k, j), slice),
                    count: values.len() as u64,
                    indices: Some(indices),
                    ..push.of(slice, codec, body)
                };
                let late = || push.late.get_or_init(Arc::default).expect(results.len());
                let result = self.shared.shard.push_to(slice, &part, late);
                results.push(result);
            }
        }
        let held = Held { late: push.late.into_inner(), residues: Vec::new() };
        self.settle(places, results, held, push.identity, options.timeout, |k| sent[k])
    }

    /// What a push to a slice is based on; the slice is probably the j-th that is known of the k-th tensor.
    #[inline(always)]
    fn base(&self, options: &PushOptions, (k, j): (usize, usize), slice: &Slice) -> Option<Base> {
        let versions = options.based_on.as_ref()?;
        let version = Versions::slice_near(versions.tensor_near(k, &slice.spec().name)?, j, slice.id())?;
        let own = (versions.client == self.client).then_some(version.own);
        Some(Base { version: version.version, own })
    }

    /// Pushes values as they are, a large push with several threads.
    fn push_plain<'a>(
        &self,
        places: &Places,
        push: &UnderWay<'_>,
        values: impl Fn(usize) -> View<'a> + Sync,
    ) -> Answers {
        let parts = places.parts().enumerate();
        if let Some(pool) = self.pool(places.elements) {
            let parts: Vec<_> = parts.collect();
            let one = |(part, (k, slice))| self.push_values(push, (part, k), slice, values(k));
            return pool.install(|| parts.into_par_iter().map(one).collect());
        }
        let mut results = Vec::with_capacity(places.tensors.len());
        for (part, (k, slice)) in parts {
            results.push(self.push_values(push, (part, k), slice, values(k)));
        }
        results
    }

    /// Pushes one slice of a tensor's values as they are. Inlined, as all that it calls up to the kernel: answers and
    /// scalars that go through memory from function to function cost a tenth of a small push.
    #[inline(always)]
    fn push_values(
        &self,
        push: &UnderWay<'_>,
        which: (usize, usize),
        slice: &Arc<Slice>,
        values: View<'_>,
    ) -> Option<Result<Applied>> {
        let codec = CodecId::plain(slice.spec().dtype);
        self.push_part(push, which, slice, codec, values.get(slice.range()).bytes())
    }

    /// Pushes encoded values; adds to `sent` the bytes of each tensor.
    fn push_encoded<'a>(
        &self,
        places: &Places,
        push: &UnderWay<'_>,
        values: impl Fn(usize) -> View<'a>,
        mut feedback: Option<MutexGuard<'_, ErrorFeedback>>,
        sent: &mut [u64],
    ) -> Result<(Answers, Vec<(usize, Residue)>)> {
        let UnderWay { identity, options, .. } = *push;
        let codec = options.codec.id();
        let (mut results, mut residues, mut body) = (Vec::new(), Vec::new(), Vec::new());
        for (part, (k, slice)) in places.parts().enumerate() {
            self.encode(&mut body, values(k), slice, identity, options, feedback.as_deref_mut())?;
            sent[k] += body.len() as u64;
            let result = self.push_part(push, (part, k), slice, codec, &body);
            if let (Some(guard), Some(feedback)) = (feedback.as_deref_mut(), &options.feedback) {
                let (name, range) = (&slice.spec().name, slice.range());
                match &result {
                    Some(Ok(_)) => {}
                    Some(Err(error)) if error.kind == Kind::StalePush => {}
                    Some(Err(_)) => {
                        guard.give_back(self.shared.isa, name, range.start, codec, &body, range.len())?;
                    }
                    None => residues.push((part, self.residue(slice, feedback, codec, &body))),
                }
            }
            results.push(result);
        }
        Ok((results, residues))
    }

    fn residue(
        &self,
        slice: &Arc<Slice>,
        feedback: &Arc<Mutex<ErrorFeedback>>,
        codec: CodecId,
        body: &[u8],
    ) -> Residue {
        let (slice, feedback) = (slice.clone(), feedback.clone());
        Residue { isa: self.shared.isa, slice, feedback, codec, body: body.to_vec() }
    }

    fn encode(
        &self,
        body: &mut Vec<u8>,
        values: View<'_>,
        slice: &Slice,
        identity: Identity,
        options: &PushOptions,
        feedback: Option<&mut ErrorFeedback>,
    ) -> Result<()> {
        let View::Float32(values) = values;
        let range = slice.range();
        let position = Position { first_element: range.start as u64, sequence: identity.sequence };
        let residual = match feedback {
            Some(feedback) => Some(&mut feedback.residual(&slice.spec().name, values.len())?[range.clone()]),
            None => None,
        };
        // Slices have one length, but for the last: nothing is cleared before it is overwritten.
        body.resize(options.codec.id().body_len(range.len()), 0);
        options.codec.encode_into(self.shared.isa, &values[range], residual, position, body);
        Ok(())
    }

    /// Pushes one slice, which is this part of the push and belongs to its k-th tensor; the answer, or nothing if a
    /// policy holds it.
    #[inline(always)]
    fn push_part(
        &self,
        push: &UnderWay<'_>,
        (part, k): (usize, usize),
        slice: &Arc<Slice>,
        codec: CodecId,
        body: &[u8],
    ) -> Option<Result<Applied>> {
        let base = self.base(push.options, (k, slice.index()), slice);
        let late = || push.late.get_or_init(Arc::default).expect(part);
        let what = Push { base, lr: push.lr(k), ..push.of(slice, codec, body) };
        self.shared.shard.push_to(slice, &what, late)
    }

    /// Waits for what a policy holds and makes receipts of all answers; `sent`: bytes of the k-th tensor.
    fn settle(
        &self,
        places: &Places,
        mut results: Answers,
        held: Held,
        identity: Identity,
        timeout: Duration,
        sent: impl Fn(usize) -> u64,
    ) -> Pushed {
        let mut residues: HashMap<usize, Residue> = held.residues.into_iter().collect();
        for (part, result) in held.late.map(|late| late.wait(timeout)).unwrap_or_default() {
            if let (Some(residue), Err(error)) = (residues.remove(&part), &result)
                && error.kind != Kind::StalePush
            {
                residue.give_back()?;
            }
            results[part] = Some(result);
        }
        if let Some(receipts) = receipts(places, &results, &sent) {
            self.count(receipts.iter().map(|receipt| receipt.bytes).sum(), places.bytes);
            return Ok(receipts);
        }
        let sent: Vec<_> = (0..places.tensors.len()).map(sent).collect();
        self.count(sent.iter().sum(), places.bytes);
        let mut outcome = Outcomes::default();
        for (part, ((k, slice), result)) in places.parts().zip(results).enumerate() {
            let name = slice.spec().name.clone();
            match result {
                Some(Ok(applied)) => outcome.applied.push((k, slice.range(), applied)),
                Some(Err(error)) => outcome.refused.push((name, slice.range(), error)),
                None => {
                    let doubt = HeldDoubt::new(slice.clone(), identity, residues.remove(&part));
                    outcome.in_doubt.push(Arc::new(doubt));
                }
            }
        }
        outcome.into_pushed(&|k| places.tensors[k].spec.name.clone(), &sent)
    }

    /// Counts a push of so many bytes, which would be so many uncompressed.
    fn count(&self, bytes: u64, plain: u64) {
        self.bytes_pushed.fetch_add(bytes, Ordering::Relaxed);
        self.bytes_saved.fetch_add(plain.saturating_sub(bytes), Ordering::Relaxed);
        self.pushed.fetch_add(1, Ordering::Relaxed);
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
        let results = tensor.slices.iter().enumerate().map(change).collect();
        let bytes = actions.iter().map(|(_, body)| body.len() as u64).sum();
        let places = Places::new(0, vec![tensor.clone()]);
        let held = Held { late: late.into_inner(), residues: Vec::new() };
        let mut receipts = self.settle(&places, results, held, identity, timeout, |_| bytes)?;
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
        spec.validate()?;
        outgoing::check_values(self.shared.isa, values, &spec)?;
        let _one_at_a_time = lock(&self.shared.registering);
        if let Some(directory) = &self.shared.directory {
            return self.publish(directory, &spec, values, timeout);
        }
        if let Ok(tensor) = self.tensor(&spec.name) {
            return same_spec(&tensor.spec, &spec);
        }
        let spec = Arc::new(spec);
        let tensor = Arc::new(self.create(&spec, None)?);
        let actions: Vec<(Action, &[u8])> =
            spec.slices().map(|range| (Action::Assign, values.get(range).bytes())).collect();
        if let Err(error) = self.change(&tensor, &actions, timeout) {
            self.shared.shard.remove(&tensor.slices.iter().map(|slice| slice.id()).collect::<Vec<_>>());
            return Err(match error {
                PushError::Refused(error) => error,
                PushError::Partial(partial) => partial.error,
            });
        }
        let mut tensors = write(&self.shared.tensors);
        tensors.insert(spec.name.clone(), tensor);
        Ok(())
    }

    fn unregister(&self, name: &str, _timeout: Duration) -> Result<()> {
        if self.shared.directory.is_some() {
            self.tensor(name)?;
            let error =
                Error::new(Kind::Config, "a shared store keeps its tensors: other processes may step them");
            return Err(error.tensor(name));
        }
        let mut tensors = write(&self.shared.tensors);
        let tensor = tensors.remove(name).ok_or_else(|| unknown(name))?;
        self.shared.generation.fetch_add(1, Ordering::Release);
        drop(tensors);
        self.shared.shard.remove(&tensor.slices.iter().map(|slice| slice.id()).collect::<Vec<_>>());
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

    fn push_for(&self, _caller: &mut dyn Caller, gradients: &[Gradient], options: &PushOptions) -> Pushed {
        let borrowed: Vec<_> = gradients.iter().map(Gradient::borrow).collect();
        self.push_borrowed(&borrowed, options)
    }

    fn push_async(&self, gradients: Vec<Gradient>, options: PushOptions) -> Result<Arc<dyn Ticket<Pushed>>> {
        match self.push(&gradients, &options) {
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
        let receipts = self.push(gradients, options)?;
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
        outgoing::check_shape(gradient.borrow(), &tensor.spec)?;
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

/// The receipts of all tensors, if every slice applied its part; `sent`: bytes of the k-th tensor.
fn receipts(
    places: &Places,
    results: &[Option<Result<Applied>>],
    sent: impl Fn(usize) -> u64,
) -> Option<Vec<Receipt>> {
    let mut results = results.iter();
    let mut receipts = Vec::with_capacity(places.tensors.len());
    for (k, tensor) in places.tensors.iter().enumerate() {
        let mut receipt = Receipt::of_nothing(sent(k));
        let slices = places.rows(k).map_or(tensor.slices.len(), |rows| rows.plan.parts().len());
        for result in results.by_ref().take(slices) {
            let Some(Ok(applied)) = result else { return None };
            receipt.add(applied);
        }
        receipts.push(receipt.done());
    }
    Some(receipts)
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
