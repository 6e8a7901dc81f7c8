//! Signals that stop a server, or make it read its files again. They are caught before the server announces
//! itself, so none is missed.

use std::io::Result;

/// The signals of a server.
pub(crate) struct Signals {
    terminate: tokio::signal::unix::Signal,
    interrupt: tokio::signal::unix::Signal,
    /// `None` if SIGHUP was ignored when the process began, as `nohup` has it.
    hangup: Option<tokio::signal::unix::Signal>,
}

impl Signals {
    /// Catches SIGTERM, SIGINT (Ctrl-C), and SIGHUP (a closed terminal, or a request to read files again)
    /// unless that is ignored.
    pub(crate) fn catch() -> Result<Self> {
        use tokio::signal::unix::{SignalKind, signal};
        let (terminate, interrupt) = (signal(SignalKind::terminate())?, signal(SignalKind::interrupt())?);
        let hangup = (!ignores_hangup()).then(|| signal(SignalKind::hangup())).transpose()?;
        Ok(Self { terminate, interrupt, hangup })
    }

    /// Waits for one that stops the process. SIGHUP calls `reload`; without it, it stops the process.
    pub(crate) async fn stop(&mut self, reload: Option<impl Fn()>) {
        loop {
            let hung_up = async {
                match &mut self.hangup {
                    Some(hangup) => hangup.recv().await,
                    None => std::future::pending().await,
                }
            };
            tokio::select! {
                _ = self.terminate.recv() => return,
                _ = self.interrupt.recv() => return,
                _ = hung_up => match &reload {
                    Some(reload) => reload(),
                    None => return,
                },
            }
        }
    }
}

/// Returns whether this process has a controlling terminal, whose end SIGHUP reports.
pub(crate) fn has_terminal() -> bool {
    std::fs::File::open("/dev/tty").is_ok()
}

/// Returns whether SIGHUP is ignored, as far as the system tells.
fn ignores_hangup() -> bool {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let ignored = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    // The first signal is SIGHUP.
    ignored.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok()).is_some_and(|mask| mask & 1 == 1)
}
