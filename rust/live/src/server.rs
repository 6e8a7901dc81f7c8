//! The parameter server of a run: a shard of the core, called without ever waiting.

use crate::problems::{Problem, digits};
use crate::settings::Settings;
use fastps_core::codec::CodecId;
use fastps_core::error::{Error, Kind, Result};
use fastps_core::frame::{Action, Base, Identity, Push};
use fastps_core::isa::Isa;
use fastps_core::record::{Record, Sink};
use fastps_core::shard::{Shard, ShardConfig};
use fastps_core::slice::Slice;
use fastps_core::tensor::{SliceId, TensorSpec};
use std::ops::Range;
use std::sync::{Arc, Mutex, PoisonError};

/// Most bytes of a run's slices and what belongs to them.
const MEMORY: u64 = 1 << 28;
/// The group of all tensors.
pub(crate) const GROUP: u32 = 0;

/// Settings in force at the last update.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct InForce {
    /// The learning rate.
    pub(crate) lr: f64,
    /// The momentum.
    pub(crate) momentum: f64,
}

#[derive(Debug, Default)]
struct Last(Mutex<InForce>);

impl Sink for Last {
    fn record(&self, record: &Record<'_>) {
        if record.action == Action::Gradient {
            let mut last = self.0.lock().unwrap_or_else(PoisonError::into_inner);
            *last = InForce { lr: record.lr, momentum: record.momentum };
        }
    }
}

/// A tensor of one slice, and its range among all values.
#[derive(Debug)]
pub(crate) struct Tensor {
    pub(crate) slice: Arc<Slice>,
    pub(crate) range: Range<usize>,
}

impl Tensor {
    pub(crate) fn name(&self) -> &Arc<str> {
        &self.slice.spec().name
    }
}

/// The shard with the tensors of a problem.
#[derive(Debug)]
pub(crate) struct Server {
    pub(crate) isa: Isa,
    pub(crate) shard: Shard,
    pub(crate) tensors: Vec<Tensor>,
    last: Arc<Last>,
    clients: u64,
}

impl Server {
    /// A server whose tensors have these values.
    pub(crate) fn new(settings: &Settings, values: &[f32]) -> Result<Self> {
        let (isa, last) = (Isa::get()?, Arc::<Last>::default());
        let mut config = ShardConfig::new(0, MEMORY, isa);
        config.sink = Some(last.clone());
        // The first client registers the tensors.
        let mut server = Self { isa, shard: Shard::new(config), tensors: Vec::new(), last, clients: 1 };
        let shapes: &[(&str, &[u64])] = match settings.problem {
            Problem::Toy(_) => &[("w", &[2])],
            Problem::Digits => &digits::TENSORS,
        };
        let mut at = 0;
        for (k, (name, shape)) in shapes.iter().enumerate() {
            let spec = Arc::new(TensorSpec::new(*name, shape.to_vec(), settings.optimizer));
            let (id, range) = (SliceId(k as u64 + 1), at..at + spec.elements());
            at = range.end;
            server.shard.create(&spec, GROUP, &[(id, 0)])?;
            let tensor = Tensor { slice: server.shard.slice(id)?, range };
            server.assign(&tensor, k as u64 + 1, &values[tensor.range.clone()])?;
            server.tensors.push(tensor);
        }
        Ok(server)
    }

    fn assign(&self, tensor: &Tensor, sequence: u64, values: &[f32]) -> Result<()> {
        let push = Push {
            action: Action::Assign,
            identity: Identity { client: 1, sequence },
            ..gradient(&tensor.slice, CodecId::Float32, bytemuck::cast_slice(values))
        };
        let unused = || -> fastps_core::identity::Completion { Box::new(drop) };
        match self.shard.push_to(&tensor.slice, &push, unused) {
            Some(result) => result.map(drop),
            None => Err(Error::new(Kind::Internal, "an assignment was held")),
        }
    }

    /// The number of a new client.
    pub(crate) fn admit(&mut self) -> u64 {
        self.clients += 1;
        self.clients
    }

    /// Number of all values.
    pub(crate) fn len(&self) -> usize {
        self.tensors.last().map_or(0, |tensor| tensor.range.end)
    }

    /// Copies all values as a client gets them, and returns the version of each tensor.
    pub(crate) fn pull(&self, client: u64, values: &mut [f32]) -> Result<Vec<Base>> {
        let pull = |tensor: &Tensor| {
            let snapshot = tensor.slice.pull(client)?;
            values[tensor.range.clone()].copy_from_slice(bytemuck::cast_slice(snapshot.as_ref()));
            Ok(Base { version: snapshot.version, own: Some(snapshot.own) })
        };
        self.tensors.iter().map(pull).collect()
    }

    /// The largest version of a tensor; its registration made the first.
    pub(crate) fn version(&self) -> u64 {
        self.tensors.iter().map(|tensor| tensor.slice.version(0).0).max().unwrap_or(0)
    }

    /// Settings in force at the last update.
    pub(crate) fn in_force(&self) -> InForce {
        *self.last.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A gradient for a whole slice; the caller adds identity and settings.
pub(crate) fn gradient<'a>(slice: &Slice, codec: CodecId, body: &'a [u8]) -> Push<'a> {
    Push {
        once: true,
        ..Push::gradient(slice.id(), Identity { client: 0, sequence: 0 }, slice.len() as u64, codec, body)
    }
}
