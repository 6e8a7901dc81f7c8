//! Every order in which an owner, those who take over, the store and time can act, up to bounds, on the real
//! `Claim` and `history`. Each rule can be broken; what the model promises must then fail.
//!
//! The store answers late or never, and a request may take effect long after its sender has given it up. Whoever
//! is not scheduled is paused. A tick is a quarter of the lease, and clocks may differ by a tick in a lease.

use crate::owner::claim::{Answer, Candidate, Claim, Phase, Request, State, Timing};
use crate::owner::pieces::{Piece, Progress, history, is_needless};
use crate::owner::record::{LockedFile, LogPosition, Record, Stage};
use std::collections::hash_map::{DefaultHasher, Entry};
use std::collections::{BTreeMap, HashMap, VecDeque};
use std::hash::{Hash, Hasher};
use std::time::Duration;

const LEASE: Duration = Duration::from_secs(4);
const TICK: Duration = Duration::from_secs(1);
/// States of a setting that are tried, unless `FASTPS_STATES` says another number. A broken rule shows within the
/// second number of states.
const MAX_STATES: usize = 40_000;
const MAX_STATES_BROKEN: usize = 400_000;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Rule {
    /// A lease counts from before its request was sent, not from the answer.
    CountsFromSending,
    /// Each body of the record has a number of its own.
    OwnNumber,
    /// The taker swaps the version that it has watched, not the present one.
    SwapsWatched,
    /// It waits while one version is unchanged, not since it came.
    WaitsForOneVersion,
    /// It counts from the answer, not from its question.
    CountsFromAnswer,
    /// It adds the drift of the clocks.
    AddsDrift,
    /// A swap without an answer is read back.
    ReadsBack,
    /// The lease is checked last, not when the request comes.
    ChecksLast,
    /// Who has sent a release answers nobody.
    ReleaseIsFinal,
    /// Only the holder of the very lock does not wait, not the owner of a copy of the folder.
    VeryLock,
    /// The term is taken before `latest` names it.
    TakesFirst,
    /// `latest` names the term before the pieces are read.
    FencesBeforeReading,
    /// Nobody swaps a `latest` of a newer term.
    NewerLatestStays,
    /// The record names the base before the term opens.
    NamesBase,
    /// What is behind the base of an older term does not exist.
    BaseEnds,
    /// A folder is continued only if its server was the last that opened.
    FolderOfTip,
    /// A folder that is behind the bucket is not continued.
    FolderNotBehind,
    /// Copied is what has no gap before it.
    WithoutGaps,
    /// A `copied` receipt waits for a renewal that was sent after the copy.
    RenewsAfterCopy,
    /// What is not a gradient is answered when it is copied.
    ControlWaits,
    /// Pieces are removed after `latest` has been swapped.
    RemovesAfterSwap,
    /// A missing piece before the recorded place is damage.
    MissingIsDamage,
    /// A client that has met a term drops answers of older ones.
    ClientKeepsTerm,
}

/// How a change is answered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Logged,
    Copied,
    /// A registration, a session, a fence.
    Control,
}

/// Bounds of what may happen.
#[derive(Clone, Copy, Debug)]
struct Setting {
    name: &'static str,
    servers: usize,
    ticks: u8,
    /// The changes that clients send, to any server. Without changes, clients only read.
    changes: &'static [Kind],
    /// Requests to the record by the first server after its start, and by each other one.
    requests: (u8, u8),
    /// The others have read the record at the beginning.
    has_looked: bool,
    /// Requests without an answer.
    failures: u8,
    /// Ticks that the first server's clock may miss.
    slow: u8,
    releases: u8,
    kills: u8,
    snapshots: u8,
    /// Pieces that somebody removes from the bucket.
    losses: u8,
    /// The second server begins with an old copy of the first one's folder.
    copied_folder: bool,
    /// Answers that reach the client late.
    slow_network: u8,
}

const NOTHING: Setting = Setting {
    name: "",
    servers: 2,
    ticks: 0,
    changes: &[],
    requests: (2, 3),
    has_looked: false,
    failures: 0,
    slow: 0,
    releases: 0,
    kills: 0,
    snapshots: 0,
    losses: 0,
    copied_folder: false,
    slow_network: 0,
};

use Kind::{Control, Copied, Logged};

const SETTINGS: [Setting; 12] = [
    Setting { name: "a living owner", ticks: 6, requests: (1, 4), ..NOTHING },
    Setting { name: "a slow clock", ticks: 6, requests: (1, 3), slow: 1, ..NOTHING },
    Setting { name: "lost answers", ticks: 5, requests: (2, 3), failures: 1, has_looked: true, ..NOTHING },
    Setting {
        name: "a stopped clock",
        ticks: 5,
        changes: &[Copied],
        requests: (1, 2),
        slow: 2,
        has_looked: true,
        ..NOTHING
    },
    Setting { name: "releases", ticks: 1, requests: (2, 5), releases: 2, failures: 1, ..NOTHING },
    Setting { name: "three terms", servers: 3, changes: &[Logged], requests: (1, 4), releases: 2, ..NOTHING },
    Setting { name: "copies", changes: &[Copied, Copied], releases: 1, ..NOTHING },
    Setting { name: "a session", changes: &[Control, Logged], releases: 1, ..NOTHING },
    Setting { name: "snapshots", changes: &[Copied], releases: 1, snapshots: 1, ..NOTHING },
    Setting { name: "a removed piece", changes: &[Copied], releases: 1, losses: 1, ..NOTHING },
    Setting {
        name: "folders",
        changes: &[Copied],
        requests: (3, 4),
        releases: 2,
        kills: 2,
        copied_folder: true,
        ..NOTHING
    },
    Setting { name: "a slow network", releases: 1, slow_network: 2, ..NOTHING },
];

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Action {
    Tick { slow: bool },
    Poll(u8),
    TakesEffect(u8),
    IsAnswered(u8),
    IsGivenUp(u8),
    Marks(u8),
    Reads(u8),
    Changes(u8),
    Puts(u8),
    Checks(u8),
    Answers(u8),
    Snapshots(u8),
    Prunes(u8),
    Releases(u8),
    IsKilled(u8),
    Restarts(u8),
    LosesPiece(u64, u8),
    ClientReceives(u8),
}

type Change = u8;

#[derive(Clone, Hash)]
enum Sent {
    Record(Request<u64>),
    Latest { to: Latest, version: u8, is_mark: bool },
    Piece { term: u64, at: u8, change: Change },
}

#[derive(Clone, Hash)]
enum Done {
    Record(Answer<u64>),
    Latest(bool),
    Piece,
}

#[derive(Clone, Hash)]
struct Flight {
    /// Nobody waits for the answer if the sender has given it up or is dead.
    sender: Option<u8>,
    sent: Sent,
    /// The sender's clock then.
    at: u8,
    /// The answer, once it has taken effect.
    done: Option<Done>,
}

#[derive(Clone, Hash)]
struct Latest {
    term: u64,
    changes: Vec<Change>,
}

#[derive(Clone, Hash)]
struct Server {
    claim: Claim<u64>,
    is_alive: bool,
    has_opened: bool,
    clock: u8,
    requests: u8,
    log: Vec<Change>,
    /// The incarnation whose log the folder has.
    folder: u64,
    progress: Progress,
    next_piece: u8,
    /// Changes without an answer, and the swaps sent when each was copied.
    unanswered: Vec<(Change, Option<u64>)>,
    snapshot: u8,
    /// With a broken rule: a check of the lease some time ago, and what was read before the fence.
    was_checked: bool,
    read_early: Option<Vec<Change>>,
}

#[derive(Clone)]
struct World {
    ticks: u8,
    slow: u8,
    failures: u8,
    releases: u8,
    kills: u8,
    snapshots: u8,
    losses: u8,
    changes: u8,
    slow_network: u8,
    record: Option<Record>,
    latest: Latest,
    latest_version: u8,
    pieces: BTreeMap<(u64, u8), Change>,
    flights: Vec<Flight>,
    servers: Vec<Server>,
    /// All that each term that opened has applied, with an answer or without.
    histories: BTreeMap<u64, Vec<Change>>,
    /// Promised to be in every later term.
    kept: Vec<Change>,
    /// The newest term that has given a receipt.
    answered: u64,
    /// Answers on their way to the client, and the newest term that it has met.
    on_their_way: Vec<u64>,
    met: u64,
}

struct Model {
    setting: Setting,
    broken: Option<Rule>,
}

fn at(changes: usize) -> LogPosition {
    LogPosition { segment: 1, offset: changes as u64 }
}

/// The store's version of a record depends on its body alone, as an `ETag` does.
fn version(record: &Record) -> u64 {
    hash(record)
}

fn ticks(clock: u8) -> Duration {
    TICK * u32::from(clock)
}

impl Model {
    fn keeps(&self, rule: Rule) -> bool {
        self.broken != Some(rule)
    }

    fn claim(&self, server: u64, incarnation: u64) -> Claim<u64> {
        // A folder's copy is another file.
        let inode = if self.keeps(Rule::VeryLock) { server } else { 0 };
        let locked = Some(LockedFile { boot: String::new(), device: 0, inode });
        let address = String::new();
        let (cluster, since) = (Some(1), 0);
        let candidate = Candidate { cluster, shard: 0, address, incarnation, since, locked, least_term: 0 };
        Claim::new(candidate, Timing { lease: LEASE, drift: TICK })
    }

    /// Takes a server's next step at the beginning.
    fn go_on(&self, world: &mut World, server: u8) {
        let possible = self.actions(world);
        let steps =
            [Action::IsAnswered(0), Action::TakesEffect(0), Action::Marks(server), Action::Reads(server)];
        let step = steps.into_iter().find(|step| possible.contains(step));
        self.act(world, step.unwrap_or(Action::Poll(server))).unwrap();
    }

    /// Changes are copied, so that there is something to recover.
    fn copies(&self) -> bool {
        !self.setting.changes.is_empty()
    }

    fn requests(&self, server: usize) -> u8 {
        let (first, other) = self.setting.requests;
        if server == 0 { first } else { other }
    }

    /// The first server is the owner of term 1.
    fn begin(&self) -> World {
        let setting = &self.setting;
        let server = |index: u64| Server {
            claim: self.claim(index, index + 1),
            is_alive: true,
            has_opened: false,
            clock: 0,
            requests: 9,
            log: Vec::new(),
            folder: if setting.copied_folder && index == 1 { 1 } else { index + 1 },
            progress: Progress::new(at(0)),
            next_piece: 0,
            unanswered: Vec::new(),
            snapshot: 0,
            was_checked: false,
            read_early: None,
        };
        let mut world = World {
            ticks: setting.ticks,
            slow: setting.slow,
            failures: setting.failures,
            releases: setting.releases,
            kills: setting.kills,
            snapshots: setting.snapshots,
            losses: setting.losses,
            changes: 0,
            slow_network: setting.slow_network,
            record: None,
            latest: Latest { term: 0, changes: Vec::new() },
            latest_version: 0,
            pieces: BTreeMap::new(),
            flights: Vec::new(),
            servers: (0..setting.servers as u64).map(server).collect(),
            histories: BTreeMap::new(),
            kept: Vec::new(),
            answered: 0,
            on_their_way: Vec::new(),
            met: 0,
        };
        while world.servers[0].claim.phase() != Phase::Open {
            self.go_on(&mut world, 0);
        }
        while setting.has_looked && world.servers[1].claim.record().is_none() {
            self.go_on(&mut world, 1);
        }
        for (index, server) in world.servers.iter_mut().enumerate() {
            server.requests = self.requests(index);
        }
        world
    }

    fn actions(&self, world: &World) -> Vec<Action> {
        let mut actions = Vec::new();
        if world.ticks > 0 {
            actions.push(Action::Tick { slow: false });
            if world.slow > 0 {
                actions.push(Action::Tick { slow: true });
            }
        }
        for (index, flight) in (0..).zip(&world.flights) {
            match flight.done {
                None => actions.push(Action::TakesEffect(index)),
                Some(_) => actions.push(Action::IsAnswered(index)),
            }
            if world.failures > 0 && flight.sender.is_some() && matches!(flight.sent, Sent::Record(_)) {
                actions.push(Action::IsGivenUp(index));
            }
        }
        for (index, server) in (0..).zip(&world.servers) {
            if server.is_alive {
                self.actions_of(world, index, server, &mut actions);
            } else if world.kills > 0 {
                actions.push(Action::Restarts(index));
            }
        }
        if world.losses > 0 {
            actions.extend(world.pieces.keys().map(|(term, at)| Action::LosesPiece(*term, *at)));
        }
        actions.extend((0..world.on_their_way.len()).map(|index| Action::ClientReceives(index as u8)));
        actions
    }

    fn actions_of(&self, world: &World, index: u8, server: &Server, actions: &mut Vec<Action>) {
        let phase = server.claim.phase();
        let is_idle = |is_mine: fn(&Sent) -> bool| {
            !world.flights.iter().any(|flight| flight.sender == Some(index) && is_mine(&flight.sent))
        };
        if server.requests > 0 && server.claim.wake().is_some_and(|wake| ticks(server.clock) >= wake) {
            actions.push(Action::Poll(index));
        }
        let is_latest_idle = is_idle(|sent| matches!(sent, Sent::Latest { .. }));
        let marks_early =
            !self.keeps(Rule::TakesFirst) && phase == Phase::Waiting && server.claim.record().is_some();
        if self.copies()
            && is_latest_idle
            && (phase == Phase::Marking || marks_early && world.latest.term < 2)
        {
            actions.push(Action::Marks(index));
        }
        let reads_early = !self.keeps(Rule::FencesBeforeReading) && phase == Phase::Marking;
        if phase == Phase::Reading || reads_early && server.read_early.is_none() {
            actions.push(Action::Reads(index));
        }
        if !server.has_opened {
            return;
        }
        if usize::from(world.changes) < self.setting.changes.len() && phase == Phase::Open {
            actions.push(Action::Changes(index));
        }
        if self.copies() && usize::from(server.next_piece) < server.log.len() {
            actions.push(Action::Puts(index));
        }
        if !self.keeps(Rule::ChecksLast) && !server.was_checked {
            actions.push(Action::Checks(index));
        }
        let has_question = if self.copies() {
            self.answerable(server).next().is_some()
        } else {
            world.answered != server.term() || world.slow_network > 0
        };
        if has_question && self.holds(server) {
            actions.push(Action::Answers(index));
        }
        // A thread that copies may learn late that the server is no longer the owner.
        if world.snapshots > 0 && is_latest_idle && usize::from(server.snapshot) < server.log.len() {
            actions.push(Action::Snapshots(index));
        }
        if world.needless(server).next().is_some() {
            actions.push(Action::Prunes(index));
        }
        if world.releases > 0 && phase == Phase::Open {
            actions.push(Action::Releases(index));
        }
        if world.kills > 0 {
            actions.push(Action::IsKilled(index));
        }
    }

    fn holds(&self, server: &Server) -> bool {
        let has_time = server.claim.ends().is_some_and(|end| ticks(server.clock) < end);
        match server.claim.phase() {
            Phase::Releasing if !self.keeps(Rule::ReleaseIsFinal) => has_time,
            Phase::Opening if !self.keeps(Rule::NamesBase) => has_time,
            _ if !self.keeps(Rule::ChecksLast) => server.was_checked,
            _ => server.claim.holds(ticks(server.clock)),
        }
    }

    /// The changes that a server may answer, if it holds the lease.
    fn answerable<'a>(&'a self, server: &'a Server) -> impl Iterator<Item = Change> + 'a {
        let may = |(change, copied): &&(Change, Option<u64>)| match (
            self.setting.changes[usize::from(*change)],
            copied,
        ) {
            (Logged, _) => true,
            (Control, copied) => copied.is_some() || !self.keeps(Rule::ControlWaits),
            (Copied, None) => false,
            (Copied, Some(sent)) => server.claim.confirmed() > *sent || !self.keeps(Rule::RenewsAfterCopy),
        };
        server.unanswered.iter().filter(may).map(|(change, _)| *change)
    }

    /// What a taker with this record reads.
    fn read(&self, world: &World, record: &Record) -> Result<Vec<Change>, String> {
        let mut changes = world.latest.changes.clone();
        if !self.keeps(Rule::BaseEnds) {
            // The newest piece of each place.
            while let Some(newest) =
                world.pieces.iter().rfind(|((_, at), _)| usize::from(*at) == changes.len())
            {
                changes.push(*newest.1);
            }
            return Ok(changes);
        }
        let mut record = record.clone();
        if !self.keeps(Rule::MissingIsDamage) {
            record.tip.copied = at(0);
        }
        let pieces: Vec<_> = world.pieces.keys().copied().map(piece).collect();
        let found = history(&pieces, &record, at(changes.len())).map_err(|error| error.to_string())?;
        let follow = |piece: &Piece| world.pieces[&(piece.term, piece.begin.offset as u8)];
        changes.extend(found.pieces.iter().map(follow));
        Ok(changes)
    }

    fn act(&self, world: &mut World, action: Action) -> Result<(), String> {
        match action {
            Action::Tick { slow } => {
                world.ticks -= 1;
                world.slow -= u8::from(slow);
                for (index, server) in world.servers.iter_mut().enumerate() {
                    server.clock += u8::from(!(slow && index == 0));
                }
            }
            Action::Poll(index) => self.poll(world, index),
            Action::TakesEffect(index) => return self.take_effect(world, index.into()),
            Action::IsAnswered(index) => {
                let flight = world.flights.remove(index.into());
                let (Some(sender), Some(done)) = (flight.sender, flight.done.clone()) else { return Ok(()) };
                return self.deliver(world, sender.into(), &flight, done);
            }
            Action::IsGivenUp(index) => {
                world.failures -= 1;
                let flight = &mut world.flights[usize::from(index)];
                let Some(sender) = flight.sender.take() else { return Ok(()) };
                let flight = flight.clone();
                return self.deliver(world, sender.into(), &flight, Done::Record(Answer::Failed));
            }
            Action::Marks(index) => {
                let server = &world.servers[usize::from(index)];
                let term = server.claim.record().map_or(0, |record| record.term);
                let term = term + u64::from(server.claim.phase() == Phase::Waiting);
                let to = Latest { term, changes: world.latest.changes.clone() };
                world.send(index, Sent::Latest { to, version: world.latest_version, is_mark: true });
            }
            Action::Reads(index) => return self.recover(world, index.into()),
            Action::Changes(index) => {
                let server = &mut world.servers[usize::from(index)];
                server.log.push(world.changes);
                server.unanswered.push((world.changes, None));
                world.changes += 1;
                let term = server.claim.record().map_or(0, |record| record.term);
                world.histories.insert(term, server.log.clone());
            }
            Action::Puts(index) => {
                let server = &mut world.servers[usize::from(index)];
                let (at, term) = (server.next_piece, server.term());
                server.next_piece += 1;
                let change = server.log[usize::from(at)];
                world.send(index, Sent::Piece { term, at, change });
            }
            Action::Checks(index) => {
                let server = &mut world.servers[usize::from(index)];
                server.was_checked = server.claim.holds(ticks(server.clock));
            }
            Action::Answers(index) => return self.answer(world, index.into()),
            Action::Snapshots(index) => {
                world.snapshots -= 1;
                let server = &mut world.servers[usize::from(index)];
                let term = server.term();
                if world.latest.term > term && self.keeps(Rule::NewerLatestStays) {
                    return Ok(());
                }
                let to = Latest { term, changes: server.log.clone() };
                if !self.keeps(Rule::RemovesAfterSwap) {
                    server.snapshot = to.changes.len() as u8;
                }
                world.send(index, Sent::Latest { to, version: world.latest_version, is_mark: false });
            }
            Action::Prunes(index) => {
                let needless: Vec<_> = world.needless(&world.servers[usize::from(index)]).collect();
                world.pieces.retain(|key, _| !needless.contains(key));
            }
            Action::Releases(index) => {
                world.releases -= 1;
                world.servers[usize::from(index)].claim.release();
            }
            Action::IsKilled(index) => {
                world.kills -= 1;
                world.servers[usize::from(index)].is_alive = false;
                world.forget(index);
            }
            Action::Restarts(index) => {
                world.kills -= 1;
                let incarnation = 100 + u64::from(world.kills);
                let server = &mut world.servers[usize::from(index)];
                server.claim = self.claim(index.into(), incarnation);
                (server.is_alive, server.has_opened) = (true, false);
                server.requests = self.requests(index.into());
                server.unanswered.clear();
            }
            Action::LosesPiece(term, at) => {
                world.losses -= 1;
                world.pieces.remove(&(term, at));
            }
            Action::ClientReceives(index) => {
                let term = world.on_their_way.remove(index.into());
                if term < world.met && !self.keeps(Rule::ClientKeepsTerm) {
                    return Err(format!("the client goes back from term {} to {term}", world.met));
                }
                world.met = world.met.max(term);
            }
        }
        Ok(())
    }

    fn poll(&self, world: &mut World, index: u8) {
        let server = &mut world.servers[usize::from(index)];
        let number = 1000 * u64::from(index + 1) + server.claim.sent();
        let nonce = if self.keeps(Rule::OwnNumber) { number } else { 0 };
        if let Some(request) = server.claim.poll(ticks(server.clock), nonce) {
            server.requests -= 1;
            world.send(index, Sent::Record(request));
        }
    }

    fn take_effect(&self, world: &mut World, index: usize) -> Result<(), String> {
        let done = match world.flights[index].sent.clone() {
            Sent::Record(Request::Read) => {
                let found = world.record.clone().map(|record| (Box::new(record.clone()), version(&record)));
                Done::Record(Answer::Found(found))
            }
            Sent::Record(Request::Swap(record, before)) => {
                let forces = !self.keeps(Rule::SwapsWatched) && record.stage == Stage::Recovering;
                if forces || world.record.as_ref().map(version) == before {
                    let version = version(&record);
                    world.record = Some(*record);
                    Done::Record(Answer::Swapped(version))
                } else {
                    Done::Record(Answer::Failed)
                }
            }
            Sent::Latest { to, version, .. } => {
                let swaps = world.latest_version == version;
                if swaps {
                    (world.latest, world.latest_version) = (to, version + 1);
                }
                Done::Latest(swaps)
            }
            Sent::Piece { term, at, change } => {
                world.pieces.insert((term, at), change);
                Done::Piece
            }
        };
        match (&done, world.flights[index].sender) {
            // When an answer about the record comes matters to a lease; the others come at once.
            (Done::Record(_), Some(_)) => world.flights[index].done = Some(done),
            (_, None) => drop(world.flights.remove(index)),
            (_, Some(sender)) => {
                let flight = world.flights.remove(index);
                self.deliver(world, sender.into(), &flight, done)?;
            }
        }
        self.check(world)
    }

    fn deliver(&self, world: &mut World, index: usize, flight: &Flight, done: Done) -> Result<(), String> {
        let server = &mut world.servers[index];
        match (&flight.sent, done) {
            (Sent::Record(request), Done::Record(answer)) => self.tell(server, request, flight.at, answer)?,
            (Sent::Latest { is_mark: true, .. }, Done::Latest(true)) => {
                server.claim.marked();
                if let Some(changes) = server.read_early.take() {
                    self.continue_from(server, changes)?;
                }
            }
            (Sent::Latest { to, .. }, Done::Latest(true)) => {
                server.snapshot = server.snapshot.max(to.changes.len() as u8);
                server.progress.add_snapshot(at(to.changes.len()));
            }
            (Sent::Piece { term, at: begin, .. }, _) => {
                server.progress.add(piece((*term, *begin)));
                if !self.keeps(Rule::WithoutGaps) {
                    server.progress.add_snapshot(at(usize::from(*begin) + 1));
                }
            }
            _ => {}
        }
        if !self.copies() && server.claim.phase() == Phase::Marking {
            server.claim.marked();
            self.continue_from(server, Vec::new())?;
        }
        server.note_copies();
        let opens = server.claim.phase() == Phase::Open
            || server.claim.phase() == Phase::Opening && !self.keeps(Rule::NamesBase);
        if opens && !server.has_opened {
            self.open(world, index)?;
        }
        Ok(())
    }

    /// Gives a claim an answer, and breaks its rules.
    fn tell(
        &self,
        server: &mut Server,
        request: &Request<u64>,
        sent: u8,
        answer: Answer<u64>,
    ) -> Result<(), String> {
        let now = ticks(server.clock);
        let answer = match (request, answer) {
            (Request::Swap(record, _), Answer::Failed) if !self.keeps(Rule::ReadsBack) => {
                Answer::Swapped(version(record))
            }
            (_, answer) => answer,
        };
        let since = match &server.claim.state {
            State::Waiting(Some(seen)) => Some(seen.since),
            _ => None,
        };
        let is_swapped = matches!(answer, Answer::Swapped(_));
        server.claim.answer(now, answer).map_err(|error| error.to_string())?;
        match &mut server.claim.state {
            State::Owning(owning) if is_swapped && !self.keeps(Rule::CountsFromSending) => {
                owning.leased_from = Some(now);
            }
            State::Waiting(Some(seen)) => {
                if !self.keeps(Rule::WaitsForOneVersion) {
                    seen.since = since.unwrap_or(seen.since);
                }
                if !self.keeps(Rule::CountsFromAnswer) && since.is_none() {
                    seen.since = ticks(sent);
                }
                if !self.keeps(Rule::AddsDrift) && since.is_none() {
                    seen.since = seen.since.saturating_sub(TICK);
                }
            }
            _ => {}
        }
        Ok(())
    }

    /// Lists and reads what older terms left.
    fn recover(&self, world: &mut World, index: usize) -> Result<(), String> {
        let Some(record) = world.servers[index].claim.record().cloned() else { return Ok(()) };
        let read = self.read(world, &record);
        let server = &mut world.servers[index];
        match read {
            // It starts no more, and says why. But nothing may be missing if nobody has removed it.
            Err(why) if world.losses == self.setting.losses => Err(why),
            Err(_) => {
                server.is_alive = false;
                Ok(())
            }
            Ok(changes) if server.claim.phase() == Phase::Marking => {
                server.read_early = Some(changes);
                Ok(())
            }
            Ok(changes) => {
                self.continue_from(server, changes)?;
                if self.keeps(Rule::NamesBase) { Ok(()) } else { self.open(world, index) }
            }
        }
    }

    fn continue_from(&self, server: &mut Server, changes: Vec<Change>) -> Result<(), String> {
        let end = changes.len();
        let State::Owning(owning) = &mut server.claim.state else { return Ok(()) };
        if !self.keeps(Rule::MissingIsDamage) {
            owning.record.tip.copied = at(0);
        }
        let is_of_tip = server.folder == owning.record.tip.incarnation || !self.keeps(Rule::FolderOfTip);
        let is_ahead = server.log.len() >= end || !self.keeps(Rule::FolderNotBehind);
        if !(is_of_tip && is_ahead) {
            server.log = changes;
        }
        server.folder = owning.record.incarnation;
        (server.progress, server.next_piece) = (Progress::new(at(end)), end as u8);
        server.claim.recovered(at(end), at(end)).map_err(|error| error.to_string())
    }

    /// A later term begins with a part of the older history, never with more, and with all that is promised.
    fn open(&self, world: &mut World, index: usize) -> Result<(), String> {
        let server = &mut world.servers[index];
        server.has_opened = true;
        let (term, log) = (server.term(), server.log.clone());
        if let Some((older, history)) = world.histories.range(..term).next_back()
            && !history.starts_with(&log)
        {
            return Err(format!(
                "term {term} begins with {log:?}, which is no part of {history:?} of term {older}"
            ));
        }
        if let Some(lost) = world.kept.iter().find(|change| !log.contains(change)) {
            return Err(format!("term {term} lacks change {lost}, which is promised"));
        }
        world.histories.insert(term, log);
        self.check(world)
    }

    fn answer(&self, world: &mut World, index: usize) -> Result<(), String> {
        let server = &world.servers[index];
        let (term, changes): (_, Vec<_>) = (server.term(), self.answerable(server).collect());
        // A clock that stops breaks the lease, but not what is copied.
        let is_bounded = self.setting.slow <= 1;
        if world.answered > term && is_bounded {
            return Err(format!("term {term} answers after term {} has", world.answered));
        }
        world.answered = world.answered.max(term);
        world.servers[index].unanswered.retain(|(change, _)| !changes.contains(change));
        for change in changes {
            if self.setting.changes[usize::from(change)] != Logged {
                let lacks = |history: &Vec<Change>| !history.contains(&change);
                if world.histories.range(term + 1..).any(|(_, history)| lacks(history)) {
                    return Err(format!("change {change} is promised, and a later term lacks it"));
                }
                world.kept.push(change);
            }
        }
        if world.slow_network > 0 {
            world.slow_network -= 1;
            world.on_their_way.push(term);
        }
        Ok(())
    }

    /// What holds after each request that takes effect.
    fn check(&self, world: &World) -> Result<(), String> {
        let Some(record) = &world.record else { return Ok(()) };
        if world.latest.term > record.term {
            return Err(format!("latest names term {}, the owner's is {}", world.latest.term, record.term));
        }
        // Whoever takes over now would not begin with more than the newest term has.
        let Some((term, newest)) = world.histories.last_key_value() else { return Ok(()) };
        match self.read(world, record) {
            Ok(read) if !newest.starts_with(&read) => {
                Err(format!("{read:?} would be read after term {term}, whose history is {newest:?}"))
            }
            Err(why) if world.losses == self.setting.losses => Err(why),
            Ok(_) | Err(_) => Ok(()),
        }
    }

    /// Tries all orders, the shortest first, until it has met `most` states. Fails with what fails and how.
    fn explore(&self, most: usize) -> Result<Explored, String> {
        let begin = self.begin();
        let mut from: HashMap<u64, (u64, Option<Action>)> = HashMap::from([(key(&begin), (0, None))]);
        let mut explored = Explored { states: 1, is_whole: true, newest_term: 1 };
        let mut queue = VecDeque::from([begin]);
        while let Some(world) = queue.pop_front() {
            let parent = key(&world);
            for action in self.actions(&world) {
                let mut next = world.clone();
                if let Err(why) = self.act(&mut next, action) {
                    return Err(format!("{why}, after {:?}", story(&from, parent, action)));
                }
                if let Entry::Vacant(entry) = from.entry(key(&next)) {
                    entry.insert((parent, Some(action)));
                    let newest = next.histories.last_key_value().map_or(0, |(term, _)| *term);
                    explored.newest_term = explored.newest_term.max(newest);
                    queue.push_back(next);
                }
            }
            if from.len() > most {
                explored.is_whole = queue.is_empty();
                break;
            }
        }
        explored.states = from.len();
        Ok(explored)
    }
}

struct Explored {
    states: usize,
    /// There are no others.
    is_whole: bool,
    /// The newest term that has opened.
    newest_term: u64,
}

fn piece((term, begin): (u64, u8)) -> Piece {
    Piece { term, begin: at(begin.into()), end: at(usize::from(begin) + 1) }
}

fn hash(value: &impl Hash) -> u64 {
    let mut hasher = DefaultHasher::new();
    value.hash(&mut hasher);
    hasher.finish()
}

/// The same for worlds that differ only in the order of what is on its way.
fn key(world: &World) -> u64 {
    let mut flights: Vec<_> = world.flights.iter().map(hash).collect();
    flights.sort_unstable();
    hash(&(
        flights,
        world.counts(),
        &world.record,
        &world.latest,
        &world.pieces,
        &world.servers,
        &world.histories,
        &world.kept,
        &world.on_their_way,
    ))
}

fn story(from: &HashMap<u64, (u64, Option<Action>)>, mut at: u64, last: Action) -> Vec<Action> {
    let mut story = vec![last];
    while let Some((parent, Some(action))) = from.get(&at) {
        story.push(*action);
        at = *parent;
    }
    story.reverse();
    story
}

impl World {
    /// The pieces that a server may remove.
    fn needless<'a>(&'a self, server: &Server) -> impl Iterator<Item = (u64, u8)> + use<'a> {
        let oldest = at(server.snapshot.into());
        let record = server.claim.record().cloned();
        let may_go = move |key: &(u64, u8)| {
            record.as_ref().is_some_and(|record| is_needless(piece(*key), record, oldest))
        };
        self.pieces.keys().copied().filter(may_go)
    }

    fn counts(&self) -> ([u8; 10], [u64; 2]) {
        let Self { ticks, slow, failures, releases, kills, snapshots, losses, changes, .. } = *self;
        let Self { slow_network, latest_version, answered, met, .. } = *self;
        let counts = [
            ticks,
            slow,
            failures,
            releases,
            kills,
            snapshots,
            losses,
            changes,
            slow_network,
            latest_version,
        ];
        (counts, [answered, met])
    }

    fn send(&mut self, server: u8, sent: Sent) {
        let at = self.servers[usize::from(server)].clock;
        self.flights.push(Flight { sender: Some(server), sent, at, done: None });
    }

    /// Nobody waits for a dead server's requests, which may take effect all the same.
    fn forget(&mut self, server: u8) {
        self.flights.retain(|flight| flight.sender != Some(server) || flight.done.is_none());
        for flight in self.flights.iter_mut().filter(|flight| flight.sender == Some(server)) {
            flight.sender = None;
        }
    }
}

impl Server {
    /// The term in which it has opened.
    fn term(&self) -> u64 {
        match &self.claim.state {
            State::Owning(owning) => owning.record.term,
            // It has lost the record, but its threads go on with the term that they began with.
            _ => self.claim.swap.as_ref().map_or(0, |swap| swap.record.term),
        }
    }

    /// Notes which changes are copied by now, and how many swaps had been sent.
    fn note_copies(&mut self) {
        let Self { claim, log, progress, unanswered, .. } = self;
        let copied = &log[..log.len().min(progress.copied().offset as usize)];
        for (change, note) in unanswered {
            if note.is_none() && copied.contains(change) {
                *note = Some(claim.sent());
                claim.copied(progress.copied());
                claim.hurry();
            }
        }
    }
}

#[test]
fn no_order_of_events_breaks_a_promise() {
    let most = std::env::var("FASTPS_STATES").map_or(MAX_STATES, |most| most.parse().unwrap());
    for setting in SETTINGS {
        let name = setting.name;
        let explored = Model { setting, broken: None }.explore(most);
        let Explored { states, is_whole, newest_term } =
            explored.unwrap_or_else(|why| panic!("{name}: {why}"));
        println!("{name}: {states} states, {}, term {newest_term}", if is_whole { "all" } else { "not all" });
        assert!(!is_whole || newest_term >= setting.servers as u64, "{name}: nobody took over");
    }
}

#[test]
fn each_rule_is_needed() {
    let rules = [
        (Rule::CountsFromSending, "a living owner"),
        (Rule::OwnNumber, "a living owner"),
        (Rule::SwapsWatched, "a living owner"),
        (Rule::WaitsForOneVersion, "a living owner"),
        (Rule::CountsFromAnswer, "a living owner"),
        (Rule::ChecksLast, "a living owner"),
        (Rule::AddsDrift, "a slow clock"),
        (Rule::ReadsBack, "lost answers"),
        (Rule::RenewsAfterCopy, "a stopped clock"),
        (Rule::ReleaseIsFinal, "releases"),
        (Rule::NamesBase, "three terms"),
        (Rule::BaseEnds, "three terms"),
        (Rule::WithoutGaps, "copies"),
        (Rule::ControlWaits, "a session"),
        (Rule::TakesFirst, "snapshots"),
        (Rule::FencesBeforeReading, "snapshots"),
        (Rule::NewerLatestStays, "snapshots"),
        (Rule::RemovesAfterSwap, "snapshots"),
        (Rule::MissingIsDamage, "a removed piece"),
        (Rule::VeryLock, "a slow network"),
        (Rule::FolderOfTip, "folders"),
        (Rule::FolderNotBehind, "folders"),
        (Rule::ClientKeepsTerm, "a slow network"),
    ];
    let mut unneeded = Vec::new();
    for (rule, name) in rules {
        let setting = SETTINGS.into_iter().find(|setting| setting.name == name).unwrap();
        match (Model { setting, broken: Some(rule) }).explore(MAX_STATES_BROKEN) {
            Err(why) => println!("{rule:?}, {name}: {why}"),
            Ok(_) => unneeded.push(rule),
        }
    }
    assert!(unneeded.is_empty(), "without {unneeded:?} nothing fails");
}
