//! The seat of a coordinator: a coordinator that takes it gets a new term, which fences former coordinators.

use super::{MAX_STATE, Spaces, check_name};
use crate::base::error::{Error, Kind, Result};
use crate::base::sync::Arc;
use crate::tensor::SpaceId;
use crate::tensor::program::MAX_COUNT;

/// A coordinator's request about its seat.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum SeatRequest {
    /// To take it, with a term of at least this: the largest that a slice knows. Fails while another client
    /// holds it.
    Take {
        /// Smallest term.
        at_least: u64,
        /// Name of the coordinator, for others.
        name: Arc<str>,
    },
    /// To store the state in place of the last one.
    Store {
        /// The coordinator's term.
        term: u64,
        /// At most [`MAX_STATE`] bytes.
        state: Arc<[u8]>,
    },
    /// To leave the seat. The space stays open.
    Leave {
        /// The coordinator's term.
        term: u64,
    },
}

/// Identifies a coordinator: on a server by the hash of its client's secret. The clients of a store need no
/// secrets from each other: there it is made of a client's number.
pub type SeatKey = [u8; 32];

/// The most by which a coordinator may raise the term.
const MAX_TERM_STEP: u64 = 1 << 20;

/// A client that acts as a coordinator.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Claimant {
    /// Its incarnation, whose end frees the seat.
    pub client: u64,
    /// Proves that it is the one that took the seat, also under another incarnation.
    pub key: SeatKey,
}

impl Claimant {
    /// A client of a store.
    pub(crate) fn in_store(client: u64) -> Self {
        let mut key = SeatKey::default();
        key[..8].copy_from_slice(&client.to_le_bytes());
        Self { client, key }
    }
}

/// A coordinator's seat.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Seat {
    /// The term of the coordinator that took it last.
    pub term: u64,
    /// The state that a coordinator stored last; empty if none did.
    pub state: Arc<[u8]>,
}

impl Spaces {
    /// Carries out a coordinator's request about its seat.
    pub fn coordinate(&mut self, who: Claimant, space: SpaceId, request: &SeatRequest) -> Result<Seat> {
        let entry = self.entry(space)?;
        match request {
            SeatRequest::Take { at_least, name } => {
                check_name("coordinator", name)?;
                let most = entry.term.saturating_add(MAX_TERM_STEP).min(MAX_COUNT - 1);
                if *at_least > most {
                    let error = Error::new(Kind::Config, "invalid smallest term of a coordinator");
                    return Err(error.expected(format!("at most {most}"), at_least));
                }
                if entry.coordinator.is_some() && entry.key.is_none_or(|key| key != who.key) {
                    let message = format!("space {:?} has a coordinator", entry.spec.space.name);
                    return Err(Error::new(Kind::Precondition, message)
                        .expected("a free seat", format!("{:?} in it", entry.holder)));
                }
                entry.memory.grow_to(entry.bytes() + name.len() as u64)?;
                entry.term = entry.term.max(*at_least).saturating_add(1);
                (entry.coordinator, entry.key, entry.holder) =
                    (Some(who.client), Some(who.key), name.clone());
                entry.memory.shrink_to(entry.bytes());
                // The former coordinator no longer waits for its batch.
                entry.waiter = None;
            }
            SeatRequest::Store { term, state } => {
                entry.seat(who, *term)?;
                if state.len() > MAX_STATE {
                    let error = Error::new(Kind::Config, "the state of a coordinator is too long");
                    return Err(error.expected(format!("at most {MAX_STATE} bytes"), state.len()));
                }
                entry.memory.grow_to(entry.bytes() + state.len() as u64)?;
                entry.state = state.clone();
                entry.memory.shrink_to(entry.bytes());
            }
            SeatRequest::Leave { term } => {
                if entry.check_seat(&who.key, *term).is_ok() {
                    (entry.coordinator, entry.waiter) = (None, None);
                }
            }
        }
        Ok(Seat { term: entry.term, state: entry.state.clone() })
    }

    /// Returns whether the space has no coordinator.
    pub fn is_vacant(&self, space: SpaceId) -> bool {
        self.entries.values().any(|entry| entry.spec.space.id == space && entry.coordinator.is_none())
    }

    /// Fails unless the client with this key has taken the seat last, with this term.
    pub fn check_seat(&self, space: SpaceId, term: u64, key: &SeatKey) -> Result<()> {
        let entry = self.entries.values().find(|entry| entry.spec.space.id == space);
        entry.ok_or_else(super::no_space)?.check_seat(key, term)
    }
}
