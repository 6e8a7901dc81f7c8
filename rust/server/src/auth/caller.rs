//! The author of one unary call or of one stream, and evidence of its session.

use crate::auth::access::Known;
use crate::auth::budget::Budget;
use crate::auth::peer::Peer;
use crate::auth::principal::Principal;
use crate::auth::secret;
use fastps_core::error::{Error, Kind, Result};
use fastps_core::slice::Slice;
use fastps_durable::SecretHash;
use std::collections::HashSet;
use std::sync::{Arc, Mutex, PoisonError};
use tonic::metadata::MetadataMap;

/// Slices that a stream remembers as within its scope.
const MAX_REMEMBERED: usize = 1 << 16;

/// Evidence that a caller is the client of a session.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Proof<'a> {
    pub(crate) secret: Option<&'a SecretHash>,
    /// The principal that calls; `None`: it has no name.
    pub(crate) principal: Option<&'a Arc<str>>,
}

/// The author of a call or of a stream.
#[derive(Debug)]
pub(crate) struct Caller {
    pub(crate) peer: Peer,
    pub(crate) principal: Arc<Principal>,
    /// The hash of the secret that it shows.
    pub(crate) secret: Option<SecretHash>,
    /// The budget of its principal; `None` without limits.
    pub(crate) budget: Option<Budget>,
    /// Slices within the principal's scope that the stream has used; empty if the scope is everything.
    used: Mutex<HashSet<u64, foldhash::fast::RandomState>>,
}

impl Caller {
    pub(crate) fn new(peer: Peer, known: &Known, metadata: &MetadataMap) -> Self {
        let (principal, secret) = (known.principal.clone(), secret::of_headers(metadata));
        Self { peer, principal, secret, budget: None, used: Mutex::default() }
    }

    pub(crate) fn proof(&self) -> Proof<'_> {
        Proof { secret: self.secret.as_ref(), principal: self.principal.name.as_ref() }
    }

    /// Fails unless the principal may use all groups and namespaces.
    pub(crate) fn check_unlimited(&self) -> Result<()> {
        if self.principal.scope.is_everything() {
            return Ok(());
        }
        let error = Error::new(Kind::Denied, "the call concerns the whole shard");
        Err(error.expected("a principal of all groups and namespaces (*)", &self.principal.scope))
    }

    /// Error of a name that the principal may not use, whether it exists or not.
    pub(crate) fn outside(&self, name: &str) -> Error {
        let error = Error::new(
            Kind::Denied,
            format!("{name:?} is outside the groups and namespaces of the principal"),
        );
        error.expected(&self.principal.scope, format!("{name:?}"))
    }

    /// Returns whether a slice is within the principal's scope. Names are compared once per slice and stream.
    pub(crate) fn may_use(&self, slice: &Slice) -> bool {
        let scope = &self.principal.scope;
        if scope.is_everything() {
            return true;
        }
        let mut used = self.used.lock().unwrap_or_else(PoisonError::into_inner);
        if used.contains(&slice.id().0) {
            return true;
        }
        let allowed = scope.allows(&slice.spec().name, &slice.spec().group);
        if allowed {
            if used.len() >= MAX_REMEMBERED {
                used.clear();
            }
            used.insert(slice.id().0);
        }
        allowed
    }
}

/// Error of a name within the caller's groups that another group or namespace has taken.
pub(crate) fn taken(name: &str) -> Error {
    let error = Error::new(Kind::Denied, format!("the name {name:?} is taken in another group or namespace"));
    error.expected("a free name, or one of an own namespace (connect(namespace=))", format!("{name:?}"))
}
