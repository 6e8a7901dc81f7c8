//! What a catalog holds, and the changes of it.

use crate::catalog::secret::SecretHash;
use fastps_core::mode::{Mode, Seat};
use fastps_core::tensor::TensorSpec;
use serde::{Deserialize, Serialize};
use std::sync::Arc;

/// A change of the catalog.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum Event {
    /// A client's session began, at a server that knew of no secrets.
    SessionBegan(u64),
    /// A client's session began, or one that had no secret got its own.
    SessionOpened(u64, SecretHash),
    /// It ended: what slices remember of the client is forgotten.
    SessionEnded(u64),
    /// Slices were made for a reservation.
    Reserved(u64, Reservation),
    /// All their initial values are here.
    Sealed(u64),
    /// The tensor is known to exist.
    Committed(u64),
    /// Slices were freed.
    Dropped(Vec<u64>),
    /// Shard 0: a tensor exists, by its reservation.
    Entered(u64, Holding),
    /// Shard 0: it does not, any more.
    Removed(Arc<str>),
    /// A worker took a place in a group; whether as many as its mode needs have been there by now.
    Joined(Member, bool),
    /// It gave its place back, or that in the group's warm start.
    Left {
        /// The worker.
        client: u64,
        /// The group.
        group: u32,
        /// The one in the warm start.
        warm: bool,
    },
}

/// A worker with a place in a group.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Member {
    /// The worker.
    pub client: u64,
    /// Its group as frames carry it.
    pub group: u32,
    /// Its place.
    pub seat: Seat,
}

impl Member {
    pub(super) fn is_warm(&self) -> bool {
        matches!(self.seat.mode, Mode::WarmStart { .. })
    }
}

/// Slices of one tensor that the shard holds.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Reservation {
    /// The tensor.
    pub spec: TensorSpec,
    /// Its group as frames carry it.
    pub group: u32,
    /// Identifier and index in the tensor.
    pub slices: Vec<(u64, u64)>,
    /// How far the registration is.
    pub stage: Stage,
}

/// How far a registration is, as the shard knows.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Stage {
    /// Initial values are missing.
    Open,
    /// They are here; whether the tensor exists, shard 0 knows.
    Sealed,
    /// It does.
    Committed,
}

/// A tensor in the map of shard 0.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Holding {
    /// The tensor.
    pub spec: TensorSpec,
    /// Its group as frames carry it.
    pub group: u32,
    /// The identifier of each slice.
    pub slices: Vec<u64>,
    /// The shard of each slice.
    pub shards: Vec<u32>,
}
