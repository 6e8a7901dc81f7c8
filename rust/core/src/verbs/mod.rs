//! The calls that an in-process store and a cluster of servers have in common, and the values they take and
//! return.

mod parameter_server;
mod values;

pub use crate::tensor::{SliceVersion, Versions};
pub use parameter_server::ParameterServer;
pub use values::{
    Caller, Done, Fate, Gradient, GradientRef, InDoubt, PartialPush, Patient, Pulled, PushError, PushOptions,
    Pushed, Receipt, Rows, SparseValues, State, Stats, Ticket, Values,
};
