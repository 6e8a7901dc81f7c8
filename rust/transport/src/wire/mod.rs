//! Transport of frames between native clients and servers: gRPC as for any other peer, driven through `h2` so
//! that no payload is copied between the socket and the slice.
//!
//! Outwards, a message is a [`Piece`]: header bytes and payload, in one HTTP/2 frame, written by one system
//! call. Inwards, [`Framed`] makes `h2` read a whole HTTP/2 frame into one buffer, and [`Messages`] reads the
//! message there.

mod framed;
mod keep_alive;
mod messages;
mod outbox;
mod piece;
mod poll_cycle;
mod shm;
mod spin;

pub use crate::memory_budget::MAX_FRAME;
pub use framed::Framed;
pub use keep_alive::keep_alive;
pub use messages::{Arrivals, Messages, status};
pub use outbox::Outbox;
pub use piece::Piece;
pub use poll_cycle::PollCycle;
pub use shm::{
    ASK, Borrower, FIRST_SHARED_BYTES, GROWS, LARGER_SHARED_BYTES, Lender, LocalStream, MAX_BORROWED_PAGES,
    Rings, SHARED_BYTES,
};
pub use spin::{DEFAULT_SPIN, Pace, Spin};

/// The one call of a native connection.
pub const EXCHANGE_PATH: &str = "/fastps.v1.Data/Exchange";
/// The `SETTINGS_MAX_HEADER_LIST_SIZE` by which a server knows a native client; "fp" and "s1" in ASCII.
pub const NATIVE_SETTING: u32 = 0x6670_7331;
/// Header of the server's answer: its incarnation.
pub const SERVER_HEADER: &str = "fastps-server";
/// Most bytes of unwritten messages that `h2` may keep.
pub const MAX_UNWRITTEN_BYTES: usize = 2 << 20;
/// Most reset streams whose remains a connection may keep.
pub const MAX_RESET_STREAMS: usize = 64;
