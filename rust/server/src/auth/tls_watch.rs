//! The TLS files of a server, which are read again while it runs.

use crate::auth::audit::Audit;
use fastps_core::error::Result;
use fastps_transport::tls::ServerTls;
use serde_json::json;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

/// Delay before a second try: a certificate and its key, two files, may not match while they are replaced.
const SETTLE: Duration = Duration::from_millis(500);

/// The TLS files of a server, if it has some.
#[derive(Debug)]
pub(crate) struct TlsWatch {
    tls: Option<ServerTls>,
    audit: Arc<Audit>,
    /// The last error of the files, already logged; `None`: they are good.
    trouble: Mutex<Option<String>>,
    reloads: AtomicU64,
    failed: AtomicU64,
}

impl TlsWatch {
    pub(crate) fn new(tls: Option<ServerTls>, audit: Arc<Audit>) -> Arc<Self> {
        let (reloads, failed) = (AtomicU64::new(0), AtomicU64::new(0));
        Arc::new(Self { tls, audit, trouble: Mutex::default(), reloads, failed })
    }

    /// Returns whether there are files.
    pub(crate) fn has_files(&self) -> bool {
        self.tls.is_some()
    }

    /// Reads the files again; bad ones leave the last good ones in force.
    pub(crate) fn reload(&self) {
        let Some(tls) = &self.tls else { return };
        let read = tls.reload().or_else(|_| {
            std::thread::sleep(SETTLE);
            tls.reload()
        });
        self.note(read);
    }

    fn note(&self, read: Result<bool>) {
        let mut trouble = self.trouble.lock().unwrap_or_else(PoisonError::into_inner);
        match read {
            Ok(changed) => {
                *trouble = None;
                if changed {
                    self.reloads.fetch_add(1, Ordering::Relaxed);
                    tracing::info!("the TLS files were read again");
                    // It was logged if it cannot be written.
                    let _ = self.audit.record("reload", json!({"files": "tls"}));
                }
            }
            Err(error) => {
                let text = error.to_string();
                if trouble.as_ref() != Some(&text) {
                    self.failed.fetch_add(1, Ordering::Relaxed);
                    tracing::error!(%error, "the last good TLS files stay in force");
                    *trouble = Some(text);
                }
            }
        }
    }

    /// Counters by name.
    pub(crate) fn counters(&self) -> [(&'static str, u64); 2] {
        [
            ("tls_reloads", self.reloads.load(Ordering::Relaxed)),
            ("tls_reloads_failed", self.failed.load(Ordering::Relaxed)),
        ]
    }
}
