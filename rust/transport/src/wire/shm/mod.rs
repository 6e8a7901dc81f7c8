//! Shared memory between a client and a server on one machine, which `h2` uses like any socket.
//!
//! A client that has found the server's Unix socket asks there for shared memory before HTTP/2 begins
//! ([`ASK`]). The server passes it a memfd with two rings of bytes, one per direction (`pass`, `ring`,
//! `memory`). The socket then carries single bytes that wake the other end, and its end is the stream's
//! (`stream`). Nothing has a name, so nothing is left behind. The rings begin small; the first message of more
//! than half of one makes the server pass larger memory, which both move to.
//!
//! The values of whole slices do not go through the ring: the client reads them in memory that the server
//! passed, too (`borrow`).

mod adaptive_spin;
mod borrow;
mod memory;
mod pass;
mod ring;
mod stream;
mod sync;

pub use borrow::{Borrower, Lender};
pub use memory::{FIRST_SHARED_BYTES, LARGER_SHARED_BYTES, MAX_BORROWED_PAGES, SHARED_BYTES};
pub use pass::{ASK, GROWS};
pub use stream::{LocalStream, Rings};
