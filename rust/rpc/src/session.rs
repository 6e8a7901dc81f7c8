//! Sessions: each shard leases its own clients. A session that ran out is never revived, so what the slices remember
//! of the client can be dropped without a push being applied twice.

use fastps_core::error::{Error, Kind, Result};
use fastps_core::fault::fault;
use fastps_core::shard::{Charge, Meter, Purpose};
use fastps_proto::v1 as pb;
use std::collections::{BTreeSet, HashMap, HashSet, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// Most live sessions of a shard.
const MAX_SESSIONS: usize = 1 << 16;
/// How many ended incarnations are remembered; a client that comes back later than that is a bug of the client.
const MAX_ENDED: usize = 1 << 17;
/// Longest client name, in bytes.
const MAX_NAME: usize = 256;

#[derive(Debug)]
struct Session {
    name: String,
    last_seen: Instant,
    applied: u64,
    /// Its pushes are answered when they are durable.
    logged: bool,
    _memory: Charge,
}

/// What a session takes, with the longest name.
const SESSION_BYTES: u64 = (MAX_NAME + 2 * size_of::<(u64, Session)>()) as u64;

#[derive(Debug, Default)]
struct Table {
    live: HashMap<u64, Session>,
    ended: HashSet<u64>,
    ended_order: VecDeque<u64>,
    expired: u64,
    last_sweep: Option<Instant>,
}

/// The sessions of one shard.
#[derive(Debug)]
pub(crate) struct Sessions {
    lease: Duration,
    meter: Arc<Meter>,
    table: Mutex<Table>,
}

impl Sessions {
    pub(crate) fn new(lease: Duration, meter: Arc<Meter>) -> Self {
        Self { lease, meter, table: Mutex::default() }
    }

    pub(crate) fn lease(&self) -> Duration {
        self.lease
    }

    fn table(&self) -> MutexGuard<'_, Table> {
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Opens a session, or renews it; tells whether it is new.
    pub(crate) fn hello(
        &self,
        client: u64,
        name: &str,
        renew: bool,
        logged: bool,
        now: Instant,
    ) -> Result<bool> {
        if client == 0 {
            return Err(Error::new(Kind::Config, "a client's incarnation is not 0"));
        }
        if name.len() > MAX_NAME {
            return Err(Error::new(Kind::Config, "the client's name is too long")
                .expected(format!("at most {MAX_NAME} bytes"), format!("{} bytes", name.len())));
        }
        let mut table = self.table();
        if let Some(session) = table.live.get_mut(&client) {
            (session.last_seen, session.logged) = (now, logged);
            if session.name != name {
                name.clone_into(&mut session.name);
            }
            return Ok(false);
        }
        if renew || table.ended.contains(&client) {
            return Err(no_session());
        }
        if table.live.len() >= MAX_SESSIONS {
            return Err(Error::new(Kind::Capacity, "the shard has too many sessions")
                .expected(format!("at most {MAX_SESSIONS}"), "one more")
                .retry_after_ms(self.lease.as_millis() as u64));
        }
        self.begin(&mut table, client, name, logged, now)?;
        Ok(true)
    }

    fn begin(&self, table: &mut Table, client: u64, name: &str, logged: bool, now: Instant) -> Result<()> {
        let memory = self.meter.take(Purpose::Identities, SESSION_BYTES)?;
        let session = Session { name: name.to_owned(), last_seen: now, applied: 0, logged, _memory: memory };
        table.live.insert(client, session);
        Ok(())
    }

    /// Goes on with the sessions of an earlier process, whose clients the slices remember. They have a whole lease to come
    /// back.
    pub(crate) fn restore(&self, clients: &BTreeSet<u64>, now: Instant) -> Result<()> {
        let mut table = self.table();
        // Whether a client asked for receipts that are durable, its next Hello tells; until then it may have.
        clients.iter().try_for_each(|client| self.begin(&mut table, *client, "", true, now))
    }

    /// A sign of life; tells whether the client's pushes are answered when they are durable. Only the sweep ends sessions,
    /// so a late sweep never shortens a lease.
    pub(crate) fn touch(&self, client: u64, now: Instant) -> Result<bool> {
        match self.table().live.get_mut(&client) {
            Some(session) => {
                session.last_seen = now;
                Ok(session.logged)
            }
            None => Err(no_session()),
        }
    }

    /// Counts frames, or parts of them, that were applied.
    pub(crate) fn count_applied(&self, client: u64, frames: u64) {
        if let Some(session) = self.table().live.get_mut(&client) {
            session.applied += frames;
        }
    }

    /// Ends the sessions whose lease ran out; `period` is the time between two sweeps.
    pub(crate) fn sweep(&self, now: Instant, period: Duration) -> Vec<(u64, String)> {
        let mut table = self.table();
        let previous = table.last_sweep.replace(now);
        // A server that was itself asleep (suspended, stopped, starved) has not listened: the clients get that time.
        let late = previous.map_or(Duration::ZERO, |p| now.duration_since(p)).saturating_sub(period);
        if late > period {
            table.live.values_mut().for_each(|session| session.last_seen += late);
        }
        let over = |session: &Session| {
            now.saturating_duration_since(session.last_seen) > self.lease && !fault("lease_never_expires")
        };
        let ended: Vec<_> = table.live.extract_if(|_, session| over(session)).collect();
        for (client, _) in &ended {
            table.ended.insert(*client);
            table.ended_order.push_back(*client);
            table.expired += 1;
        }
        while table.ended_order.len() > MAX_ENDED {
            if let Some(client) = table.ended_order.pop_front() {
                table.ended.remove(&client);
            }
        }
        ended.into_iter().map(|(client, session)| (client, session.name)).collect()
    }

    /// Live sessions, and how many have ended.
    pub(crate) fn counts(&self) -> (u64, u64) {
        let table = self.table();
        (table.live.len() as u64, table.expired)
    }

    /// The live sessions, at most `limit`.
    pub(crate) fn list(&self, now: Instant, limit: usize) -> Vec<pb::Session> {
        let table = self.table();
        let session = |(client, s): (&u64, &Session)| pb::Session {
            client: *client,
            name: s.name.clone(),
            applied: s.applied,
            idle_ms: now.saturating_duration_since(s.last_seen).as_millis() as u64,
        };
        table.live.iter().take(limit).map(session).collect()
    }
}

fn no_session() -> Error {
    Error::new(
        Kind::Lease,
        "the client has no session here: its lease ran out, the server was started anew, or Hello is missing",
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    const LEASE: Duration = Duration::from_secs(10);
    const PERIOD: Duration = Duration::from_secs(1);

    #[test]
    fn a_session_lives_as_long_as_signs_of_life_come() {
        let (sessions, start) = (Sessions::new(LEASE, Meter::new(2 * SESSION_BYTES)), Instant::now());
        sessions.hello(1, "a", false, false, start).unwrap();
        sessions.hello(1, "a", true, false, start).unwrap();
        for second in 1..30 {
            let now = start + PERIOD * second;
            sessions.touch(1, now).unwrap();
            assert!(sessions.sweep(now, PERIOD).is_empty());
        }
        let mut ended = Vec::new();
        for second in 30..=40 {
            ended.extend(sessions.sweep(start + PERIOD * second, PERIOD));
        }
        assert_eq!(ended, [(1, "a".to_owned())]);
        assert_eq!(sessions.touch(1, start).unwrap_err().kind, Kind::Lease);
        assert_eq!(sessions.counts(), (0, 1));
    }

    #[test]
    fn an_ended_incarnation_never_comes_back() {
        let (sessions, start) = (Sessions::new(LEASE, Meter::new(2 * SESSION_BYTES)), Instant::now());
        assert_eq!(sessions.hello(1, "", true, false, start).unwrap_err().kind, Kind::Lease);
        sessions.hello(1, "", false, false, start).unwrap();
        (0..=11).for_each(|s| drop(sessions.sweep(start + PERIOD * s, PERIOD)));
        assert_eq!(sessions.hello(1, "", false, false, start).unwrap_err().kind, Kind::Lease);
        sessions.hello(2, "", false, false, start).unwrap();
        sessions.hello(3, "", false, false, start).unwrap();
        let full = sessions.hello(4, "", false, false, start).unwrap_err();
        assert!(full.kind == Kind::Capacity && full.retry_after_ms.is_some(), "{full}");
        sessions.hello(3, "", true, false, start).unwrap();
    }

    #[test]
    fn a_server_that_slept_ends_no_session() {
        let (sessions, start) = (Sessions::new(LEASE, Meter::new(2 * SESSION_BYTES)), Instant::now());
        sessions.sweep(start, PERIOD);
        sessions.hello(1, "", false, false, start).unwrap();
        assert!(sessions.sweep(start + Duration::from_secs(1000), PERIOD).is_empty());
    }

    #[test]
    fn bad_hellos_are_refused() {
        let sessions = Sessions::new(LEASE, Meter::new(2 * SESSION_BYTES));
        assert_eq!(sessions.hello(0, "", false, false, Instant::now()).unwrap_err().kind, Kind::Config);
        assert_eq!(
            sessions.hello(1, &"x".repeat(257), false, false, Instant::now()).unwrap_err().kind,
            Kind::Config
        );
    }
}
