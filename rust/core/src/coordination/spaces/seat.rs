//! The seat of a coordinator: a coordinator that takes it gets a new term, which fences former coordinators.

use super::{MAX_STATE, Spaces, check_name};
use crate::base::error::{Error, Kind, Result};
use crate::base::sync::Arc;
use crate::tensor::SpaceId;
use crate::tensor::program::MAX_COUNT;

/// What a coordinator wants of its seat.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum SeatRequest {
    /// To take it, with a term of at least this: the largest that a slice knows. Fails while another client
    /// holds it.
    Take {
        /// Smallest term.
        at_least: u64,
        /// What others call the coordinator.
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

/// A coordinator's seat.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Seat {
    /// The term of the coordinator that took it last.
    pub term: u64,
    /// The state that a coordinator stored last; empty if none did.
    pub state: Arc<[u8]>,
}

impl Spaces {
    /// Carries out what a coordinator wants of its seat.
    pub fn coordinate(&mut self, client: u64, space: SpaceId, request: &SeatRequest) -> Result<Seat> {
        let entry = self.entry(space)?;
        match request {
            SeatRequest::Take { at_least, name } => {
                check_name("coordinator", name)?;
                if *at_least >= MAX_COUNT {
                    let error = Error::new(Kind::Config, "invalid smallest term of a coordinator");
                    return Err(error.expected("less than 2^62", at_least));
                }
                if entry.coordinator.is_some_and(|holder| holder != client) {
                    let message = format!("space {:?} has a coordinator", entry.spec.space.name);
                    return Err(Error::new(Kind::Precondition, message)
                        .expected("a free seat", format!("{:?} in it", entry.holder)));
                }
                entry.memory.grow_to(entry.bytes() + name.len() as u64)?;
                entry.term = entry.term.max(*at_least).saturating_add(1);
                (entry.coordinator, entry.holder) = (Some(client), name.clone());
                entry.memory.shrink_to(entry.bytes());
                // The former coordinator no longer waits for its batch.
                entry.waiter = None;
            }
            SeatRequest::Store { term, state } => {
                entry.seat(client, *term)?;
                if state.len() > MAX_STATE {
                    let error = Error::new(Kind::Config, "the state of a coordinator is too long");
                    return Err(error.expected(format!("at most {MAX_STATE} bytes"), state.len()));
                }
                entry.memory.grow_to(entry.bytes() + state.len() as u64)?;
                entry.state = state.clone();
                entry.memory.shrink_to(entry.bytes());
            }
            SeatRequest::Leave { term } => {
                if *term == entry.term && entry.coordinator == Some(client) {
                    (entry.coordinator, entry.waiter) = (None, None);
                }
            }
        }
        Ok(Seat { term: entry.term, state: entry.state.clone() })
    }
}
