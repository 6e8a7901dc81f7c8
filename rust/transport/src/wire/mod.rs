//! How native clients and servers move frames: gRPC as any other peer speaks it, driven through `h2` so that
//! no payload is copied between the socket and the slice.
//!
//! Outwards, a message is a [`Piece`]: header bytes and payload, in one HTTP/2 frame, written by one system
//! call. Inwards, [`Framed`] makes `h2` read a whole HTTP/2 frame into one buffer, and [`Messages`] reads the
//! message there.

mod framed;
mod keep_alive;
mod messages;
mod outbox;
mod piece;
mod shm;
mod spin;
mod turn;

pub use framed::Framed;
pub use keep_alive::keep_alive;
pub use messages::{Arrivals, Messages, status};
pub use outbox::Outbox;
pub use piece::Piece;
pub use shm::{ASK, Borrower, LOANS, Lender, LocalStream, SHARED_BYTES};
pub use spin::{BUDGET as SPIN, Pace, Spin};
pub use turn::Turn;

/// The one call of a native connection.
pub const PATH: &str = "/fastps.v1.Data/Exchange";
/// A slice with its header fits.
pub const MAX_FRAME: u32 = 1 << 20;
/// The `SETTINGS_MAX_HEADER_LIST_SIZE` by which a server knows a native client; "fp" and "s1" in ASCII.
pub const NATIVE: u32 = 0x6670_7331;
/// Header of the server's answer: its incarnation.
pub const SERVER: &str = "fastps-server";
/// What `h2` may keep of messages that are not written yet.
pub const UNWRITTEN: usize = 2 << 20;
/// Reset streams whose remains a connection may keep.
pub const RESET: usize = 64;
