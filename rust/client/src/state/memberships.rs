//! A client's memberships in groups of workers.

use crate::state::runtime::lock;
use fastps_core::error::{Error, Kind};
use fastps_core::mode::{MembershipRequest, Mode};
use fastps_proto::v1 as pb;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};

/// A client's membership in a group.
#[derive(Clone, Debug)]
pub(crate) struct Membership {
    pub(crate) group: u32,
    /// Group name, kept because the map forgets a group with its last tensor.
    pub(crate) name: Arc<str>,
    pub(crate) seat: MembershipRequest,
    /// Steps taken.
    pub(crate) clock: u64,
    /// Steps that shard 0 has acknowledged.
    pub(crate) acknowledged: u64,
    /// Set when a server has forgotten the membership: others continue without this worker until it rejoins.
    pub(crate) lost: bool,
}

impl Membership {
    pub(crate) fn is(&self, group: u32, warm: bool) -> bool {
        self.group == group && is_warm(self.seat.mode) == warm
    }

    /// Rejoins. A restarted server starts its clock at 0; otherwise only the last report may be missing.
    pub(crate) fn rejoined(&mut self, clock: u64) {
        self.clock = if clock < self.acknowledged { clock } else { self.clock.max(clock) };
        self.acknowledged = clock;
    }

    /// Returns whether the shard knows the membership: shards other than 0 register only those of `Sync`.
    pub(crate) fn concerns(&self, shard: u32) -> bool {
        shard == 0 || matches!(self.seat.mode, Mode::Sync(_))
    }
}

/// The client's memberships, at most one per group and phase.
#[derive(Debug, Default)]
pub(crate) struct Memberships {
    all: Mutex<Vec<Membership>>,
    some_is_lost: AtomicBool,
}

impl Memberships {
    pub(crate) fn is_empty(&self) -> bool {
        lock(&self.all).is_empty()
    }

    /// Returns whether the client has a membership that is not lost.
    pub(crate) fn has(&self, group: u32, warm: bool) -> bool {
        lock(&self.all).iter().any(|known| known.is(group, warm) && !known.lost)
    }

    /// Keeps a membership instead of an earlier one, unless it was lost already.
    pub(crate) fn take(&self, membership: Membership, is_lost: impl FnOnce() -> bool) -> bool {
        let mut memberships = lock(&self.all);
        // Checked under the lock of `lose`, so that no loss is missed.
        if is_lost() {
            return false;
        }
        memberships.retain(|known| !known.is(membership.group, is_warm(membership.seat.mode)));
        memberships.push(membership);
        self.note_lost(&memberships);
        true
    }

    pub(crate) fn leave(&self, group: u32, warm: bool) -> Vec<Membership> {
        let mut memberships = lock(&self.all);
        let left = memberships.extract_if(.., |membership| membership.is(group, warm)).collect();
        self.note_lost(&memberships);
        left
    }

    /// Takes steps. `None` without a membership.
    pub(crate) fn advance(&self, group: u32, warm: bool, steps: u64) -> Option<Membership> {
        let mut memberships = lock(&self.all);
        let membership = memberships.iter_mut().find(|membership| membership.is(group, warm))?;
        // A server may have reported any number.
        membership.clock = membership.clock.saturating_add(steps);
        Some(membership.clone())
    }

    pub(crate) fn change(&self, group: u32, warm: bool, change: impl FnMut(&mut Membership)) {
        lock(&self.all).iter_mut().filter(|known| known.is(group, warm)).for_each(change);
    }

    /// Number of the group of this name, if the client is a member of it.
    pub(crate) fn group(&self, name: &str) -> Option<u32> {
        lock(&self.all).iter().find(|membership| *membership.name == *name).map(|membership| membership.group)
    }

    /// Memberships at a shard that are not lost.
    pub(crate) fn held_at(&self, shard: u32) -> Vec<Membership> {
        let held = |membership: &&Membership| membership.concerns(shard) && !membership.lost;
        lock(&self.all).iter().filter(held).cloned().collect()
    }

    /// Marks memberships in waiting modes as lost everywhere once one shard has forgotten the client.
    pub(crate) fn lose(&self) {
        let mut memberships = lock(&self.all);
        let waits = |mode| matches!(mode, Mode::Sync(_) | Mode::Bounded { .. });
        memberships.iter_mut().for_each(|membership| membership.lost |= waits(membership.seat.mode));
        self.note_lost(&memberships);
    }

    fn note_lost(&self, memberships: &[Membership]) {
        self.some_is_lost.store(memberships.iter().any(|membership| membership.lost), Ordering::Release);
    }

    /// Error if the frame is a gradient of a worker whose membership is lost.
    pub(crate) fn fences(&self, header: &pb::Header) -> Option<Error> {
        if !self.some_is_lost.load(Ordering::Acquire) || header.kind() != pb::Kind::Gradient {
            return None;
        }
        let lost =
            lock(&self.all).iter().any(|membership| membership.lost && membership.group == header.group);
        let why =
            "the worker's lease ran out, and the others continued without it: it must join its group again";
        lost.then(|| Error::new(Kind::Lease, why))
    }
}

pub(crate) fn is_warm(mode: Mode) -> bool {
    matches!(mode, Mode::WarmStart { .. })
}
