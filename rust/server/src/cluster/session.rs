//! Sessions: each shard leases its own clients. An expired session is never revived, so what the slices
//! remember of its client can be dropped without applying a push twice. A client proves by its secret that
//! a session is its own; others see a session's number only.

use crate::auth::budget::{Budget, Held, hold};
use crate::auth::caller::Proof;
use crate::cluster::ended::EndedSessions;
use crate::human;
use fastps_core::error::{Error, Kind, Result, check_printable};
use fastps_core::fault::fault;
use fastps_core::shard::{Charge, Meter, Purpose};
use fastps_core::verbs::{WorkerReport, WorkerState};
use fastps_durable::{Catalog, Event, SecretHash};
use fastps_transport::convert::{Ack, MAX_REPORT_BYTES};
use fastps_transport::memory_budget;
use std::cmp::Reverse;
use std::collections::hash_map::Entry;
use std::collections::{BTreeSet, HashMap, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// Most live sessions of a shard.
const MAX_SESSIONS: usize = 1 << 16;
/// One principal has at most one of these parts of them.
const PARTS: usize = 8;
/// Sessions examined to find one to evict.
const MAX_IDLE_CANDIDATES: usize = 8;
/// Longest client name, in bytes.
const MAX_CLIENT_NAME_BYTES: usize = 256;

/// A client's description of itself.
#[derive(Debug)]
pub(crate) struct Greeting<'a> {
    pub(crate) client: u64,
    pub(crate) secret: SecretHash,
    /// The principal that calls; `None`: it has no name.
    pub(crate) principal: Option<&'a Arc<str>>,
    /// Its budget; `None`: it has no limits.
    pub(crate) budget: Option<&'a Budget>,
    pub(crate) name: &'a str,
    /// Set when the client believes that its session is alive.
    pub(crate) renew: bool,
    /// What receipts promise.
    pub(crate) ack: Ack,
}

/// A session that was opened or renewed.
#[derive(Debug)]
pub(crate) struct Greeted {
    pub(crate) number: u64,
    /// Set when the session or its secret is new.
    pub(crate) changed: bool,
}

/// An ended session, and its record in the log.
#[derive(Debug)]
pub(crate) struct SessionOver {
    pub(crate) client: u64,
    pub(crate) number: u64,
    pub(crate) name: String,
    pub(crate) event: Event,
}

/// A client's session.
///
/// ```text
///           Hello           a lease of silence, Hello(close), or evicted while idle
/// unknown --------> live ----------------------------------------------------------> ended
///    ^              |  ^                                                               |
///    |              +--+ Hello(renew), a frame, or a restart with a data directory     | no Hello revives it
///    +------------------- a week, or 1,000,000 ends later -----------------------------+
/// ```
#[derive(Debug)]
struct Session {
    /// Identifies the session to others than its client.
    number: u64,
    /// `None` if an earlier server without secrets began it, and its client has not come back yet.
    secret: Option<SecretHash>,
    /// The principal that opened it; `None`: it has no name, or the server has restarted since.
    owner: Option<Arc<str>>,
    name: String,
    last_seen: Instant,
    applied: u64,
    /// What receipts promise.
    ack: Ack,
    /// The position of the log after its beginning; 0: it is of an earlier process of the server.
    began: u64,
    /// The worker's last report.
    report: Option<WorkerReport>,
    memory: Charge,
    /// The same memory, charged to the owner if that has a limit.
    held: Option<Held>,
}

/// Memory of a session, with the longest name and the texts of the longest report.
const SESSION_BYTES: u64 =
    (MAX_CLIENT_NAME_BYTES + MAX_REPORT_BYTES + 2 * size_of::<(u64, Session)>()) as u64;
const _: () = assert!(SESSION_BYTES <= memory_budget::SESSION_BYTES);

#[derive(Debug, Default)]
struct SessionTable {
    live: HashMap<u64, Session>,
    /// Number of live sessions by owner.
    owned: HashMap<Arc<str>, usize>,
    ended: EndedSessions,
    /// Clients, oldest session first, for eviction.
    order: VecDeque<u64>,
    expired: u64,
    /// Clients that pushed gradients to a group, and when: the last two, the last in front.
    pushers: HashMap<u32, [Option<(u64, Instant)>; 2]>,
    /// The number of the newest session.
    newest: u64,
    gave_way: u64,
    closed: u64,
    last_sweep: Option<Instant>,
}

impl SessionTable {
    /// Counts a session of a principal.
    fn count(&mut self, owner: Option<&Arc<str>>) {
        if let Some(owner) = owner {
            *self.owned.entry(owner.clone()).or_default() += 1;
        }
    }

    /// Ends a session, and remembers that it ended.
    fn end(&mut self, client: u64, memory_limit: u64) -> Option<SessionOver> {
        let Session { number, name, memory, owner, .. } = self.live.remove(&client)?;
        if let Some(Entry::Occupied(mut own)) = owner.map(|owner| self.owned.entry(owner)) {
            *own.get_mut() -= 1;
            if *own.get() == 0 {
                own.remove();
            }
        }
        let at = human::now() as u32;
        let remembered = self.ended.add(client, memory, memory_limit, at);
        Some(SessionOver { client, number, name, event: Event::SessionOver { client, at, remembered } })
    }

    /// Error for a client without a session.
    fn no_session(&self, client: u64) -> Error {
        if self.ended.contains(client) {
            // No Hello brings an ended session back, so that no push is applied twice.
            let why = "the client was silent for longer than its lease and was dropped, or it has ended its session: \
                       start the program again (fastps run --restart 1), or the servers with a longer --lease-ms";
            return Error::new(Kind::Lease, why);
        }
        let why =
            "the client has no session here: its lease ran out, the server restarted, or Hello is missing";
        Error::new(Kind::Lease, why)
    }
}

impl Session {
    fn state(&self, now: Instant) -> WorkerState {
        WorkerState {
            session: self.number,
            name: self.name.clone(),
            applied: self.applied,
            idle: now.saturating_duration_since(self.last_seen),
            report: self.report.clone(),
        }
    }

    /// Returns whether its client has been silent for half of its lease, which one that renews it never is.
    fn is_idle(&self, lease: Duration, now: Instant) -> bool {
        now.saturating_duration_since(self.last_seen) > lease / 2
    }

    /// Fails unless the caller has shown the secret and is the principal that opened the session.
    fn check(&self, proof: Proof<'_>) -> Result<()> {
        if let (Some(own), Some(other)) = (&self.owner, proof.principal)
            && !Arc::ptr_eq(own, other)
            && own != other
        {
            return Err(Error::new(Kind::Denied, "another principal opened the session"));
        }
        let why = "wrong session secret";
        let denied = |shown| Err(Error::new(Kind::Denied, why).expected("the secret of its Hello", shown));
        match (&self.secret, proof.secret) {
            _ if fault("secret_ignored") => Ok(()),
            (Some(own), Some(shown)) if own == shown => Ok(()),
            (Some(_), Some(_)) => denied("another"),
            (_, None) => denied("none"),
            (None, Some(_)) => {
                let why = "the session is of an earlier version: its client must say Hello first";
                Err(Error::new(Kind::Unavailable, why).retry_after_ms(100))
            }
        }
    }
}

/// The sessions of one shard.
#[derive(Debug)]
pub(crate) struct Sessions {
    lease: Duration,
    most: usize,
    /// Names of clients that get no session.
    refused: BTreeSet<String>,
    meter: Arc<Meter>,
    table: Mutex<SessionTable>,
}

impl Sessions {
    pub(crate) fn new(lease: Duration, meter: Arc<Meter>) -> Self {
        let (most, refused) = (MAX_SESSIONS, BTreeSet::new());
        Self { lease, most, refused, meter, table: Mutex::default() }
    }

    /// The same, without sessions for clients of these names.
    pub(crate) fn refusing(self, names: &[String]) -> Self {
        Self { refused: names.iter().cloned().collect(), ..self }
    }

    pub(crate) fn lease(&self) -> Duration {
        self.lease
    }

    fn table(&self) -> MutexGuard<'_, SessionTable> {
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Opens a session, or renews it.
    pub(crate) fn hello(&self, greeting: &Greeting<'_>, now: Instant) -> Result<Greeted> {
        let &Greeting { client, secret, principal, budget, name, renew, ack } = greeting;
        if client == 0 {
            return Err(Error::new(Kind::Config, "a client's incarnation is not 0"));
        }
        if name.len() > MAX_CLIENT_NAME_BYTES {
            return Err(Error::new(Kind::Config, "the client's name is too long").expected(
                format!("at most {MAX_CLIENT_NAME_BYTES} bytes"),
                format!("{} bytes", name.len()),
            ));
        }
        check_printable("name of a client", name)?;
        if self.refused.contains(name) {
            let why = format!(
                "the servers refuse the worker {name:?} (--refuse-worker, or --without of fastps fork): train on \
                 without it, or start them without that option"
            );
            return Err(
                Error::new(Kind::Denied, why).expected("a client of another name", format!("{name:?}"))
            );
        }
        let mut table = self.table();
        if let Some(session) = table.live.get_mut(&client) {
            let changed = session.secret.is_none();
            session.secret.get_or_insert(secret);
            session.check(Proof { secret: Some(&secret), principal })?;
            let new = principal.filter(|_| session.owner.is_none());
            if let Some(owner) = new {
                // Its memory is taken already: what exceeds the limit by now stays uncharged.
                session.held = hold(budget, "a session", SESSION_BYTES).unwrap_or_default();
                session.owner = Some(owner.clone());
            }
            (session.last_seen, session.ack) = (now, ack);
            if session.name != name {
                name.clone_into(&mut session.name);
            }
            let number = session.number;
            table.count(new);
            return Ok(Greeted { number, changed });
        }
        if renew || table.ended.contains(client) {
            return Err(table.no_session(client));
        }
        let full = |what, most| {
            let error = Error::new(Kind::Capacity, format!("the {what} has too many sessions"));
            let retry = self.lease.as_millis() as u64;
            Err(error.expected(format!("at most {most}"), "one more").retry_after_ms(retry))
        };
        if table.live.len() >= self.most {
            return full("shard", self.most);
        }
        let most = self.most.div_ceil(PARTS);
        if principal.and_then(|name| table.owned.get(name)).is_some_and(|own| *own >= most) {
            return full("principal", most);
        }
        let number = self.begin(&mut table, greeting, Some(secret), now)?;
        Ok(Greeted { number, changed: true })
    }

    /// Notes the position of the log after the beginning of a client's session.
    pub(crate) fn note_beginning(&self, client: u64, position: u64) {
        if let Some(session) = self.table().live.get_mut(&client) {
            session.began = position;
        }
    }

    /// The position of the log after the beginning of a client's session; 0: it has none, or an old one.
    pub(crate) fn beginning(&self, client: u64) -> u64 {
        self.table().live.get(&client).map_or(0, |session| session.began)
    }

    /// Keeps a worker's report.
    pub(crate) fn keep_report(&self, client: u64, report: WorkerReport) {
        if let Some(session) = self.table().live.get_mut(&client) {
            session.report = Some(report);
        }
    }

    /// The name of a client; empty without a session.
    pub(crate) fn name(&self, client: u64) -> String {
        self.table().live.get(&client).map(|session| session.name.clone()).unwrap_or_default()
    }

    /// Returns whether the client has a session.
    pub(crate) fn is_live(&self, client: u64) -> bool {
        self.table().live.contains_key(&client)
    }

    /// Candidates for eviction from a full table: clients silent for half of their lease, which one that
    /// renews its session never is. Each call looks at others.
    pub(crate) fn idle(&self, now: Instant) -> Vec<u64> {
        let mut table = self.table();
        let (mut idle, mut tries) = (Vec::new(), MAX_IDLE_CANDIDATES);
        while table.live.len() >= self.most && tries > 0 {
            let Some(client) = table.order.pop_front() else { break };
            let Some(session) = table.live.get(&client) else { continue };
            if session.is_idle(self.lease, now) {
                idle.push(client);
            }
            table.order.push_back(client);
            tries -= 1;
        }
        idle
    }

    /// Evicts the session of a client that owns nothing, unless the client was just active. As after a lease,
    /// its incarnation never comes back.
    pub(crate) fn give_way(&self, client: u64, now: Instant) -> Option<SessionOver> {
        let mut table = self.table();
        table.live.get(&client).filter(|session| session.is_idle(self.lease, now))?;
        let over = table.end(client, self.meter.limit())?;
        table.gave_way += 1;
        Some(over)
    }

    /// Ends a session at its client's request, if the secret matches.
    pub(crate) fn close(&self, client: u64, proof: Proof<'_>) -> Result<SessionOver> {
        let mut table = self.table();
        let session = table.live.get(&client).ok_or_else(|| table.no_session(client))?;
        session.check(proof)?;
        let over = table.end(client, self.meter.limit()).ok_or_else(|| table.no_session(client))?;
        table.closed += 1;
        Ok(over)
    }

    fn begin(
        &self,
        table: &mut SessionTable,
        greeting: &Greeting<'_>,
        secret: Option<SecretHash>,
        now: Instant,
    ) -> Result<u64> {
        let &Greeting { client, principal, budget, name, ack, .. } = greeting;
        let held = hold(budget, "a session", SESSION_BYTES)?;
        let memory = self.meter.take(Purpose::Identities, SESSION_BYTES)?;
        table.newest += 1;
        let (number, name, owner) = (table.newest, name.to_owned(), principal.cloned());
        let (applied, began, report) = (0, 0, None);
        let session = Session {
            number,
            secret,
            owner,
            name,
            last_seen: now,
            applied,
            ack,
            began,
            report,
            memory,
            held,
        };
        table.count(session.owner.as_ref());
        table.live.insert(client, session);
        table.order.push_back(client);
        Ok(number)
    }

    /// Adopts the sessions of an earlier process, whose clients the slices remember. They have a whole lease
    /// to come back. A session without a secret takes the first that is shown. `strongest`: the most that receipts of
    /// this server promise.
    pub(crate) fn restore(&self, catalog: &Catalog, strongest: Ack, now: Instant) -> Result<()> {
        let mut table = self.table();
        table.ended.restore(&catalog.ended, &self.meter, human::now() as u32)?;
        for client in &catalog.sessions {
            let secret = catalog.secrets.get(client).copied();
            // The client's next Hello says what its receipts promise; until then assume as much as possible.
            let unknown = SecretHash::of(&[]);
            let greeting = Greeting {
                client: *client,
                secret: unknown,
                principal: None,
                budget: None,
                name: "",
                renew: false,
                ack: strongest,
            };
            self.begin(&mut table, &greeting, secret, now)?;
        }
        Ok(())
    }

    /// Fails if a caller cannot prove that the session that it claims is its own. Without a session the call
    /// that needs one fails.
    pub(crate) fn check(&self, client: u64, proof: Proof<'_>) -> Result<()> {
        self.table().live.get(&client).map_or(Ok(()), |session| session.check(proof))
    }

    /// [`Sessions::check`] and [`Sessions::touch`] at once.
    pub(crate) fn admit(&self, client: u64, proof: Proof<'_>, now: Instant) -> Result<Ack> {
        let mut table = self.table();
        let Some(session) = table.live.get_mut(&client) else { return Err(table.no_session(client)) };
        session.check(proof)?;
        session.last_seen = now;
        Ok(session.ack)
    }

    /// Renews a checked client's lease. Returns what its receipts promise. Only the sweep ends sessions, so a
    /// late sweep never shortens a lease.
    pub(crate) fn touch(&self, client: u64, now: Instant) -> Result<Ack> {
        let mut table = self.table();
        let Some(session) = table.live.get_mut(&client) else { return Err(table.no_session(client)) };
        session.last_seen = now;
        Ok(session.ack)
    }

    /// Notes that a client pushes gradients to a group.
    pub(crate) fn note_gradient(&self, client: u64, group: u32) {
        let mut table = self.table();
        let Some(Session { last_seen, .. }) = table.live.get(&client) else { return };
        let newest = Some((client, *last_seen));
        let last = table.pushers.entry(group).or_default();
        if last[0].is_some_and(|(last, _)| last != client) {
            last[1] = last[0];
        }
        last[0] = newest;
    }

    /// Forgets a client's gradients once it leaves a group or its warm start.
    pub(crate) fn forget_gradients(&self, client: u64, group: u32) {
        if let Some(last) = self.table().pushers.get_mut(&group) {
            for last in last.iter_mut().filter(|last| last.is_some_and(|(last, _)| last == client)) {
                *last = None;
            }
        }
    }

    /// The name of another client that has pushed gradients to a group within a lease.
    pub(crate) fn free_pusher(&self, group: u32, client: u64, now: Instant) -> Option<String> {
        let table = self.table();
        let recent = |(other, at): &&(u64, Instant)| {
            *other != client && now.saturating_duration_since(*at) <= self.lease
        };
        let mut last = table.pushers.get(&group)?.iter().flatten().filter(recent);
        last.find_map(|(other, _)| table.live.get(other)).map(|session| session.name.clone())
    }

    /// Counts frames, or parts of them, that were applied.
    pub(crate) fn count_applied(&self, client: u64, frames: u64) {
        if let Some(session) = self.table().live.get_mut(&client) {
            session.applied += frames;
        }
    }

    /// Ends expired sessions; `period` is the time between two sweeps.
    pub(crate) fn sweep(&self, now: Instant, period: Duration) -> Vec<SessionOver> {
        let mut table = self.table();
        let previous = table.last_sweep.replace(now);
        // A server that was itself asleep (suspended, stopped, starved) has not listened: clients get that
        // time.
        let late = previous.map_or(Duration::ZERO, |p| now.duration_since(p)).saturating_sub(period);
        if late > period {
            table.live.values_mut().for_each(|session| session.last_seen += late);
        }
        let over = |session: &Session| {
            now.saturating_duration_since(session.last_seen) > self.lease && !fault("lease_never_expires")
        };
        let expired: Vec<_> =
            table.live.iter().filter(|(_, session)| over(session)).map(|(client, _)| *client).collect();
        table.expired += expired.len() as u64;
        let limit = self.meter.limit();
        let ended = expired.into_iter().filter_map(|client| table.end(client, limit)).collect();
        table.pushers.retain(|_, last| {
            last.iter().flatten().any(|(_, at)| now.saturating_duration_since(*at) <= self.lease)
        });
        if table.order.len() > 2 * table.live.len() + MAX_IDLE_CANDIDATES {
            let SessionTable { order, live, .. } = &mut *table;
            order.retain(|client| live.contains_key(client));
        }
        ended
    }

    /// Numbers of live, expired, evicted and closed sessions.
    pub(crate) fn counts(&self) -> [u64; 4] {
        let table = self.table();
        [table.live.len() as u64, table.expired, table.gave_way, table.closed]
    }

    /// The live sessions, at most `limit`; with `of`, only those of this principal.
    pub(crate) fn list(&self, now: Instant, limit: usize, of: Option<&Arc<str>>) -> Vec<WorkerState> {
        let table = self.table();
        let own = table.live.values().filter(|session| of.is_none() || session.owner.as_ref() == of);
        let mut listed: Vec<_> = own.collect();
        if listed.len() > limit {
            listed = in_turn(listed);
        }
        listed.iter().take(limit).map(|session| session.state(now)).collect()
    }

    /// The workers that report: first the one with most steps of each principal, then the second of each, and
    /// so on.
    pub(crate) fn workers(&self, now: Instant) -> Vec<WorkerState> {
        let table = self.table();
        let reporting = table.live.values().filter(|session| session.report.is_some());
        in_turn(reporting.collect()).iter().map(|session| session.state(now)).collect()
    }
}

/// Orders sessions so that the first ones are of all principals: none pushes the others out of a list.
fn in_turn(mut sessions: Vec<&Session>) -> Vec<&Session> {
    sessions.sort_by_key(|session| Reverse(session.report.as_ref().map(|report| report.steps)));
    let mut turns: HashMap<Option<&Arc<str>>, usize> = HashMap::new();
    let mut order = Vec::with_capacity(sessions.len());
    for session in sessions {
        let turn = turns.entry(session.owner.as_ref()).or_default();
        *turn += 1;
        order.push((*turn, session));
    }
    order.sort_by_key(|(turn, _)| *turn);
    order.into_iter().map(|(_, session)| session).collect()
}

#[cfg(test)]
mod tests;
