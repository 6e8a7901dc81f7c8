//! A client's meaning of a receipt, and what a server can do, on the wire.

use super::fields::unknown;
use super::request::crc32c;
use fastps_core::error::{Error, Kind, Result, check_printable};
use fastps_proto::v1 as pb;

/// The capability that a server with a log lists in its answer to Hello.
pub const CAN_LOG: &str = "log";

/// The capability of a server that copies its log to a bucket, and gives receipts for that.
pub const COPIED: &str = "copied";

/// The capability of a server that matches momentum by the staleness of a slice's gradients; earlier ones
/// match it by the number of clients.
pub const MATCHES_STALENESS: &str = "staleness-matching";

/// The capability of a server that ends versions by a quorum and a grace, and weighs their gradients.
pub const ROUNDS: &str = "rounds";

/// The capability of a server whose tensors keep averages; earlier ones would drop them from a spec.
pub const DTYPES: &str = "dtypes";
/// The capability of a server that answers a pull in bfloat16; earlier ones refuse the codec of a pull.
pub const PULL_CODEC: &str = "pull-codec";

/// The server answers a question about the versions of many slices.
pub const VERSIONS: &str = "versions";

/// The capability of a server that keeps history, with notes of pushes and marks.
pub const HISTORY: &str = "history";

/// Longest name of a mark, in bytes.
const MAX_MARK_BYTES: usize = 256;

/// Fails unless this can be the name of a mark.
pub fn check_mark_name(name: &str) -> Result<()> {
    if !(1..=MAX_MARK_BYTES).contains(&name.len()) {
        let error = Error::new(Kind::Config, "invalid name of a mark");
        return Err(
            error.expected(format!("1 to {MAX_MARK_BYTES} bytes of UTF-8"), format!("{} bytes", name.len()))
        );
    }
    check_printable("name of a mark", name)
}

/// The capability of a server that takes several whole slices in one message.
pub const PARTS: &str = "parts";

/// The capability of a server that takes the initial values of several slices in one message.
pub const INITIAL_PARTS: &str = "initial-parts";

/// The capability of a server whose calls register several tensors at a time.
pub const REGISTRATIONS: &str = "registrations";

/// Returns whether a server has a capability.
pub fn can(hello: &pb::HelloResponse, capability: &str) -> bool {
    hello.capabilities.iter().any(|can| can == capability)
}

/// Number of a list of shards, which changes with it; never 0.
pub fn cluster_digest(cluster: &[String]) -> u64 {
    u64::from(crc32c(cluster.join("\n").as_bytes())) | (cluster.len() as u64) << 32
}

/// Guarantee of a receipt; each includes those before it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub enum Ack {
    /// The push was applied.
    #[default]
    Applied,
    /// It is in the server's log on disk.
    Logged,
    /// It is in the copy of that log in a bucket, and in what every later owner of the shard has.
    Copied,
}

impl Ack {
    /// Reads it.
    pub fn from_wire(ack: i32) -> Result<Self> {
        match pb::Ack::try_from(ack) {
            Ok(pb::Ack::Unspecified | pb::Ack::Applied) => Ok(Self::Applied),
            Ok(pb::Ack::Logged) => Ok(Self::Logged),
            Ok(pb::Ack::Copied) => Ok(Self::Copied),
            Err(_) => Err(unknown("ack", "0 to 3", ack)),
        }
    }

    /// Writes it.
    pub fn to_wire(self) -> pb::Ack {
        match self {
            Self::Applied => pb::Ack::Applied,
            Self::Logged => pb::Ack::Logged,
            Self::Copied => pb::Ack::Copied,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_unknown_number_is_no_ack() {
        let known = [0, 1, 2, 3].map(|ack| Ack::from_wire(ack).unwrap());
        assert_eq!(known, [Ack::Applied, Ack::Applied, Ack::Logged, Ack::Copied]);
        assert!(known.iter().all(|ack| Ack::from_wire(ack.to_wire().into()).unwrap() == *ack));
        for ack in [4, 99, -1, i32::MAX, i32::MIN] {
            let error = Ack::from_wire(ack).unwrap_err();
            assert!(error.message.contains("ack") && error.got == Some(ack.to_string()), "{error}");
        }
    }
}
