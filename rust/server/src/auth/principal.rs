//! The author of a call, and its permissions.

use fastps_core::error::{Error, Kind, Result};
use fastps_proto::v1 as pb;

/// The author of a call.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Principal {
    pub(crate) role: pb::Role,
    /// The only incarnation it may speak for; `None`: any.
    pub(crate) client: Option<u64>,
}

impl Principal {
    /// Everybody on loopback or an insecure server.
    pub(crate) const ANYBODY: Self = Self { role: pb::Role::Admin, client: None };

    /// Fails unless the principal may make a call of this role for this client (0: no particular one).
    pub(crate) fn authorize(self, needed: pb::Role, client: u64) -> Result<()> {
        if self.role < needed {
            return Err(Error::new(Kind::Denied, "the principal's role does not allow this")
                .expected(needed.as_str_name(), self.role.as_str_name()));
        }
        match self.client {
            Some(own) if client != 0 && own != client => {
                Err(Error::new(Kind::Denied, "the principal may not speak for this client")
                    .expected(format!("client {own:#x}"), format!("{client:#x}")))
            }
            _ => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_role_allows_all_below_it() {
        let roles = [pb::Role::Reader, pb::Role::Worker, pb::Role::Admin];
        for (k, role) in roles.into_iter().enumerate() {
            for (n, needed) in roles.into_iter().enumerate() {
                let principal = Principal { role, client: None };
                assert_eq!(principal.authorize(needed, 7).is_ok(), k >= n);
            }
        }
        let bound = Principal { role: pb::Role::Worker, client: Some(7) };
        assert!(bound.authorize(pb::Role::Worker, 7).is_ok());
        assert_eq!(bound.authorize(pb::Role::Worker, 8).unwrap_err().kind, Kind::Denied);
    }
}
