//! What a server tells systemd (`Type=notify`), as `sd_notify(3)` has it.

use fastps_server::Server;
use std::ffi::OsStr;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::net::{SocketAddr, UnixDatagram};
use std::time::Duration;

/// Sends a state, such as `READY=1`. Does nothing in a process that systemd has not started so.
pub(crate) fn tell(state: &str) {
    let Some(socket) = std::env::var_os("NOTIFY_SOCKET") else { return };
    if let Err(error) = send(&socket, state) {
        tracing::warn!(%error, "systemd cannot be told {state}");
    }
}

fn send(socket: &OsStr, state: &str) -> std::io::Result<()> {
    let address = match socket.as_bytes() {
        [b'@', name @ ..] => SocketAddr::from_abstract_name(name),
        path => SocketAddr::from_pathname(OsStr::from_bytes(path)),
    };
    UnixDatagram::unbound()?.send_to_addr(state.as_bytes(), &address?).map(drop)
}

/// Resets the watchdog twice in its interval, while the threads of all shards run. Waits for ever.
pub(crate) async fn keep_alive(server: &Server) {
    let Some(interval) = watchdog() else { return std::future::pending().await };
    let mut ticks = tokio::time::interval(interval / 2);
    loop {
        ticks.tick().await;
        if server.swept() {
            tell("WATCHDOG=1");
        }
    }
}

/// Interval of this process's watchdog.
fn watchdog() -> Option<Duration> {
    let number = |name| std::env::var(name).ok()?.parse::<u64>().ok();
    let own = number("WATCHDOG_PID").is_none_or(|pid| pid == u64::from(std::process::id()));
    number("WATCHDOG_USEC").filter(|us| own && *us > 0).map(Duration::from_micros)
}
