//! The calls of batch optimizers: vectors beside the tensors, programs on them, and batches of portions.

use super::values::{Caller, Gradient};
use crate::base::error::Result;
use crate::coordination::batch::BatchTask;
use crate::coordination::spaces::{BatchReport, ReplicaAnswer, ReplicaRequest, Seat, SeatRequest, SpaceSpec};
use crate::tensor::SpaceId;
use crate::tensor::program::{Command, Program};
use std::sync::Arc;
use std::time::Duration;

/// A space that a call has opened, or found open.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OpenedSpace {
    /// The space.
    pub spec: SpaceSpec,
    /// Set if this call opened it.
    pub new: bool,
    /// The largest term that a slice knows.
    pub term: u64,
    /// The largest number of a program that a slice has run.
    pub last: u64,
}

/// A space, for people.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SpaceInfo {
    /// The space.
    pub spec: SpaceSpec,
    /// The name of its coordinator.
    pub coordinator: Option<Arc<str>>,
}

/// A vector to pull.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct VectorPull {
    /// The space.
    pub space: SpaceId,
    /// Index of the vector; 0: the tensors themselves.
    pub vector: u32,
    /// If given, the pull fails with `StalePush` unless the sum of this batch is open.
    pub batch: Option<u64>,
}

/// Vectors over tensors: spaces of them, programs, sums of portions, and the batches that coordinators and
/// replicas compute together.
pub trait VectorSpaces: Send + Sync {
    /// Opens a space: `vectors` over `tensors`, which must be `exact` and of one dtype. All of its vectors
    /// are 0. Finds it if it is open already with the same tensors and vectors. On an error no slice keeps
    /// memory.
    fn open_space(
        &self,
        name: &Arc<str>,
        tensors: &[Arc<str>],
        vectors: &[Arc<str>],
        keep_for: Duration,
        timeout: Duration,
    ) -> Result<OpenedSpace>;
    /// Closes a space and frees its vectors; does nothing if it is not open.
    fn close_space(&self, space: SpaceId, timeout: Duration) -> Result<()>;
    /// All open spaces, by name.
    fn spaces(&self, timeout: Duration) -> Result<Vec<SpaceInfo>>;
    /// Takes the coordinator's seat of a space, leaves it, or stores the coordinator's state.
    fn coordinate(&self, space: SpaceId, request: &SeatRequest, timeout: Duration) -> Result<Seat>;
    /// Runs a program on every slice of the space, whole or not at all per slice. Returns each slice's
    /// results, tensor by tensor. A slice that has run it already answers with the results that it remembers;
    /// so after an error the same program can be sent again.
    fn run_program(
        &self,
        command: Command,
        program: &Arc<Program>,
        timeout: Duration,
    ) -> Result<Vec<Vec<f64>>>;
    /// Pulls a vector into the caller's memory; the caller's tensors are those of the space, in its order.
    fn pull_vector(&self, pull: &VectorPull, timeout: Duration, caller: &mut dyn Caller) -> Result<()>;
    /// Adds a portion's gradients, one for each tensor of the space, to the sum of a batch. `false`: every
    /// slice had the portion. [`FailureKind::of`](crate::batch::FailureKind::of) says what an error means for
    /// the batch.
    fn push_portion(
        &self,
        space: SpaceId,
        batch: u64,
        portion: u32,
        gradients: &[Gradient],
        timeout: Duration,
    ) -> Result<bool>;
    /// Asks the replicas of a space for a batch, once, and waits up to `wait` for its end. Returns the
    /// present state of the batch.
    fn batch(
        &self,
        space: SpaceId,
        term: u64,
        task: &BatchTask,
        wait: Duration,
        timeout: Duration,
    ) -> Result<BatchReport>;
    /// Reports a replica's portion, and asks for the next one; waits for it up to `wait`.
    fn batch_portion(
        &self,
        request: &ReplicaRequest,
        wait: Duration,
        timeout: Duration,
    ) -> Result<ReplicaAnswer>;
}
