//! Handles a link's frames when a session begins or ends, and when the server or the client has a new
//! incarnation.

use crate::link::call::Outcome;
use crate::link::pending::{Pending, Waiter};
use crate::link::queue::{Known, Queue};
use crate::link::state::Link;
use crate::link::unary;
use crate::state::doubt::Doubt;
use crate::state::fence::{another_cluster, earlier_owner, restarted_without_data};
use crate::state::runtime::{lock, random};
use crate::state::stats;
use fastps_core::error::{Error, Result};
use fastps_core::verbs::Fate;
use fastps_proto::v1 as pb;
use fastps_transport::convert;
use std::sync::MutexGuard;
use std::sync::atomic::Ordering;

impl Link {
    /// Starts a session: all unanswered frames will be sent, in order.
    pub(crate) fn begin(&self) -> u64 {
        let mut queue = lock(&self.queue);
        queue.sessions += 1;
        queue.session = queue.sessions;
        queue.cursor = 0;
        queue.recalled = false;
        queue.slices.values_mut().for_each(|known| known.unanswered = 0);
        queue.late.clear();
        queue.ask_again();
        queue.session
    }

    /// Notes that the server answers on this session.
    pub(crate) fn opened(&self) {
        lock(&self.queue).last_error = None;
        if let Some(resolution) = &self.shared.resolution {
            resolution.found();
        }
    }

    /// Ends a session, or an attempt to begin one.
    pub(crate) fn end(&self, error: Error) {
        let mut queue = lock(&self.queue);
        if queue.session != 0 {
            stats::count(&self.shared.counters.reconnects, 1);
        }
        queue.session = 0;
        queue.late.clear();
        queue.last_error = Some(error);
        queue.wake();
    }

    /// Fails, and ends the client, if a hello shows that the server lacks the client's tensors: it is of
    /// another cluster, or was started again without data.
    pub(crate) fn recognize(&self, hello: &pb::HelloResponse) -> Result<()> {
        let known = self.cluster_id.load(Ordering::Acquire);
        let gone = if known != 0 && hello.cluster_id != 0 && known != hello.cluster_id {
            another_cluster(&self.address(), known, hello.cluster_id)
        } else if hello.shard == self.shard && hello.server != self.server() && !unary::keeps_data(hello) {
            restarted_without_data(&self.address())
        } else {
            if hello.cluster_id != 0 {
                self.cluster_id.store(hello.cluster_id, Ordering::Release);
            }
            return Ok(());
        };
        Err(self.fenced(gone))
    }

    /// Fails if the client has met a later owner of the shard than this server: what that one has answered, this one does
    /// not know.
    pub(crate) fn check_term(&self, address: &str, hello: &pb::HelloResponse) -> Result<()> {
        if hello.shard != self.shard {
            return Ok(());
        }
        let known = self.term.fetch_max(hello.term, Ordering::AcqRel);
        if hello.term >= known { Ok(()) } else { Err(earlier_owner(address, known, hello.term)) }
    }

    /// Ends the client, because its tensors are gone.
    pub(crate) fn fenced(&self, why: Error) -> Error {
        self.shared.fence.close(why.shard(self.shard));
        self.close();
        self.closed()
    }

    /// Handles the server's incarnation from a hello. A new one has a new map. It may have recovered its
    /// predecessor's knowledge of this client: then it has renewed the client's session, and unanswered
    /// frames are sent again, under their identity.
    pub(crate) fn met(&self, hello: &pb::HelloResponse) {
        if !hello.cluster.is_empty() {
            self.route().note(hello);
            self.listed.store(hello.cluster_digest, Ordering::Relaxed);
        }
        self.matches.store(convert::can(hello, convert::MATCHES_STALENESS), Ordering::Relaxed);
        self.rounds.store(convert::can(hello, convert::ROUNDS), Ordering::Relaxed);
        self.dtypes.store(convert::can(hello, convert::DTYPES), Ordering::Relaxed);
        self.pull_codec.store(convert::can(hello, convert::PULL_CODEC), Ordering::Relaxed);
        self.registrations.store(convert::can(hello, convert::REGISTRATIONS), Ordering::Relaxed);
        self.history.store(convert::can(hello, convert::HISTORY), Ordering::Relaxed);
        let takes_parts = convert::can(hello, convert::PARTS);
        self.parts.store(takes_parts, Ordering::Relaxed);
        let takes_initial = convert::can(hello, convert::INITIAL_PARTS);
        self.initial_parts.store(takes_initial, Ordering::Relaxed);
        if let Some(resolution) = self.shared.resolution.as_ref().filter(|_| !hello.cluster.is_empty()) {
            resolution.note_listed(&hello.cluster);
        }
        let mut queue = lock(&self.queue);
        queue.most_asked = if convert::can(hello, convert::VERSIONS) { convert::MAX_PARTS } else { 1 };
        if !takes_parts || !takes_initial {
            queue.divide_all();
        }
        if std::mem::replace(&mut queue.server, hello.server) != hello.server {
            self.restarted.store(true, Ordering::Relaxed);
            queue.ask_what_is_left();
            let lost = std::mem::take(&mut queue.lost);
            drop(queue);
            // Reports the losses of the former server separately from those of this one.
            if !lost.is_empty() {
                self.shared.lost.note(lost, &self.shared.map, &self.shared.counters);
            }
            self.shared.map_is_stale.store(true, Ordering::Release);
            // Acknowledged changes may be gone, so nothing is known about the interval.
            self.shared.incarnations.fetch_add(1, Ordering::AcqRel);
        }
    }

    /// Takes a new incarnation, because the server has forgotten the present one; unsent frames will use it.
    pub(crate) fn renew(&self) -> Result<u64> {
        let client = random()?;
        let mut queue = lock(&self.queue);
        queue.client = client;
        queue.lease_lost = false;
        queue.slices.values_mut().for_each(Known::renew);
        self.shared.incarnations.fetch_add(1, Ordering::AcqRel);
        self.shared.memberships.lose();
        let fences = |p: &Pending| p.attempts == 0 && self.shared.memberships.fences(&p.header).is_some();
        let fenced = queue.frames.extract(fences);
        self.forget_sent(queue);
        for Pending { header, waiter, .. } in fenced {
            if let (Waiter::Parts(call, parts), Some(error)) =
                (waiter, self.shared.memberships.fences(&header))
            {
                self.refuse(&call, parts, &error);
            }
        }
        Ok(client)
    }

    /// Marks the outcome of sent frames as unknown.
    fn forget_sent(&self, mut queue: MutexGuard<'_, Queue>) {
        let lost = |p: &Pending| p.attempts > 0 && p.identified() || matches!(p.waiter, Waiter::Doubt(_));
        let lost: Vec<_> = queue.frames.extract(lost).into_iter().map(|p| p.waiter).collect();
        for pending in queue.frames.values_mut().filter(|p| p.attempts > 0) {
            (pending.attempts, pending.sender.client) = (0, 0);
        }
        queue.late.clear();
        drop(queue);
        for waiter in lost {
            match waiter {
                Waiter::Doubt(doubt) => doubt.settle(Fate::Unknown),
                Waiter::Parts(call, indices) => {
                    for index in indices {
                        let part = &call.parts[index];
                        let residue = lock(&part.residue).take();
                        let (name, elements) = (part.name.clone(), part.elements.clone());
                        let doubt = Doubt::new(self.shared.process, name, self.shard, elements, residue);
                        self.shared.note_doubt(&doubt);
                        doubt.settle(Fate::Unknown);
                        call.deliver(index, Outcome::InDoubt(doubt), None);
                    }
                }
            }
        }
    }

    /// Ends the link and every wait for it.
    pub(crate) fn close(&self) {
        let mut queue = lock(&self.queue);
        if std::mem::replace(&mut queue.closed, true) {
            return;
        }
        queue.wake();
        self.changed.notify_one();
        *lock(&self.channel) = None;
        let unsent = queue.frames.extract(|p| p.attempts == 0 || !p.identified());
        let unsent: Vec<_> = unsent.into_iter().map(|p| p.waiter).collect();
        let error = self.not_sent(&queue);
        self.forget_sent(queue);
        for waiter in unsent {
            match waiter {
                Waiter::Doubt(doubt) => doubt.settle(Fate::Unknown),
                Waiter::Parts(call, parts) => self.refuse(&call, parts, &error),
            }
        }
    }
}
