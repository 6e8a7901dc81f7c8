//! Groups of workers that train a set of tensors together, in one mode. The tables have no clock and no
//! network: the caller that keeps the leases reports workers that are gone.
//!
//! A group's first worker sets its mode, and the group is free again when its last worker has left. The call
//! that ends a wait runs the waiter's completion.

use crate::base::error::{Error, Kind, Result};
use crate::base::fault::fault;
use crate::base::mode::{Clocks, Epoch, Joined, MembershipRequest, Mode, Presence};
use crate::base::sync::{Arc, AtomicU64, Mutex, Ordering, lock};
use crate::memory::{Charge, Meter, Purpose};
use crate::slice::Slice;
use crate::slice::frame::{Action, Push};
use crate::slice::policy::{Admission, Gathered, Held, Policy, Share, Verdict};
use crate::tensor::Apply;
use std::collections::BTreeMap;
use std::fmt;

/// Most groups with workers.
const MOST_GROUPS: usize = 1 << 12;
/// Most worker names in an answer or an error: few enough to read, and to fit a header.
const NAMED: usize = 8;
/// Retry delay of a worker that finds no free place, in milliseconds.
const RETRY_MS: u64 = 200;
/// Bytes of a place, with the longest name.
const SEAT_BYTES: u64 = 512;

/// Called once when a wait ends: with the group's clocks, or with the error that ended it.
pub type Advanced = Box<dyn FnOnce(Result<Clocks>) + Send>;

/// Table of a group: a warm start has a separate one, besides that of the mode that follows it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum GroupPhase {
    Warm,
    Main,
}

#[derive(Debug)]
struct GroupMember {
    seat: MembershipRequest,
    clock: u64,
    /// The number of workers that joined any group before.
    order: u64,
    _memory: Charge,
}

impl GroupMember {
    fn is_idle(&self) -> bool {
        matches!(self.seat.presence, Presence::Idle(_))
    }
}

struct Waiting {
    client: u64,
    clock: u64,
    done: Advanced,
}

struct GroupTable {
    mode: Mode,
    members: BTreeMap<u64, GroupMember>,
    waiting: Vec<Waiting>,
    /// Steps that the leader of a warm start has taken.
    alone: u64,
    /// Set once as many workers as a version needs were present at one time: the number of workers that had
    /// joined any group by then. From then on, versions no longer wait for workers that leave.
    complete: Option<u64>,
    /// The last epoch that has begun for all workers.
    begun: Option<Epoch>,
}

type Tables = BTreeMap<(u32, GroupPhase), GroupTable>;

/// The groups of one shard, or of a store.
#[derive(Default)]
pub struct Groups {
    tables: Mutex<Tables>,
    /// Number of groups in which pushes wait for each other: usually 0, and then a push skips the tables.
    quorums: AtomicU64,
    /// Number of workers that have joined any group; written under the lock of `tables`.
    arrivals: AtomicU64,
}

fn phase(mode: Mode) -> GroupPhase {
    if matches!(mode, Mode::WarmStart { .. }) { GroupPhase::Warm } else { GroupPhase::Main }
}

impl GroupTable {
    fn new(mode: Mode) -> Self {
        let (members, waiting) = (BTreeMap::new(), Vec::new());
        Self { mode, members, waiting, alone: 0, complete: None, begun: None }
    }

    /// Names of the first members, in the order they joined.
    fn names(&self) -> Vec<String> {
        named(self.members.values())
    }

    /// The same names as text, for an error.
    fn who(&self) -> String {
        let (names, more) = (self.names().join(", "), self.members.len().saturating_sub(NAMED));
        if more == 0 { names } else { format!("{names} and {more} more") }
    }

    fn leader(&self) -> Option<u64> {
        self.members.iter().min_by_key(|(_, member)| member.order).map(|(client, _)| *client)
    }

    /// Judges the gradients for a slice's next version; `None` unless the mode is `Sync`. A version awaits the
    /// workers that were there when the one before was made.
    fn judge(&self, gathered: Gathered<'_>, arrivals: u64) -> Option<Verdict> {
        let Mode::Sync(quorum) = self.mode else { return None };
        let Gathered { count, has, since } = gathered;
        let count = if fault("quorum_of_one_less") { count + 1 } else { count };
        let fills = |places: u32| places > 0 && count as u64 >= u64::from(places);
        let Some(complete) = self.complete else {
            let all = fills(quorum.least());
            return Some(Verdict { quorum, all, enough: all, arrivals });
        };
        let since = since.max(complete);
        let awaited = |member: &GroupMember| !member.is_idle() && member.order < since;
        let missing = || self.members.iter().any(|(client, member)| awaited(member) && !has(*client));
        let all = fills(quorum.workers) || (count > 0 && !missing());
        Some(Verdict { quorum, all, enough: all || fills(quorum.enough), arrivals })
    }

    /// The clock of the slowest worker that is not idle. If all are, of the slowest of all.
    fn slowest(&self) -> u64 {
        let clock = |member: &GroupMember| (member.is_idle(), member.clock);
        self.members.values().map(clock).min().map_or(0, |(_, clock)| clock)
    }

    /// Takes a member's seat. An idle worker that others wait for again begins with the slowest one's clock.
    fn seat(&mut self, client: u64, mut seat: MembershipRequest) {
        let slowest = self.slowest();
        if let Presence::Rouses(epoch) = seat.presence {
            self.begun = Some(epoch);
        }
        let begun = self.begun;
        let is_idle = |presence| match presence {
            Presence::Idle(epoch) => !begun.is_some_and(|begun| epoch.is_before(begun)),
            _ => false,
        };
        if !is_idle(seat.presence) {
            seat.presence = Presence::Active;
        }
        for (other, member) in &mut self.members {
            let was_idle = member.is_idle();
            if *other == client {
                member.seat = seat.clone();
            } else if !is_idle(member.seat.presence) {
                member.seat.presence = Presence::Active;
            }
            if was_idle && !member.is_idle() {
                member.clock = member.clock.max(slowest);
            }
        }
    }

    /// The group's clocks if a worker with this clock may continue; `None` if it waits.
    fn ready(&self, client: u64, clock: u64) -> Option<Clocks> {
        match self.mode {
            Mode::Free | Mode::Sync(_) => Some(Clocks { slowest: self.slowest(), leads: false }),
            Mode::Bounded { staleness } => {
                let slowest = self.slowest();
                (clock <= slowest.saturating_add(staleness)).then_some(Clocks { slowest, leads: false })
            }
            Mode::WarmStart { steps } => {
                let leads = self.alone < steps && self.leader() == Some(client);
                (leads || self.alone >= steps).then_some(Clocks { slowest: self.alone, leads })
            }
        }
    }

    /// Takes out the waiters that may continue.
    fn ready_ones(&mut self) -> Vec<(Advanced, Result<Clocks>)> {
        let (mut answers, mut waiting) = (Vec::new(), Vec::new());
        for one in std::mem::take(&mut self.waiting) {
            match self.ready(one.client, one.clock) {
                Some(clocks) => answers.push((one.done, Ok(clocks))),
                None => waiting.push(one),
            }
        }
        self.waiting = waiting;
        answers
    }

    /// Fails if the worker cannot get a place besides the present members.
    fn admits(&self, client: u64, seat: &MembershipRequest) -> Result<()> {
        let others = || self.members.iter().filter(|(other, _)| **other != client);
        if others().next().is_none() {
            return Ok(());
        }
        if seat.mode != self.mode {
            let error = Error::new(
                Kind::Precondition,
                format!("the group's workers use another mode: {}", self.who()),
            );
            return Err(error.expected(self.mode, seat.mode));
        }
        let Mode::Sync(quorum) = self.mode else { return Ok(()) };
        // A dead worker keeps its place until its lease ends, so it is worth retrying.
        let taken = |what: String| {
            let why = format!("{what} until a worker leaves or its lease ends: {}", self.who());
            Err(Error::new(Kind::Unavailable, why).retry_after_ms(RETRY_MS))
        };
        if quorum.deterministic && others().any(|(_, member)| member.seat.rank == seat.rank) {
            return taken(format!("rank {} is taken", seat.rank.unwrap_or(0)));
        }
        let places = u64::from(quorum.workers) + u64::from(quorum.backup);
        if quorum.workers > 0 && others().count() as u64 >= places {
            return taken(format!("all places of {} are taken", self.mode));
        }
        Ok(())
    }
}

impl Groups {
    /// Gives a worker a place until it leaves. A worker that joins again keeps its place and clock, and says
    /// anew whether others wait for it. Versions that wait for it no longer are made by [`crate::shard::Shard::join`].
    pub fn join(
        &self,
        group: u32,
        client: u64,
        seat: MembershipRequest,
        meter: &Arc<Meter>,
    ) -> Result<Joined> {
        seat.check()?;
        let mut tables = lock(&self.tables);
        let key = (group, phase(seat.mode));
        // If others train already, the warm start is over and has no leader.
        let main = tables.get(&(group, GroupPhase::Main)).is_some_and(|table| !table.members.is_empty());
        if !tables.contains_key(&key) && tables.len() >= MOST_GROUPS {
            let error = Error::new(Kind::Capacity, "too many groups have workers");
            return Err(error
                .expected(format!("at most {MOST_GROUPS}"), "one more")
                .retry_after_ms(RETRY_MS));
        }
        let table = tables.entry(key).or_insert_with(|| GroupTable::new(seat.mode));
        table.admits(client, &seat)?;
        if table.members.is_empty() {
            *table = GroupTable::new(seat.mode);
        }
        if let (Mode::WarmStart { steps }, true) = (seat.mode, main) {
            table.alone = steps;
        }
        if !table.members.contains_key(&client) {
            let memory = match meter.take(Purpose::Identities, SEAT_BYTES) {
                Ok(memory) => memory,
                Err(error) => {
                    self.tidy(&mut tables);
                    return Err(error);
                }
            };
            let (clock, order) = (table.slowest(), self.arrivals.fetch_add(1, Ordering::Relaxed));
            table.members.insert(client, GroupMember { seat: seat.clone(), clock, order, _memory: memory });
        }
        table.seat(client, seat);
        // The only worker of a group may change its mode.
        if let Some(member) = table.members.get(&client)
            && member.seat.mode != table.mode
        {
            table.mode = member.seat.mode;
            table.complete = None;
        }
        if let Mode::Sync(quorum) = table.mode
            && table.members.len() as u64 >= u64::from(quorum.least())
        {
            table.complete = table.complete.or(Some(self.arrivals()));
        }
        let clock = table.members.get(&client).map_or(0, |member| member.clock);
        let joined = Joined { clock, present: table.members.len() as u64, workers: table.names() };
        let answers = table.ready_ones();
        self.tidy(&mut tables);
        drop(tables);
        tell(answers);
        Ok(joined)
    }

    /// Returns whether as many workers as a version needs were present at one time, so that versions no
    /// longer wait for workers that leave.
    pub fn is_complete(&self, group: u32) -> bool {
        lock(&self.tables).get(&(group, GroupPhase::Main)).is_some_and(|table| table.complete.is_some())
    }

    /// Marks a group as complete that was taken over from a previous server.
    pub fn note_complete(&self, group: u32) {
        if let Some(table) = lock(&self.tables).get_mut(&(group, GroupPhase::Main)) {
            table.complete = Some(self.arrivals());
        }
    }

    fn arrivals(&self) -> u64 {
        self.arrivals.load(Ordering::Relaxed)
    }

    /// The groups in which a version may wait for a grace to pass.
    pub(crate) fn with_grace(&self) -> Vec<u32> {
        if !self.any_quorum() {
            return Vec::new();
        }
        let has_grace = |table: &GroupTable| matches!(table.mode, Mode::Sync(quorum) if quorum.grace_ms > 0);
        let tables = lock(&self.tables);
        tables.iter().filter(|(_, table)| has_grace(table)).map(|((group, _), _)| *group).collect()
    }

    /// Sets a worker's clock, and calls `done` when it may take its next step.
    pub fn advance(&self, group: u32, client: u64, warm: bool, clock: u64, done: Advanced) {
        let answers = {
            let mut tables = lock(&self.tables);
            let key = (group, if warm { GroupPhase::Warm } else { GroupPhase::Main });
            match tables.get_mut(&key).filter(|table| table.members.contains_key(&client)) {
                None => vec![(done, Err(not_there()))],
                Some(table) => {
                    if table.leader() == Some(client) {
                        table.alone = table.alone.max(clock);
                    }
                    if let Some(member) = table.members.get_mut(&client) {
                        member.clock = member.clock.max(clock);
                    }
                    // A worker has one call at a time, so it has given up an earlier one.
                    table.waiting.retain(|one| one.client != client);
                    table.waiting.push(Waiting { client, clock, done });
                    table.ready_ones()
                }
            }
        };
        tell(answers);
    }

    /// Names of the workers that a worker waits for: the slowest ones; in a warm start, the leader.
    pub fn behind(&self, group: u32, client: u64, warm: bool) -> Vec<String> {
        let tables = lock(&self.tables);
        let Some(table) = tables.get(&(group, if warm { GroupPhase::Warm } else { GroupPhase::Main })) else {
            return Vec::new();
        };
        let slowest = table.slowest();
        let leader = table.leader();
        let holds = |(other, member): &(&u64, &GroupMember)| {
            let is_slowest = member.clock == slowest && !member.is_idle();
            **other != client && if warm { leader == Some(**other) } else { is_slowest }
        };
        named(table.members.iter().filter(holds).map(|(_, member)| member))
    }

    /// Removes a worker from a group or from its warm start, and lets the workers that waited for it
    /// continue. False: it had no place there.
    pub fn leave(&self, group: u32, client: u64, warm: bool) -> bool {
        !self
            .leave_where(client, |key| key == (group, if warm { GroupPhase::Warm } else { GroupPhase::Main }))
            .is_empty()
    }

    /// Removes a worker that is gone from all its groups, and returns these.
    pub fn leave_all(&self, client: u64) -> Vec<u32> {
        self.leave_where(client, |_| true)
    }

    /// Returns whether a client is a member of any group.
    pub fn has(&self, client: u64) -> bool {
        lock(&self.tables).values().any(|table| table.members.contains_key(&client))
    }

    /// Returns whether a client is a member of this group, or of its warm start.
    pub fn is_member(&self, group: u32, client: u64) -> bool {
        self.is_member_of(group, client, false) || self.is_member_of(group, client, true)
    }

    /// Returns whether a client is a member of this group, or else of its warm start.
    pub fn is_member_of(&self, group: u32, client: u64, warm: bool) -> bool {
        let key = (group, if warm { GroupPhase::Warm } else { GroupPhase::Main });
        lock(&self.tables).get(&key).is_some_and(|table| table.members.contains_key(&client))
    }

    /// The mode that binds a group; `None`: it has no workers.
    pub fn mode(&self, group: u32) -> Option<Mode> {
        lock(&self.tables).get(&(group, GroupPhase::Main)).map(|table| table.mode)
    }

    /// Returns whether this group or its warm start has a member.
    pub fn is_joined(&self, group: u32) -> bool {
        let tables = lock(&self.tables);
        tables.contains_key(&(group, GroupPhase::Main)) || tables.contains_key(&(group, GroupPhase::Warm))
    }

    /// Removes a client from the tables that `which` selects; returns the groups in which it had a place.
    fn leave_where(&self, client: u64, which: impl Fn((u32, GroupPhase)) -> bool) -> Vec<u32> {
        let (mut answers, mut left) = (Vec::new(), Vec::new());
        {
            let mut tables = lock(&self.tables);
            for (key, table) in tables.iter_mut().filter(|(key, _)| which(**key)) {
                if table.members.remove(&client).is_none() {
                    continue;
                }
                left.push(key.0);
                let gone = table.waiting.extract_if(.., |one| one.client == client);
                answers.extend(gone.map(|one| (one.done, Err(not_there()))));
                if !fault("leaver_waited_for") {
                    answers.extend(table.ready_ones());
                }
            }
            self.tidy(&mut tables);
        }
        tell(answers);
        left
    }

    /// Drops tables without members, and counts those that pushes must look at.
    fn tidy(&self, tables: &mut Tables) {
        tables.retain(|_, table| !table.members.is_empty());
        let quorums = tables.values().filter(|table| matches!(table.mode, Mode::Sync(_))).count();
        self.quorums.store(quorums as u64, Ordering::Release);
    }

    /// Returns whether pushes wait for each other in any group.
    #[inline]
    pub(crate) fn any_quorum(&self) -> bool {
        self.quorums.load(Ordering::Acquire) > 0
    }

    /// Every group that has workers or a warm start: its number, mode, members, and its slowest and fastest
    /// clock.
    pub fn list(&self) -> Vec<(u32, Mode, u64, u64, u64)> {
        let tables = lock(&self.tables);
        let row = |((group, _), table): (&(u32, GroupPhase), &GroupTable)| {
            let fastest = table.members.values().map(|member| member.clock).max().unwrap_or(0);
            (*group, table.mode, table.members.len() as u64, table.slowest(), fastest)
        };
        tables.iter().map(row).collect()
    }

    /// Number of memberships.
    pub fn len(&self) -> usize {
        lock(&self.tables).values().map(|table| table.members.len()).sum()
    }

    /// Returns whether there are no members.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// How a gradient takes part in a version, if the group's mode combines gradients.
    fn share(&self, slice: &Slice, push: &Push<'_>) -> Option<Result<Share>> {
        let tables = lock(&self.tables);
        let table = tables.get(&(slice.group(), GroupPhase::Main))?;
        let Mode::Sync(quorum) = table.mode else { return None };
        let refuse = |why: &str| Some(Err(Error::new(Kind::Precondition, format!("{}: {why}", table.mode))));
        let Some(member) = table.members.get(&push.identity.client) else {
            return refuse("the group takes gradients only from its workers: join it first");
        };
        if slice.spec().apply == Apply::Hogwild {
            return refuse("a hogwild tensor has no whole versions");
        }
        if push.correction.is_some() {
            return refuse("no gradient of a version is stale, so nothing is to be corrected");
        }
        if push.weight.is_some() && !quorum.weighted {
            return refuse("the group's gradients have no weights: use reduce=\"weighted\"");
        }
        if push.indices.is_some() && quorum.robust.is_some() {
            return refuse("a median or a trimmed mean needs whole gradients");
        }
        let rank = quorum.deterministic.then_some(member.seat.rank).flatten();
        let active = table.members.values().filter(|member| !member.is_idle()).count() as u32;
        let most = if quorum.workers == 0 { active } else { quorum.workers };
        let enough = if quorum.enough == 0 { most } else { quorum.enough };
        let least = if table.complete.is_some() { enough.min(active) } else { quorum.least() };
        Some(Ok(Share { least, quorum, rank }))
    }
}

impl Policy for Groups {
    #[inline]
    fn admit(&self, slice: &Slice, push: &Push<'_>) -> Admission {
        if push.action != Action::Gradient || (!self.any_quorum() && push.weight.is_none()) {
            return Admission::Apply;
        }
        match self.share(slice, push) {
            None => match push.weight {
                None => Admission::Apply,
                Some(weight) => {
                    let why = "a gradient has a weight only where a version is the weighted mean of several";
                    Admission::Refuse(Error::new(Kind::Precondition, why).expected("unset", weight))
                }
            },
            Some(Ok(share)) => Admission::Share(share),
            Some(Err(error)) => Admission::Refuse(error),
        }
    }

    fn hold(&self, held: Held) {
        held.release();
    }

    fn judge(&self, group: u32, gathered: Gathered<'_>) -> Option<Verdict> {
        let tables = lock(&self.tables);
        tables.get(&(group, GroupPhase::Main))?.judge(gathered, self.arrivals())
    }

    fn forget(&self, client: u64) {
        self.leave_all(client);
    }
}

/// Names of the first members, in the order they joined.
fn named<'a>(members: impl Iterator<Item = &'a GroupMember>) -> Vec<String> {
    let mut first: Vec<_> = members.collect();
    first.sort_unstable_by_key(|member| member.order);
    first.iter().take(NAMED).map(|member| member.seat.to_string()).collect()
}

fn tell(answers: Vec<(Advanced, Result<Clocks>)>) {
    for (done, result) in answers {
        done(result);
    }
}

pub(crate) fn not_there() -> Error {
    Error::new(Kind::Lease, "the worker has no place in the group: its lease ran out, or it has left")
}

impl fmt::Debug for Groups {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Groups").field("places", &self.len()).finish_non_exhaustive()
    }
}
