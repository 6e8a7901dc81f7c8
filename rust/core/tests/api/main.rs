//! Tests of the core from outside: one program, since each would be linked with all of it. `tests/threads.rs`
//! and `tests/loom.rs` are built in other ways as well and have their own.
#![allow(
    clippy::unwrap_used,
    clippy::panic,
    clippy::print_stdout,
    reason = "tests fail by panicking, helpers too"
)]

mod clients;
mod codec;
mod codec_properties;
mod correction;
mod cut;
mod exchange;
mod groups;
mod image;
mod isa;
mod linear;
mod memory;
mod store;
