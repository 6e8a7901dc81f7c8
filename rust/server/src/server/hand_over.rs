//! A server in a program of the user's, which nobody else stops when its shard is asked for.

use super::{Server, internal};
use fastps_core::error::Result;
use std::sync::Arc;
use std::time::Duration;

/// Time for a server that is asked for its shard: what it has not copied by then is lost to the next owner.
pub const HAND_OVER_TIMEOUT: Duration = Duration::from_mins(30);
/// Pause between two looks whether a shard is asked for.
const LOOK_INTERVAL: Duration = Duration::from_millis(250);

/// Stops a server once somebody asks for one of its shards (`fastps owner --release`), as long as something else refers to
/// it.
pub fn stop_when_asked(server: &Arc<Server>) -> Result<()> {
    let server = Arc::downgrade(server);
    let work = move || {
        while let Some(server) = server.upgrade() {
            if server.is_asked_to_release() {
                if let Err(error) = server.stop(HAND_OVER_TIMEOUT) {
                    tracing::error!(%error, "a shard was asked for, and stopping the server failed");
                }
                return;
            }
            drop(server);
            std::thread::sleep(LOOK_INTERVAL);
        }
    };
    let thread = std::thread::Builder::new().name("fastps-hand-over".to_owned());
    thread.spawn(work).map(drop).map_err(|error| internal("cannot start a thread", error))
}
