//! Roles of principals. Each call and each kind of frame names the least role that it needs in the proto.

use fastps_core::error::{Error, Kind, Result};
use fastps_core::text::nearest;
use fastps_proto::v1 as pb;
use std::fmt;
use std::str::FromStr;

/// A role includes those before it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Role {
    /// May pull and read statistics.
    Reader,
    /// May also push, assign and register.
    Worker,
    /// May also take checkpoints.
    Admin,
    /// A server of the cluster: may also ask what servers ask each other.
    Server,
}

impl Role {
    /// All roles, the lowest first.
    pub const ALL: [Self; 4] = [Self::Reader, Self::Worker, Self::Admin, Self::Server];

    /// The name in token files and certificates.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Reader => "reader",
            Self::Worker => "worker",
            Self::Admin => "admin",
            Self::Server => "server",
        }
    }

    pub(crate) const fn to_wire(self) -> pb::Role {
        match self {
            Self::Reader => pb::Role::Reader,
            Self::Worker => pb::Role::Worker,
            Self::Admin => pb::Role::Admin,
            Self::Server => pb::Role::Server,
        }
    }
}

impl FromStr for Role {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        let known = || Self::ALL.map(Self::name);
        Self::ALL.into_iter().find(|role| role.name() == text).ok_or_else(|| {
            let expected = match nearest(text, known()) {
                Some(near) => format!("{near} (one of {})", known().join(", ")),
                None => format!("one of {}", known().join(", ")),
            };
            Error::new(Kind::Config, "unknown role").expected(expected, format!("{text:?}"))
        })
    }
}

impl fmt::Display for Role {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_read_and_the_nearest_is_suggested() {
        for role in Role::ALL {
            assert_eq!(role.to_string().parse::<Role>().unwrap(), role);
        }
        assert!(Role::ALL.is_sorted());
        let error = "wroker".parse::<Role>().unwrap_err();
        assert_eq!(error.kind, Kind::Config);
        assert!(error.to_string().contains("worker (one of reader, worker, admin, server)"), "{error}");
        assert!("".parse::<Role>().unwrap_err().to_string().contains("one of reader"));
    }
}
