//! The calls that an in-process store and a cluster of servers have in common, and the values they take and
//! return.

mod parameter_server;
mod pull_options;
mod pull_tensors;
mod push_tensors;
mod report;
mod tensor_registry;
mod train_together;
mod values;
mod vector_spaces;

/// The traits of a parameter server: what a file that calls one imports.
pub mod prelude {
    pub use super::{ParameterServer, PullTensors, PushTensors, TensorRegistry, TrainTogether, VectorSpaces};
}

pub use crate::tensor::{SliceVersion, Versions};
pub use parameter_server::ParameterServer;
pub use pull_options::{PullOptions, PullView, RoundingCaller};
pub use pull_tensors::PullTensors;
pub use push_tensors::PushTensors;
pub use report::WorkerReport;
pub use tensor_registry::{NewTensor, TensorRegistry};
pub use train_together::{Listener, TrainTogether};
pub use values::{
    Caller, Done, Fate, Gradient, GradientRef, GroupState, InDoubt, OptimizerState, PartialPush, Patient,
    Pulled, PushError, PushOptions, Pushed, Receipt, Rows, SparseValues, Stats, Ticket, Values, WorkerState,
};
pub use vector_spaces::{OpenedSpace, SpaceInfo, VectorPull, VectorSpaces};
