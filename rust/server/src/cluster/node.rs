//! State that all calls to one shard share.

pub(crate) mod coordinator;
mod identity;
pub(crate) mod owners;
mod spaces;

use crate::answers::Pins;
use crate::auth::access::Access;
use crate::auth::budget::Budgets;
use crate::auth::caller::Caller;
use crate::auth::peer::unauthenticated::Unauthenticated;
use crate::auth::principal::Principal;
use crate::auth::scope::Scope;
use crate::auth::tls_watch::TlsWatch;
use crate::cluster::map::Map;
use crate::cluster::membership::Membership;
use crate::cluster::peers::Peers;
use crate::cluster::reservation::{MAX_ASKED_RESERVATIONS, Reservations};
use crate::cluster::session::{SessionOver, Sessions};
use crate::cluster::spaces::SpaceTable;
use crate::human;
use crate::measures::Measures;
use crate::persistence::Files;
use crate::persistence::gate::Gate;
use coordinator::Coordinator;
use fastps_core::error::{Error, Kind, Result};
use fastps_core::mode::Mode;
use fastps_core::portions::Portions;
use fastps_core::shard::Shard;
use fastps_core::tensor::SliceId;
use fastps_core::verbs::GroupState;
use fastps_proto::v1 as pb;
use owners::KnownOwners;
use serde_json::{Value, json};
use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, MutexGuard, PoisonError};
use std::time::{Duration, Instant};
use tokio::sync::{Semaphore, watch};

/// The epoch of the cluster map; it will change when shards join or leave.
pub(crate) const EPOCH: u64 = 1;

/// Most groups listed in statistics.
const MAX_LISTED_GROUPS: usize = 256;

/// Retry delay after losing a race.
const RETRY_AFTER_MS: u64 = 100;

/// Shutdown phase of a server.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Phase {
    Serving,
    /// Finishes calls under way and refuses new ones.
    Draining,
    /// Ends streams and connections.
    Stopping,
    /// Cuts those that remain.
    Cutting,
}

/// One shard with its surroundings.
#[derive(Debug)]
pub(crate) struct Node {
    pub(crate) shard: Arc<Shard>,
    /// Random identity of this start.
    pub(crate) server: u64,
    pub(crate) cluster: Arc<[String]>,
    pub(crate) coordinator: Coordinator,
    pub(crate) membership: Membership,
    pub(crate) security: Security,
    pub(crate) sessions: Sessions,
    /// How long a stream polls for its next frame before it sleeps.
    pub(crate) spin: Duration,
    pub(crate) reservations: Reservations,
    /// State that outlives the process.
    pub(crate) files: Files,
    /// Holds writes for the beginning of a cut.
    pub(crate) gate: Arc<Gate>,
    /// Permit to run a program on one slice.
    pub(crate) programs: Semaphore,
    /// The spaces, which shard 0 lists; other shards keep what they have asked about.
    pub(crate) space_table: SpaceTable,
    pub(crate) phase: watch::Receiver<Phase>,
    /// Values being sent to readers.
    pub(crate) pins: Arc<Pins>,
    pub(crate) counters: ConnectionCounters,
    pub(crate) measures: Arc<Measures>,
    /// Set by each sweep, and taken by the watchdog.
    pub(crate) swept: AtomicBool,
}

/// Who may call a shard, and how much.
#[derive(Debug)]
pub(crate) struct Security {
    /// Set if the server was started with `--insecure`.
    pub(crate) insecure: bool,
    /// Knows the callers.
    pub(crate) access: Arc<Access>,
    /// The TLS files of the server.
    pub(crate) tls_watch: Arc<TlsWatch>,
    /// Rates and memory of principals.
    pub(crate) budgets: Budgets,
    /// Connections whose callers are unknown.
    pub(crate) unauthenticated: Arc<Unauthenticated>,
    /// TLS and token for calls to other shards.
    pub(crate) peers: Peers,
}

/// What a shard has counted at its connections.
#[derive(Debug, Default)]
pub(crate) struct ConnectionCounters {
    pub(crate) open: AtomicU64,
    pub(crate) refused: AtomicU64,
    pub(crate) handshakes_failed: AtomicU64,
    pub(crate) floods_cut: AtomicU64,
    pub(crate) streams_reset: AtomicU64,
    pub(crate) values_lent: AtomicU64,
    pub(crate) frames: AtomicU64,
    /// Frames read until the last sweep.
    pub(crate) frames_swept: AtomicU64,
}

impl ConnectionCounters {
    pub(crate) fn count(counter: &AtomicU64) {
        counter.fetch_add(1, Ordering::Relaxed);
    }
}

impl Node {
    pub(crate) fn index(&self) -> u32 {
        self.shard.index()
    }

    /// The map; only shard 0 has it.
    pub(crate) fn map(&self) -> Result<MutexGuard<'_, Map>> {
        let own = self.coordinator.own();
        let own = own.ok_or_else(|| self.not_coordinator("only shard 0 has the cluster map"))?;
        Ok(own.map.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Who owns the shards, as far as it is known; only shard 0 tells, if the servers have records of that.
    pub(crate) fn owners(&self) -> Vec<pb::ShardOwner> {
        let owners = self.coordinator.own().and_then(|own| own.owners.as_ref());
        owners.map(KnownOwners::known).unwrap_or_default()
    }

    /// The portions of samples; only shard 0 leases them.
    pub(crate) fn portions(&self) -> Result<MutexGuard<'_, Portions>> {
        let own = self.coordinator.own();
        let own = own.ok_or_else(|| self.not_coordinator("only shard 0 leases portions of samples"))?;
        Ok(own.portions.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Returns whether this is shard 0.
    pub(crate) fn is_coordinator(&self) -> bool {
        self.coordinator.own().is_some()
    }

    pub(crate) fn not_coordinator(&self, message: &str) -> Error {
        let first = self.cluster.first().map_or("", String::as_str);
        Error::new(Kind::Precondition, message)
            .expected(format!("shard 0 at {first}"), format!("shard {}", self.index()))
    }

    /// Fails if another server may own the shard.
    pub(crate) fn check_owner(&self) -> Result<()> {
        self.files.owner().map_or(Ok(()), |owner| owner.check())
    }

    /// Names the shard in an error, if this server owns it: clients take who names it for the shard.
    pub(crate) fn sign(&self, error: Error) -> Error {
        if self.check_owner().is_ok() { error.shard(self.index()) } else { error }
    }

    /// Fails while the server shuts down, if another may own the shard, and if the shard has lost slices.
    pub(crate) fn check_serving(&self) -> Result<()> {
        self.check_owner()?;
        if *self.phase.borrow() == Phase::Serving {
            return self.membership.check();
        }
        Err(Error::new(Kind::Unavailable, "the server is stopping").retry_after_ms(1000))
    }

    /// Fails unless the frame or call was made with this epoch of the map.
    pub(crate) fn check_epoch(epoch: u64) -> Result<()> {
        if epoch == EPOCH || fastps_core::fault::fault("epoch_accepted") {
            return Ok(());
        }
        Err(Error::new(
            Kind::StaleEpoch,
            "the frame was made for another epoch of the cluster map: fetch the map again",
        )
        .expected(format!("epoch {EPOCH}"), format!("epoch {epoch}")))
    }

    /// Ends the stream that has waited longest for its client to read, and frees its pins. Returns false if
    /// there is none.
    pub(crate) fn reset_slowest_reader(&self) -> bool {
        let reason = Error::new(
            Kind::Capacity,
            "the stream was reset: its values waited longest to be read, and the shard's memory is full",
        );
        let reset = self.pins.reset_oldest(&reason.shard(self.index()).retry_after_ms(1000));
        if reset {
            ConnectionCounters::count(&self.counters.streams_reset);
            tracing::warn!(shard = self.index(), "memory is full: the stream of the slowest reader is reset");
        }
        reset
    }

    /// If the session table is full, ends an idle session that owns nothing here to admit this client.
    pub(crate) fn evict_idle_session(&self, client: u64) {
        if self.sessions.is_live(client) {
            return;
        }
        let now = Instant::now();
        let idle = self.sessions.idle(now);
        let bare = idle.into_iter().find(|client| !self.owns(*client));
        if let Some(over) = bare.and_then(|client| self.sessions.give_way(client, now)) {
            let (session, name) = (over.number, &over.name);
            tracing::info!(shard = self.index(), session, name, "an idle session gives way to a new one");
            self.end_client(over);
        }
    }

    /// Returns whether tensors of this group are known here.
    pub(crate) fn has_group(&self, group: u32) -> bool {
        match self.map() {
            Ok(map) => map.has_group(group),
            Err(_) => self.shard.has_group(group),
        }
    }

    /// Fails unless shard 0 confirms that the drop loses nothing: sealed slices must not belong to a
    /// registered tensor, now or later.
    pub(crate) fn check_dropped(
        &self,
        slices: &[u64],
        answer: Result<Option<pb::SettleResponse>>,
    ) -> Result<()> {
        let sealed = self.reservations.sealed_of(slices);
        if sealed.len() > MAX_ASKED_RESERVATIONS {
            return Err(Error::new(Kind::Config, "one call frees slices of too many tensors")
                .expected(format!("at most {MAX_ASKED_RESERVATIONS}"), sealed.len()));
        }
        if sealed.is_empty() {
            return Ok(());
        }
        let answer = answer?.unwrap_or_default();
        if !answer.committed.is_empty() {
            let live = |slice: &&u64| self.reservations.is_of(SliceId(**slice), &answer.committed);
            let slice = slices.iter().find(live).copied().unwrap_or_default();
            let error = Error::new(
                Kind::Precondition,
                "slices of a registered tensor are not freed: unregister it first",
            );
            let name = self.shard.slice(SliceId(slice)).ok().map(|slice| slice.spec().name.clone());
            let error = error.expected("slices that no tensor of the map has", format!("slice {slice}"));
            return Err(name.into_iter().fold(error, Error::tensor));
        }
        if sealed.iter().all(|reservation| answer.ended.contains(reservation)) {
            return Ok(());
        }
        Err(Error::new(Kind::Unavailable, "a registration continued meanwhile")
            .retry_after_ms(RETRY_AFTER_MS))
    }

    /// Returns whether the client owns anything here: an identity on a slice, a membership in a group, a
    /// registration.
    fn owns(&self, client: u64) -> bool {
        self.shard.remembers(client)
            || self.reservations.has_open_of(client)
            || self.map().is_ok_and(|map| map.registers(client))
    }

    /// Ends the client's session. Logs it first: a snapshot in which slices have forgotten the client must be
    /// followed by that record, or a restart would revive the session.
    pub(crate) fn end_client(&self, over: SessionOver) {
        let SessionOver { client, event, .. } = over;
        self.files.note(|| event);
        self.shard.forget_client(client);
        if let Ok(mut portions) = self.portions() {
            portions.forget_client(client);
        }
        // The end of the session also ends them in the log.
        if let Ok(mut spaces) = self.spaces() {
            spaces.forget_client(client);
        }
    }

    /// Ends expired leases.
    pub(crate) fn sweep(&self, period: Duration) {
        self.swept.store(true, Ordering::Relaxed);
        if self.check_owner().is_err() {
            // Clients are refused: they get that time once they are heard again.
            return;
        }
        let now = Instant::now();
        for over in self.sessions.sweep(now, period) {
            let (session, name) = (over.number, &over.name);
            tracing::info!(shard = self.index(), session, client = name, "the client's lease ran out");
            self.end_client(over);
        }
        if let Ok(mut map) = self.map() {
            map.sweep(now, |group| self.shard.groups().is_joined(group));
        }
        self.sweep_spaces(now);
        self.security.unauthenticated.sweep(now);
        self.security.access.audit.summarize(false);
        for reservation in self.reservations.sweep(&self.shard, now) {
            tracing::info!(shard = self.index(), reservation, "the reservation ran out");
        }
        let frames = self.counters.frames.load(Ordering::Relaxed);
        if self.counters.frames_swept.swap(frames, Ordering::Relaxed) != frames {
            self.shard.note_changes(human::now_ms());
        }
    }

    /// The name of a group with tensors here; on shard 0, of any group.
    pub(crate) fn group_name(&self, group: u32) -> Option<Arc<str>> {
        match self.map() {
            Ok(map) => map.group_name(group),
            Err(_) => self.shard.group_name(group),
        }
    }

    /// The versions of these tensors within `scope`, and the milliseconds since the last change of those that
    /// have changed since the start.
    pub(crate) fn last_changes(
        &self,
        names: &[String],
        scope: &Scope,
    ) -> (HashMap<String, u64>, HashMap<String, u64>) {
        let now = human::now_ms();
        self.shard.note_changes(now);
        let last = self.shard.last_changes(&names.iter().map(String::as_str).collect(), |spec| {
            scope.allows(&spec.name, &spec.group)
        });
        let versions = last.iter().map(|(name, (version, _))| (name.to_string(), *version)).collect();
        let changed = last.iter().filter(|(_, (_, at))| *at > 0);
        (versions, changed.map(|(name, (_, at))| (name.to_string(), now.saturating_sub(*at))).collect())
    }

    /// Why calls are refused at present; `None`: the shard serves.
    pub(crate) fn trouble(&self) -> Option<String> {
        self.check_serving().err().map(|error| error.to_string())
    }

    /// The groups within `scope` that have workers. Only shard 0 knows their names.
    pub(crate) fn group_states(&self, scope: &Scope) -> Vec<GroupState> {
        let Ok(map) = self.map() else { return Vec::new() };
        let state = |(group, mode, workers, slowest, fastest): (u32, Mode, u64, u64, u64)| {
            let name = map.group_name(group).filter(|name| scope.allows_group(name))?.to_string();
            Some(GroupState { name, mode: mode.to_string(), workers, slowest, fastest })
        };
        self.shard.groups().list().into_iter().take(MAX_LISTED_GROUPS).filter_map(state).collect()
    }

    /// Lists a call in the audit. Fails if that cannot be written, which was logged.
    pub(crate) fn audit(&self, by: &Caller, event: &str, fields: Value) -> Result<()> {
        self.security.access.audit.record(event, self.audited(by, fields))
    }

    /// Lists a call that workers make at will, at a limited rate. If it cannot be written, that was logged.
    pub(crate) fn audit_often(&self, by: &Caller, event: &str, fields: Value) {
        let name = by.principal.name.as_ref();
        let _ = self.security.access.audit.record_often(name, event, || self.audited(by, fields));
    }

    /// The fields of a call in the audit.
    fn audited(&self, by: &Caller, fields: Value) -> Value {
        let Principal { name, role, .. } = &*by.principal;
        let mut line = json!({"shard": self.index(), "principal": name, "role": role.name(), "address": by.peer.address});
        if let (Value::Object(line), Value::Object(fields)) = (&mut line, fields) {
            line.extend(fields);
        }
        line
    }

    /// All counters.
    pub(crate) fn counters(&self) -> Vec<(&'static str, u64)> {
        let mut counters = self.shard.counters();
        let [sessions, sessions_expired, sessions_gave_way, sessions_closed] = self.sessions.counts();
        let (reservations, reservations_expired) = self.reservations.counts();
        let (own, count) = (&self.counters, |counter: &AtomicU64| counter.load(Ordering::Relaxed));
        counters.extend([
            ("sessions", sessions),
            ("sessions_expired", sessions_expired),
            ("sessions_gave_way", sessions_gave_way),
            ("sessions_closed", sessions_closed),
            ("reservations", reservations),
            ("reservations_expired", reservations_expired),
            ("connections", count(&own.open)),
            ("connections_refused", count(&own.refused) + self.security.unauthenticated.ended()),
            ("handshakes_failed", count(&own.handshakes_failed)),
            ("floods_cut", count(&own.floods_cut)),
            ("streams_reset", count(&own.streams_reset)),
            ("values_lent", count(&own.values_lent)),
            ("frames", count(&own.frames)),
            ("frames_refused", self.measures.refusals().map(|(_, count)| count).sum()),
        ]);
        counters.extend(self.security.access.counters());
        counters.extend(self.security.tls_watch.counters());
        counters.extend(self.files.counters());
        if let Ok(map) = self.map() {
            let [tensors, registrations, placed, touched] = map.counts();
            counters.extend([
                ("tensors", tensors),
                ("registrations", registrations),
                ("bytes_placed", placed),
                ("tensors_touched", touched),
            ]);
        }
        if let Ok(portions) = self.portions() {
            let (names, workers, leased) = portions.counts();
            counters.extend([
                ("portion_names", names),
                ("portion_workers", workers),
                ("portions_leased", leased),
            ]);
        }
        counters
    }
}
