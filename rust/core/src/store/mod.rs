//! The in-process store: one shard in the caller's process, without a network, behind the same
//! [`ParameterServer`] interface as a cluster of servers.

mod deadlines;
mod exchange;
mod groups;
mod later;
mod live;
mod past;
mod places;
mod portions;
mod pull;
mod push;
mod push_tensors;
mod register;
mod settle;
mod team;
mod vectors;

pub use exchange::{Exchange, Exchanged, How, Outcome, Take};
pub use groups::still_behind;
pub use live::Live;
pub use past::Past;
pub use push::Bound;
pub use register::same_spec;
pub use team::Team;

use crate::base::error::{Error, Kind, Result, unknown_tensor};
use crate::base::isa::Isa;
use crate::base::sync::{Arc, AtomicU64, Mutex, Ordering, RwLock, lock, read};
use crate::coordination::portions::Portions;
use crate::coordination::spaces::Spaces;
use crate::shard::{Shard, ShardConfig};
use crate::slice::Slice;
use crate::slice::frame::Identity;
use crate::slice::policy::Policy;
use crate::slice::record::Sink;
use crate::tensor::TensorSpec;
use crate::tensor::shared_directory::{Directory, SharedTensor};
use crate::verbs::{ParameterServer, Stats};
use deadlines::Deadlines;
use foldhash::fast::RandomState;
use groups::Seats;
use std::collections::HashMap;
use std::sync::{OnceLock, RwLockReadGuard};
use std::time::Duration;

/// Options of a store.
#[derive(Clone, Debug)]
pub struct StoreOptions {
    /// Threads that one call may use, including the calling one; `None`: one per core of the machine.
    pub threads: Option<usize>,
    /// Most bytes of memory for all purposes together.
    pub memory_limit: u64,
    /// Decides when pushes are applied; `None`: the modes of the groups do.
    pub policy: Option<Arc<dyn Policy>>,
    /// Receives the records of changes, if any are wanted.
    pub sink: Option<Arc<dyn Sink>>,
    /// The memory that the store uses.
    pub memory: StoreMemory,
}

/// The memory that a store uses.
#[derive(Clone, Debug, Default)]
pub enum StoreMemory {
    /// Private to this process.
    #[default]
    Private,
    /// New memory that other processes can open by [`Store::address`].
    Shared,
    /// Memory that has this address in another process.
    Opened(String),
}

impl Default for StoreOptions {
    fn default() -> Self {
        Self { threads: None, memory_limit: u64::MAX, policy: None, sink: None, memory: StoreMemory::Private }
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
    shard: Arc<Shard>,
    /// The tensors of all processes, where the memory is shared.
    directory: Option<Directory>,
    threads: usize,
    pool: OnceLock<Option<rayon::ThreadPool>>,
    tensors: RwLock<Tensors>,
    /// Changes when a tensor is removed; bound lists then look their tensors up again.
    generation: AtomicU64,
    registering: Mutex<()>,
    /// The number of each group, by name.
    groups: Mutex<HashMap<Arc<str>, u32, RandomState>>,
    portions: Mutex<Portions>,
    spaces: Mutex<Spaces>,
    deadlines: Deadlines,
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
    /// Bytes of its values, not encoded.
    fn bytes(&self) -> u64 {
        (self.spec.dtype.size() * self.elements) as u64
    }
}

/// Number of elements from which a call uses more than one thread.
const MIN_PARALLEL_ELEMENTS: usize = 1 << 19;

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
            StoreMemory::Private => None,
            StoreMemory::Shared => Some(Directory::create()?),
            StoreMemory::Opened(address) => Some(Directory::open(&address)?),
        };
        let mut config = ShardConfig::new(0, options.memory_limit, isa);
        (config.policy, config.sink) = (options.policy, options.sink);
        let shard = Arc::new(Shard::new(config));
        let deadlines = Deadlines::of(&shard);
        let portions = Mutex::new(Portions::new(0, shard.meter().clone()));
        let spaces = Mutex::new(Spaces::new(0, shard.meter().clone()));
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
            spaces,
            deadlines,
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
        let tensors = self.tensors();
        tensors.get(name).cloned().ok_or_else(|| unknown(name, &tensors))
    }

    fn tensors(&self) -> RwLockReadGuard<'_, Tensors> {
        read(&self.shared.tensors)
    }

    fn identity(&self) -> Identity {
        Identity { client: self.client, sequence: self.sequence.fetch_add(1, Ordering::Relaxed) + 1 }
    }

    /// The store's own threads, started by the first call that is large enough for them.
    fn pool(&self, elements: usize) -> Option<&rayon::ThreadPool> {
        if elements < MIN_PARALLEL_ELEMENTS || self.shared.threads == 1 {
            return None;
        }
        let build = || rayon::ThreadPoolBuilder::new().num_threads(self.shared.threads).build().ok();
        self.shared.pool.get_or_init(build).as_ref()
    }
}

impl ParameterServer for Store {
    fn known_tensors(&self) -> usize {
        read(&self.shared.tensors).len()
    }

    fn client(&self) -> u64 {
        self.client
    }

    fn another(&self) -> Result<Arc<dyn ParameterServer>> {
        Ok(Arc::new(self.sibling()))
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
        Ok(Stats { shards: vec![(String::new(), counters)], client, ..Stats::default() })
    }

    fn close(&self, _within: Duration) {
        let _ends = self.shared.deadlines.end_complete_at_last();
        self.shared.shard.forget_client(self.client);
        lock(&self.shared.portions).forget_client(self.client);
        lock(&self.shared.spaces).forget_client(self.client);
    }
}

impl Drop for Store {
    fn drop(&mut self) {
        self.close(Duration::ZERO);
    }
}

fn unknown(name: &str, tensors: &Tensors) -> Error {
    unknown_tensor("no tensor of this name is registered", name, tensors.keys().map(|known| &**known))
}
