//! The contract between the client and the server of fastps: sockets, frames, and the meaning of the numbers
//! on the wire. It knows neither a client's calls nor a server's shards.

pub mod addressee;
pub mod bearer;
mod channel;
pub mod convert;
#[cfg(any(test, fuzzing))]
pub mod fuzzing;
pub mod loopback;
pub mod memory_budget;
pub mod open_files;
pub mod private_file;
mod regular_file;
pub mod secret;
mod socket;
pub mod tls;
pub mod token;
pub mod unix;
pub mod wire;

pub use channel::channel;
pub use socket::{Medium, Socket};
pub use tls::TlsFiles;
