//! Tests with real servers, clients and connections: one program, since each would be linked with all of it.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::print_stdout,
    reason = "tests fail by panicking, helpers too"
)]

mod authors;
mod certificates;
mod checkpoint;
mod client;
mod cluster;
mod connections;
mod correction;
mod durable;
mod encoding;
mod exactly_once;
mod floods;
mod groups;
mod kills;
mod ledger;
mod limits;
mod memory;
mod native;
mod openings;
mod peer;
mod portions;
mod proxy;
mod relay;
mod secret;
mod server;
mod shared_memory;
mod small;
mod sparse;
mod statuses;
mod stubs;
mod tls;
mod working;
