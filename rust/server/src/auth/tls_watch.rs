//! The TLS files of a server, which are read again while it runs, and the connections of clients with
//! certificates, which end with these.

use crate::auth::audit::Audit;
use crate::auth::peer::ending::Ending;
use crate::human;
use fastps_core::error::Result;
use fastps_transport::tls::certificate::Certificate;
use fastps_transport::tls::{CertificateDer, ServerTls};
use serde_json::json;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;

/// Delay before a second try: a certificate and its key, two files, may not match while they are replaced.
const SETTLE: Duration = Duration::from_millis(500);

/// Connections listed before ended ones are forgotten.
const CONNECTIONS_BEFORE_TIDYING: usize = 64;

/// A connection whose client has shown a certificate.
#[derive(Debug)]
struct Certified {
    /// The certificate, its issuers behind it.
    chain: Vec<CertificateDer<'static>>,
    /// The first end of their validity, in seconds since 1970.
    expires: i64,
    /// The files against which it was checked, by the number of reloads before; `None`: those of its
    /// handshake.
    checked: Option<u64>,
    ending: Weak<Ending>,
}

/// The TLS files of a server, if it has some.
#[derive(Debug)]
pub(crate) struct TlsWatch {
    tls: Option<ServerTls>,
    audit: Arc<Audit>,
    /// The last error of the files, already logged; `None`: they are good.
    trouble: Mutex<Option<String>>,
    certified: Mutex<Vec<Certified>>,
    reloads: AtomicU64,
    failed: AtomicU64,
}

impl TlsWatch {
    pub(crate) fn new(tls: Option<ServerTls>, audit: Arc<Audit>) -> Arc<Self> {
        let (reloads, failed) = (AtomicU64::new(0), AtomicU64::new(0));
        Arc::new(Self { tls, audit, trouble: Mutex::default(), certified: Mutex::default(), reloads, failed })
    }

    /// Returns whether there are files.
    pub(crate) fn has_files(&self) -> bool {
        self.tls.is_some()
    }

    fn certified(&self) -> MutexGuard<'_, Vec<Certified>> {
        self.certified.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Ends the connection of a client with these certificates when one of them is revoked or expires.
    pub(crate) fn watch(&self, chain: Vec<CertificateDer<'static>>, ending: &Arc<Ending>) {
        if chain.is_empty() {
            return;
        }
        let end =
            |der: &CertificateDer<'_>| Certificate::parse(der).map_or(i64::MAX, |found| found.not_after);
        let expires = chain.iter().map(end).min().unwrap_or(i64::MAX);
        let mut all = self.certified();
        if all.len() >= CONNECTIONS_BEFORE_TIDYING && all.len().is_power_of_two() {
            all.retain(|one| one.ending.strong_count() > 0);
        }
        all.push(Certified { chain, expires, checked: None, ending: Arc::downgrade(ending) });
    }

    /// Ends connections whose certificates are revoked or have expired. Each is checked once after each
    /// change of the files, and when one expires.
    fn end_connections(&self) {
        let Some(tls) = &self.tls else { return };
        let (now, present) = (human::now() as i64, self.reloads.load(Ordering::Relaxed));
        // The shards list new connections while signatures are verified.
        let mut all = std::mem::take(&mut *self.certified());
        all.retain_mut(|one| {
            let Some(ending) = one.ending.upgrade() else { return false };
            if one.checked == Some(present) && now <= one.expires {
                return true;
            }
            one.checked = Some(present);
            if now > one.expires {
                one.expires = i64::MAX; // of a certificate in the chain that is not needed, if the check passes
            }
            let checked = tls.check_client(&one.chain);
            checked.map_err(|error| ending.end(error)).is_ok()
        });
        self.certified().append(&mut all);
    }

    /// Reads the files again; bad ones leave the last good ones in force. Ends the connections of
    /// certificates that are no longer valid.
    pub(crate) fn reload(&self) {
        let Some(tls) = &self.tls else { return };
        let read = tls.reload().or_else(|_| {
            std::thread::sleep(SETTLE);
            tls.reload()
        });
        self.note(read);
        self.end_connections();
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
