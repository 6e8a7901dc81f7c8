//! The author of a call, and its permissions.

use crate::auth::role::Role;
use crate::auth::scope::Scope;
use fastps_core::error::{Error, Kind, Result};
use fastps_proto::v1 as pb;
use std::sync::Arc;

/// The author of a call.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Principal {
    /// Its name, for people and for its sessions; `None`: every caller without a name.
    pub name: Option<Arc<str>>,
    /// Its permissions.
    pub role: Role,
    /// The groups and namespaces that it may use.
    pub scope: Scope,
    /// Its rates and memory.
    pub limits: Limits,
}

/// Limits of a principal on each shard; `None`: no limit.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Limits {
    /// Frames and calls a second.
    pub frames_per_second: Option<u64>,
    /// Bytes of frames, and of calls, a second.
    pub bytes_per_second: Option<u64>,
    /// Bytes of its sessions, registrations and spaces.
    pub memory: Option<u64>,
}

impl Principal {
    /// A principal without limits.
    pub fn new(name: impl Into<Arc<str>>, role: Role, scope: Scope) -> Self {
        Self { name: Some(name.into()), role, scope, limits: Limits::default() }
    }

    /// Everybody who reaches a server without tokens and client certificates.
    pub(crate) fn anybody() -> Self {
        Self::nameless(Role::Server)
    }

    /// A caller without a name.
    pub(crate) fn nameless(role: Role) -> Self {
        Self { name: None, role, scope: Scope::Everything, limits: Limits::default() }
    }

    /// Fails unless the principal may make a call that needs this role.
    pub(crate) fn authorize(&self, needed: pb::Role) -> Result<()> {
        if self.role.to_wire() >= needed {
            return Ok(());
        }
        let why = match self.name {
            Some(_) => "the principal's role does not allow this",
            None => "the certificate names no role, and the server's --certificate-role does not allow this",
        };
        let error = Error::new(Kind::Denied, why);
        Err(error.expected(needed.as_str_name(), self.role.to_wire().as_str_name()))
    }

    /// The role in the answer to a Hello. Servers without tokens always said admin.
    pub(crate) fn shown_role(&self) -> Role {
        if self.name.is_some() { self.role } else { self.role.min(Role::Admin) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_role_allows_all_below_it() {
        for (k, role) in Role::ALL.into_iter().enumerate() {
            let principal = Principal::new("a", role, Scope::Everything);
            for (n, needed) in Role::ALL.into_iter().enumerate() {
                assert_eq!(principal.authorize(needed.to_wire()).is_ok(), k >= n);
            }
            assert_eq!(principal.shown_role(), role);
        }
        assert_eq!(Principal::anybody().authorize(pb::Role::Server), Ok(()));
        assert_eq!(Principal::anybody().shown_role(), Role::Admin);
    }
}
