//! Authentication: the principal of a unary call or stream, from its token or its client's certificate.

use crate::answers::StreamState;
use crate::auth::audit::Audit;
use crate::auth::principal::Principal;
use crate::auth::rate::Limiter;
use crate::auth::role::Role;
use crate::auth::token_file::TokenFile;
use crate::human;
use fastps_core::error::{Error, Kind, Result};
use fastps_durable::SecretHash;
use fastps_proto::v1 as pb;
use fastps_transport::token;
use http::HeaderMap;
use serde_json::json;
use std::collections::HashMap;
use std::fmt::Display;
use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock, Weak};
use std::time::Instant;

/// Refused credentials that are logged at once, and then each second.
const LOG_BURST: u32 = 8;
const LOGS_PER_SECOND: u32 = 1;
/// Streams of tokens listed before ended ones are forgotten.
const STREAMS_BEFORE_TIDYING: usize = 64;

/// A caller that is known.
#[derive(Clone, Debug)]
pub(crate) struct Known {
    pub(crate) principal: Arc<Principal>,
    /// The hash of its token; `None`: it showed a certificate, or nothing where nothing is asked for.
    token: Option<SecretHash>,
}

/// The tokens of a server, and the streams that were opened with them.
#[derive(Debug)]
pub(crate) struct Access {
    tokens: Option<Tokens>,
    anybody: Arc<Principal>,
    /// The holder of a certificate without a role.
    nameless: Arc<Principal>,
    streams: Mutex<Vec<(Known, Weak<StreamState>)>>,
    refused: AtomicU64,
    log: Limiter,
    /// Where refused credentials and reloads are listed.
    pub(crate) audit: Arc<Audit>,
}

#[derive(Debug)]
struct Tokens {
    path: PathBuf,
    present: RwLock<Arc<TokenFile>>,
    /// The last error of reading the file, already logged; `None`: the file is good.
    trouble: Mutex<Option<String>>,
    reloads: AtomicU64,
    failed: AtomicU64,
}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Access {
    /// Reads the token file. Without one, a certificate decides, which has `role` if it names none; and a
    /// caller without a certificate, where none is asked for, may do everything.
    pub(crate) fn open(tokens: Option<&Path>, role: Role, audit: Arc<Audit>) -> Result<Arc<Self>> {
        let tokens = tokens.map(Tokens::open).transpose()?;
        let (anybody, nameless) = (Arc::new(Principal::anybody()), Arc::new(Principal::nameless(role)));
        let (streams, refused) = (Mutex::default(), AtomicU64::new(0));
        let log = Limiter::new(LOG_BURST, LOGS_PER_SECOND);
        Ok(Arc::new(Self { tokens, anybody, nameless, streams, refused, log, audit }))
    }

    /// Returns whether callers must show a token, or a certificate with a role.
    pub(crate) fn asks(&self) -> bool {
        self.tokens.is_some()
    }

    /// The principal of a certificate without a role; `None`: only a token tells.
    pub(crate) fn nameless(&self) -> Option<Arc<Principal>> {
        (!self.asks()).then(|| self.nameless.clone())
    }

    /// The caller with these headers, on a connection with this principal in its client's certificate. A
    /// token decides where both are shown.
    pub(crate) fn know(&self, certificate: Option<&Arc<Principal>>, headers: &HeaderMap) -> Result<Known> {
        let Some(tokens) = &self.tokens else {
            let principal = certificate.unwrap_or(&self.anybody).clone();
            return Ok(Known { principal, token: None });
        };
        let refused = |why, got| {
            self.refused.fetch_add(1, Ordering::Relaxed);
            Err(Error::new(Kind::Unauthenticated, why).expected("a valid token (token_file=)", got))
        };
        match (shown(headers), certificate) {
            (Ok(Some(text)), _) => match tokens.find(text) {
                Some(known) => Ok(known),
                None => refused("the token is unknown, revoked or expired", "another token"),
            },
            (Ok(None), Some(principal)) => Ok(Known { principal: principal.clone(), token: None }),
            (Ok(None), None) => refused("the server asks for a token", "none"),
            (Err(()), _) => refused("the header `authorization` has no token", "other text"),
        }
    }

    /// The caller with these headers, from this address, if its role suffices. Refusals are logged and listed
    /// in the audit, at a limited rate.
    pub(crate) fn admit(
        &self,
        (certificate, address): (Option<&Arc<Principal>>, Option<IpAddr>),
        headers: &HeaderMap,
        needed: pb::Role,
    ) -> Result<Known> {
        let known = self.know(certificate, headers);
        let known = known.and_then(|known| known.principal.authorize(needed).map(|()| known));
        known.inspect_err(|error| {
            if self.log.take(Instant::now()).is_ok() {
                let peer = address.map_or_else(|| "a Unix socket".to_owned(), |address| address.to_string());
                tracing::warn!(%peer, %error, "a call is refused");
                self.list_refusal(address, error);
            }
        })
    }

    /// Lists a client that TLS has refused in the audit, at a limited rate.
    pub(crate) fn refused_by_tls(&self, address: Option<IpAddr>, error: &dyn Display) {
        if self.log.take(Instant::now()).is_ok() {
            self.list_refusal(address, error);
        }
    }

    fn list_refusal(&self, address: Option<IpAddr>, error: &dyn Display) {
        // It was logged if it cannot be written.
        let _ = self.audit.record("refused", json!({"address": address, "reason": error.to_string()}));
    }

    /// Ends the stream when its token ends.
    pub(crate) fn watch(&self, known: &Known, stream: &Arc<StreamState>) {
        if known.token.is_none() {
            return;
        }
        let mut streams = locked(&self.streams);
        if streams.len() >= STREAMS_BEFORE_TIDYING && streams.len().is_power_of_two() {
            streams.retain(|(_, stream)| stream.strong_count() > 0);
        }
        streams.push((known.clone(), Arc::downgrade(stream)));
    }

    /// Reads the token file again; a bad one leaves the last good one in force. Ends the streams of tokens
    /// that are gone, have changed or have expired.
    pub(crate) fn reload(&self) {
        let Some(tokens) = &self.tokens else { return };
        if tokens.reload() {
            let _ = self.audit.record("reload", json!({"files": "tokens"}));
        }
        let present = tokens.present();
        let now = human::now();
        let entries = present.entries().iter().filter(|entry| entry.expires.is_none_or(|end| now < end));
        let live: HashMap<_, _> = entries.map(|entry| (entry.hash.bytes(), &entry.principal)).collect();
        let reason =
            Error::new(Kind::Unauthenticated, "the token of the stream was revoked, changed or has expired");
        locked(&self.streams).retain(|(known, stream)| {
            let Some(stream) = stream.upgrade() else { return false };
            let same = |token: &SecretHash| live.get(&token.bytes()) == Some(&&*known.principal);
            let stays = known.token.as_ref().is_none_or(same);
            if !stays {
                tracing::info!(principal = known.principal.name.as_deref(), "a stream ends with its token");
                stream.reset(&reason);
            }
            stays
        });
    }

    /// Counters by name.
    pub(crate) fn counters(&self) -> [(&'static str, u64); 3] {
        let of = |counter: fn(&Tokens) -> &AtomicU64| {
            self.tokens.as_ref().map_or(0, |tokens| counter(tokens).load(Ordering::Relaxed))
        };
        [
            ("credentials_refused", self.refused.load(Ordering::Relaxed)),
            ("token_reloads", of(|tokens| &tokens.reloads)),
            ("token_reloads_failed", of(|tokens| &tokens.failed)),
        ]
    }
}

impl Tokens {
    fn open(path: &Path) -> Result<Self> {
        let present = RwLock::new(Arc::new(TokenFile::read(path)?));
        let (reloads, failed) = (AtomicU64::new(0), AtomicU64::new(0));
        Ok(Self { path: path.to_owned(), present, trouble: Mutex::default(), reloads, failed })
    }

    fn present(&self) -> Arc<TokenFile> {
        self.present.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    fn find(&self, text: &str) -> Option<Known> {
        let present = self.present();
        let entry = present.find(text.as_bytes(), human::now())?;
        Some(Known { principal: Arc::new(entry.principal.clone()), token: Some(entry.hash) })
    }

    /// Returns whether a changed file came into force.
    fn reload(&self) -> bool {
        let mut trouble = locked(&self.trouble);
        match TokenFile::read(&self.path) {
            Ok(read) => {
                *trouble = None;
                let changed = read.entries() != self.present().entries();
                if changed {
                    let principals = read.entries().len();
                    *self.present.write().unwrap_or_else(PoisonError::into_inner) = Arc::new(read);
                    self.reloads.fetch_add(1, Ordering::Relaxed);
                    tracing::info!(principals, "the token file was read again");
                }
                changed
            }
            Err(error) => {
                let text = error.to_string();
                if trouble.as_ref() != Some(&text) {
                    self.failed.fetch_add(1, Ordering::Relaxed);
                    tracing::error!(%error, "the last good token file stays in force");
                    *trouble = Some(text);
                }
                false
            }
        }
    }
}

/// The token in the headers of a call, if there is one; `Err`: the header has another form.
pub(crate) fn shown(headers: &HeaderMap) -> Result<Option<&str>, ()> {
    let mut all = headers.get_all(http::header::AUTHORIZATION).iter();
    let Some(first) = all.next() else { return Ok(None) };
    let text = first.to_str().ok().filter(|_| all.next().is_none());
    let (scheme, text) = text.and_then(|text| text.split_once(' ')).ok_or(())?;
    let fits = scheme.eq_ignore_ascii_case("bearer") && text.len() == token::TOKEN_LENGTH;
    if fits { Ok(Some(text)) } else { Err(()) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs::Permissions;
    use std::os::unix::fs::PermissionsExt;

    #[test]
    fn a_bad_token_file_counts_once_for_each_error() {
        let path = std::env::temp_dir().join(format!("fastps-tokens-{}", std::process::id()));
        let write = |text: &str| {
            std::fs::write(&path, text).unwrap();
            std::fs::set_permissions(&path, Permissions::from_mode(0o600)).unwrap();
        };
        let good = format!("alice worker * {}\n", "0".repeat(64));
        write(&good);
        let access = Access::open(Some(&path), Role::Reader, Arc::default()).unwrap();
        let failed = || access.counters()[2].1;
        for (text, expected) in [("alice", 1), ("alice wroker", 2), (&good, 2), ("alice", 3)] {
            write(text);
            (0..3).for_each(|_| access.reload());
            assert_eq!(failed(), expected, "{text}");
        }
        std::fs::remove_file(&path).unwrap();
        (0..3).for_each(|_| access.reload());
        assert_eq!(failed(), 4);
    }
}
