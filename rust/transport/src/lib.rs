//! What the client and the server of fastps agree on: sockets, frames, and what the numbers on the wire mean.
//!
//! Nothing here knows of a client's calls or of a server's shards.

mod channel;
pub mod convert;
pub mod memory_budget;
pub mod open_files;
pub mod secret;
mod socket;
pub mod tls;
pub mod unix;
pub mod wire;

pub use channel::channel;
pub use socket::Socket;
pub use tls::TlsFiles;
