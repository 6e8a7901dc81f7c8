//! Reads the token file and the TLS files again, at intervals and on demand.

use crate::auth::access::Access;
use crate::auth::tls_watch::TlsWatch;
use fastps_core::error::{Error, Kind, Result};
use std::sync::Arc;
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::thread::JoinHandle;
use std::time::Duration;

/// Interval between two reads.
const INTERVAL: Duration = Duration::from_secs(5);

/// A thread that reads files again; dropping it stops it.
#[derive(Debug)]
pub(crate) struct Reload {
    now: Option<Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl Reload {
    /// Starts the thread; `None` if there is nothing to read again.
    pub(crate) fn start(access: &Arc<Access>, tls: &Arc<TlsWatch>) -> Result<Option<Self>> {
        if !access.asks() && !tls.has_files() {
            return Ok(None);
        }
        let (now, asked) = channel();
        let (access, tls) = (access.clone(), tls.clone());
        let work = move || {
            while asked.recv_timeout(INTERVAL) != Err(RecvTimeoutError::Disconnected) {
                access.reload();
                tls.reload();
            }
        };
        let failed = |error| Error::new(Kind::Internal, format!("cannot start a thread: {error}"));
        let thread =
            std::thread::Builder::new().name("fastps-reload".to_owned()).spawn(work).map_err(failed)?;
        Ok(Some(Self { now: Some(now), thread: Some(thread) }))
    }

    /// Reads the files now.
    pub(crate) fn now(&self) {
        if let Some(now) = &self.now {
            // The thread ends only with this value.
            let _ = now.send(());
        }
    }
}

impl Drop for Reload {
    fn drop(&mut self) {
        drop(self.now.take());
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}
