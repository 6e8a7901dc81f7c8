//! The memory of one slice: plain and copy-on-write for `exact`, racing for `hogwild`, whose memory several
//! processes may share.

mod buffer;
mod cell;
mod counts;
mod exposed;
mod meter;
mod pieces;
#[cfg(all(target_os = "linux", not(any(miri, loom))))]
mod shared;
#[cfg(all(any(not(target_os = "linux"), miri), not(loom)))]
#[path = "not_shared.rs"]
mod shared;
#[cfg(loom)]
#[path = "shared_model.rs"]
mod shared;

pub(crate) use buffer::Buffer;
pub(crate) use cell::{LINE, LineKernel, Lines, RacyBuffer, run_lines, run_scalar_lines};
pub(crate) use counts::Counts;
pub use exposed::{EXPOSED_TAIL_BYTES, Exposed, ExposedFile};
pub use meter::{Charge, Meter, Purpose};
pub(crate) use pieces::Pieces;
pub(crate) use shared::{Region, SharedMemory};
