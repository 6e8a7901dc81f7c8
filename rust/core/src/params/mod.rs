//! Memory of one slice: plain and copy-on-write for `exact`, racing for `hogwild`.

mod buffer;
mod cell;
mod meter;
mod pieces;

pub(crate) use buffer::Buffer;
pub(crate) use cell::RacyBuffer;
pub use meter::{Charge, Meter, Purpose};
pub(crate) use pieces::Pieces;
