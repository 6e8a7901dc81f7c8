//! What a link has to send and what it waits for.

use super::call::Call;
use super::doubt::Doubt;
use super::payload::Payload;
use fastps_core::error::Error;
use fastps_proto::v1 as pb;
use foldhash::fast::RandomState;
use std::collections::hash_map::Entry;
use std::collections::{BTreeMap, HashMap};
use std::ops::Range;
use std::sync::Arc;
use std::task::Waker;

/// Unanswered pushes per slice: less than what a slice remembers, so that each may be sent again.
pub(super) const MOST_UNANSWERED: u32 = fastps_core::identity::WINDOW as u32 / 2;

/// Whom an answer goes to.
#[derive(Clone, Debug)]
pub(super) enum Waiter {
    /// Parts of a call: one, or all those of a sparse message.
    Parts(Arc<Call>, Range<usize>),
    Doubt(Arc<Doubt>),
}

#[derive(Debug)]
pub(super) struct Pending {
    pub(super) header: pb::Header,
    pub(super) payload: Payload,
    pub(super) waiter: Waiter,
    /// How often it was given to a connection.
    pub(super) attempts: u32,
    /// The identity under which the base's own changes were counted.
    pub(super) base_of: u64,
}

impl Pending {
    pub(super) fn identified(&self) -> bool {
        matches!(&self.waiter, Waiter::Parts(call, _) if call.identified)
    }

    /// The slices that it is for.
    pub(super) fn slices(&self) -> impl Iterator<Item = u64> {
        let parts = &self.header.parts;
        let whole = parts.is_empty().then_some(self.header.slice);
        whole.into_iter().chain(parts.iter().map(|part| part.slice))
    }
}

#[derive(Debug)]
pub(super) struct Queue {
    /// This link's incarnation.
    pub(super) client: u64,
    /// The server's incarnation.
    pub(super) server: u64,
    pub(super) next_tag: u64,
    /// Frames from here on were not sent on the present connection.
    pub(super) cursor: u64,
    pub(super) frames: BTreeMap<u64, Pending>,
    /// Frames in doubt whose answer may still come on the present connection.
    pub(super) late: HashMap<u64, Vec<(Arc<Doubt>, u64)>>,
    /// Pushes per slice that were sent on the present connection and not answered.
    pub(super) unanswered: HashMap<u64, u32, RandomState>,
    /// Number of the present stream; 0 = none.
    pub(super) session: u64,
    pub(super) sessions: u64,
    pub(super) stream: Option<Waker>,
    pub(super) last_error: Option<Error>,
    /// The server does not know this incarnation any more: nothing more is sent under it.
    pub(super) lease_lost: bool,
    pub(super) closed: bool,
    /// The present connection must end, because it keeps memory of a call that has ended.
    pub(super) recalled: bool,
}

impl Queue {
    pub(super) fn new(client: u64, server: u64) -> Self {
        Self {
            client,
            server,
            next_tag: 1,
            cursor: 0,
            frames: BTreeMap::new(),
            late: HashMap::new(),
            unanswered: HashMap::default(),
            session: 0,
            sessions: 0,
            stream: None,
            last_error: None,
            lease_lost: false,
            closed: false,
            recalled: false,
        }
    }

    /// Nothing that was sent is unanswered, and nothing more may be sent under the lost lease.
    pub(super) fn is_drained(&self) -> bool {
        self.lease_lost && !self.frames.values().any(|p| p.attempts > 0)
    }

    pub(super) fn push(&mut self, header: pb::Header, payload: Payload, waiter: Waiter, base_of: u64) -> u64 {
        let tag = self.next_tag;
        self.next_tag += 1;
        let header = pb::Header { tag, ..header };
        self.frames.insert(tag, Pending { header, payload, waiter, attempts: 0, base_of });
        tag
    }

    pub(super) fn wake(&mut self) {
        if let Some(waker) = self.stream.take() {
            waker.wake();
        }
    }

    /// One push less is unanswered.
    pub(super) fn answered(&mut self, slice: u64) {
        let Entry::Occupied(mut unanswered) = self.unanswered.entry(slice) else {
            return;
        };
        let before = *unanswered.get();
        if before > 1 {
            unanswered.insert(before - 1);
        } else {
            unanswered.remove();
        }
        if before == MOST_UNANSWERED {
            self.wake();
        }
    }
}
