//! Events that change a [`Catalog`](super::Catalog), and the records it holds. The log stores events as JSON.

use crate::catalog::secret::SecretHash;
use fastps_core::mode::{MembershipRequest, Mode};
use fastps_core::tensor::TensorSpec;
use serde::{Deserialize, Serialize, Serializer};
use std::sync::Arc;

/// A change of the catalog. Variant names are part of the file format.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum Event {
    /// A client opened a session at a server that predates session secrets.
    SessionBegan(u64),
    /// A client opened a session, or a session without a secret received one.
    SessionOpened(u64, SecretHash),
    /// The name of a client that opened a session, in a log that keeps history.
    Named(u64, Arc<str>),
    /// The session ended at a server that does not list ended incarnations.
    SessionEnded(u64),
    /// The session ended: slices forget what they remember of the client.
    SessionOver {
        /// The client's identifier.
        client: u64,
        /// Seconds since 1970.
        at: u32,
        /// How many ended incarnations the shard remembers from now on: the newest.
        remembered: u32,
    },
    /// Slices were created for a reservation.
    Reserved(u64, Reservation),
    /// All initial values of the reservation have arrived.
    Sealed(u64),
    /// The tensor is known to exist.
    Committed(u64),
    /// Slices were freed.
    Dropped(Vec<u64>),
    /// Shard 0: the tensor of this reservation was added to the map.
    Entered(u64, Holding),
    /// Shard 0: the tensor of this name was removed from the map.
    Removed(Arc<str>),
    /// A worker joined a group. The flag is set once the group has had as many workers as its mode needs.
    Joined(Member, bool),
    /// A worker left its place in a group, or its place in the group's warm start.
    Left {
        /// The worker's client identifier.
        client: u64,
        /// The group's number on the wire.
        group: u32,
        /// Set if the worker left the warm start's place.
        warm: bool,
    },
    /// Shard 0: a space of vectors was opened under this identifier.
    SpaceOpened(u64, ListedSpace),
    /// Shard 0: a coordinator took the seat of a space.
    SeatTaken {
        /// The space.
        space: u64,
        /// The coordinator's term.
        term: u64,
        /// Name of the coordinator, for others.
        holder: Arc<str>,
        /// Its client; 0 if an earlier version did not record it.
        #[serde(default)]
        client: u64,
        /// The hash of its client's secret, if recorded.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        key: Option<SecretHash>,
    },
    /// Shard 0: the coordinator left the seat of a space.
    SeatLeft(u64),
    /// Shard 0: the coordinator of a space stored its state.
    StateStored(u64, CoordinatorState),
    /// Shard 0: a space was closed.
    SpaceClosed(u64),
    /// Another shard: the identity of the cluster that its slices belong to, from shard 0.
    ClusterLearned(u64),
}

/// A space of vectors in the list of shard 0.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ListedSpace {
    /// Its name.
    pub name: Arc<str>,
    /// The names of its tensors.
    pub tensors: Vec<Arc<str>>,
    /// The names of its vectors.
    pub vectors: Vec<Arc<str>>,
    /// Milliseconds that it is kept without a coordinator.
    pub keep_for_ms: u64,
    /// The client that opened it; 0 if an earlier version did not record it.
    #[serde(default)]
    pub opener: u64,
    /// The term of the last coordinator in its seat; 0 if there was none.
    #[serde(default)]
    pub term: u64,
    /// Name of that coordinator, for others.
    #[serde(default)]
    pub holder: Arc<str>,
    /// The client in the seat; 0 if free.
    #[serde(default)]
    pub coordinator: u64,
    /// The hash of the secret of the last client in the seat, if recorded.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub key: Option<SecretHash>,
    /// The last state that a coordinator stored.
    #[serde(default)]
    pub state: CoordinatorState,
}

/// The state of a coordinator: one copy, which all that know the state share.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(try_from = "WrittenState<String>")]
pub struct CoordinatorState(Arc<[u8]>);

/// A state in a file, where it takes at most twice its bytes.
#[derive(Serialize, Deserialize)]
enum WrittenState<T> {
    /// UTF-8 without control characters, each of which JSON writes with six.
    Text(T),
    /// Anything else, in hexadecimal digits.
    Hex(T),
    /// Earlier versions wrote anything else as numbers.
    Bytes(Vec<u8>),
}

impl CoordinatorState {
    /// The state of these bytes.
    pub fn new(bytes: &Arc<[u8]>) -> Self {
        Self(bytes.clone())
    }

    /// Its bytes.
    pub fn bytes(&self) -> Arc<[u8]> {
        self.0.clone()
    }
}

impl TryFrom<WrittenState<String>> for CoordinatorState {
    type Error = &'static str;

    fn try_from(written: WrittenState<String>) -> Result<Self, Self::Error> {
        let bytes = match written {
            WrittenState::Text(text) => text.into_bytes(),
            WrittenState::Hex(digits) => from_hex(&digits).ok_or("not in hexadecimal digits")?,
            WrittenState::Bytes(bytes) => bytes,
        };
        Ok(Self(bytes.into()))
    }
}

fn from_hex(digits: &str) -> Option<Vec<u8>> {
    let (pairs, rest) = digits.as_bytes().as_chunks::<2>();
    let digit = |byte: u8| char::from(byte).to_digit(16);
    let bytes = pairs.iter().map(|[high, low]| Some((16 * digit(*high)? + digit(*low)?) as u8));
    if rest.is_empty() { bytes.collect() } else { None }
}

impl Serialize for CoordinatorState {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match std::str::from_utf8(&self.0) {
            Ok(text) if !text.contains(char::is_control) => WrittenState::Text(text).serialize(serializer),
            _ => {
                let digit = |half: u8| char::from_digit(half.into(), 16).unwrap_or_default();
                let digits = self.0.iter().flat_map(|byte| [digit(byte >> 4), digit(byte & 15)]);
                WrittenState::Hex(digits.collect::<String>()).serialize(serializer)
            }
        }
    }
}

/// A worker with a place in a group.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Member {
    /// The worker's client identifier.
    pub client: u64,
    /// The group's number on the wire.
    pub group: u32,
    /// The worker's place.
    pub seat: MembershipRequest,
}

impl Member {
    pub(super) fn is_warm(&self) -> bool {
        matches!(self.seat.mode, Mode::WarmStart { .. })
    }
}

/// The slices of one tensor that this shard holds.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Reservation {
    /// The tensor.
    pub spec: TensorSpec,
    /// The group's number on the wire.
    pub group: u32,
    /// Identifier of each slice, and its index in the tensor.
    pub slices: Vec<(u64, u64)>,
    /// Progress of the registration.
    pub stage: Stage,
}

/// Progress of a registration, as this shard knows it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Stage {
    /// Some initial values are missing.
    Open,
    /// All initial values are here. Only shard 0 knows whether the tensor exists.
    Sealed,
    /// The tensor exists.
    Committed,
}

/// A tensor in the map of shard 0.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Holding {
    /// The tensor.
    pub spec: TensorSpec,
    /// The group's number on the wire.
    pub group: u32,
    /// The identifier of each slice.
    pub slices: Vec<u64>,
    /// The shard of each slice.
    pub shards: Vec<u32>,
}
