//! Shared memory between a client and a server on one machine: to `h2` a socket like any other.
//!
//! A client that has found the server's Unix socket asks there for shared memory before it begins with HTTP/2
//! ([`ASK`]). The server makes a memfd with two rings of bytes, one per direction, and passes it over the
//! socket (`pass`). From then on bytes travel through the rings (`ring`, in memory of `memory`), and the
//! socket carries single bytes that wake whoever sleeps, and the end: whatever becomes of a peer, the system
//! closes its socket (`stream`). Nothing has a name, so nothing is left behind.
//!
//! Values of whole slices do not go through the ring: the client reads them where they lie, in memory that
//! the server passed on, too (`borrow`).

mod adaptive_spin;
mod borrow;
mod memory;
mod pass;
mod ring;
mod stream;
mod sync;

pub use borrow::{Borrower, Lender};
pub use memory::{MAX_BORROWED_PAGES, SHARED_BYTES};
pub use pass::ASK;
pub use stream::LocalStream;
