//! The slice: the unit that is placed, locked, versioned, and applied whole or refused whole. A slice owns
//! its memory, optimizer state and identity table; the policy that admits pushes and the records of changes
//! are defined here, too.

pub mod asynchrony;
pub(crate) mod clients;
mod context;
mod exact;
pub mod frame;
mod hogwild;
pub mod identity;
mod image;
pub mod policy;
mod read;
pub mod record;
mod resolve;
mod round;
#[allow(clippy::module_inception)]
mod slice;
mod snapshot;
mod vectors;

pub use context::SliceContext;
pub(crate) use context::{Counters, Surroundings};
pub use image::{Image, Standing};
pub use resolve::Resolved;
pub(crate) use round::Why;
pub use slice::Slice;
pub use snapshot::Snapshot;
pub use vectors::{VectorsImage, VectorsStanding};
