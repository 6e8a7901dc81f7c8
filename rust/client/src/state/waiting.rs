//! Reports each wait of a client that lasts a second, once.

use std::pin::pin;
use std::sync::OnceLock;
use std::time::{Duration, Instant};

/// Shorter waits are not reported.
pub(crate) const REPORT_WAIT_AFTER: Duration = Duration::from_secs(1);

/// Cause of a client's wait.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WaitsFor {
    /// A server is unreachable, or not ready.
    Server,
    /// A server has the call, and has not answered it yet: it may wait for other workers.
    Answer,
}

type Listener = fn(WaitsFor, &str);

static LISTENER: OnceLock<Listener> = OnceLock::new();

/// Sets the function that reports waits, instead of a `tracing` event; the first one counts. No lock is
/// held when it is called.
pub fn on_wait(listener: Listener) {
    let _ = LISTENER.set(listener);
}

/// Reports a wait.
pub(crate) fn say(what: WaitsFor, text: &str) {
    match (LISTENER.get(), what) {
        (Some(listener), _) => listener(what, text),
        (None, WaitsFor::Server) => tracing::warn!("{text}"),
        (None, WaitsFor::Answer) => tracing::info!("{text}"),
    }
}

/// One wait, perhaps over several attempts.
#[derive(Debug)]
pub(crate) struct Wait {
    since: Instant,
    reported: bool,
}

impl Wait {
    pub(crate) fn begin() -> Self {
        Self { since: Instant::now(), reported: false }
    }

    /// Does some of the awaited work; reports the wait once it has lasted long enough.
    pub(crate) async fn on<T>(
        &mut self,
        work: impl Future<Output = T>,
        what: impl FnOnce() -> (WaitsFor, String),
    ) -> T {
        let mut work = pin!(work);
        if !self.reported {
            tokio::select! {
                biased;
                done = &mut work => return done,
                () = tokio::time::sleep_until((self.since + REPORT_WAIT_AFTER).into()) => {}
            }
            self.reported = true;
            let (what, text) = what();
            say(what, &text);
        }
        work.await
    }
}

/// The cause of a wait for a server.
pub(crate) fn server(address: &str, why: Option<&str>) -> (WaitsFor, String) {
    let why = why.map(|why| format!(": {why}")).unwrap_or_default();
    (WaitsFor::Server, format!("waiting for the server at {address}{why}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_short_wait_is_not_reported() {
        let mut wait = Wait::begin();
        let unreported = || -> (WaitsFor, String) { panic!("reported too early") };
        assert_eq!(wait.on(async { 1 }, unreported).await, 1);
        assert!(!wait.reported);
    }

    #[tokio::test]
    async fn a_wait_is_reported_once() {
        let mut wait =
            Wait { since: Instant::now().checked_sub(REPORT_WAIT_AFTER).unwrap(), reported: false };
        let mut asked = 0;
        for _ in 0..3 {
            let work = tokio::time::sleep(Duration::from_millis(1));
            wait.on(work, || {
                asked += 1;
                server("host-a:7070", Some("connection refused"))
            })
            .await;
        }
        assert_eq!(asked, 1);
        let expected = "waiting for the server at host-a:7070: connection refused";
        assert_eq!(server("host-a:7070", Some("connection refused")).1, expected);
    }
}
