//! A server's claim to a shard: when it reads and swaps the record, and when it may answer.
//!
//! It has no clock, no network and no threads. Times since boot and answers of the store come in, requests
//! come out. `model.rs` tries all orders of them.
//!
//! 1. Wait: read the record until one version has been there, unchanged, for the owner's lease and the drift. Time in
//!    which the store does not answer is not counted.
//! 2. Take: swap that very version for the next term, *recovering*; renew it from now on.
//! 3. Mark: the caller rewrites `latest` with the term, so that no older owner can swap it any more.
//! 4. Read: only then the caller lists and reads what the older terms left.
//! 5. Open: a second swap says where their history ends. Once it is confirmed, the server may answer.

use crate::owner::record::{Base, LockedFile, LogPosition, Record, Stage, Tip};
use fastps_core::error::{Error, Kind, Result};
use std::time::Duration;

/// The part of a lease after which it is renewed.
const RENEWALS_PER_LEASE: u32 = 4;
/// The part of a lease within which a request to the record ends.
const REQUESTS_PER_LEASE: u32 = 8;
/// Pause after a failed request, and between two looks at another's record.
const PAUSES_PER_LEASE: u32 = 16;
/// The part of a lease by which two clocks may differ in the time of one lease.
const DRIFTS_PER_LEASE: u32 = 16;

/// The times of a claim.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Timing {
    /// An owner stops answering this long after it sent its last renewal.
    pub lease: Duration,
    /// By how much two clocks may differ in the time of a lease.
    pub drift: Duration,
}

impl Timing {
    /// The times for a lease.
    pub fn new(lease: Duration) -> Self {
        Self { lease, drift: lease / DRIFTS_PER_LEASE }
    }

    /// Time after which a renewal is sent.
    pub fn renewal(&self) -> Duration {
        self.lease / RENEWALS_PER_LEASE
    }

    /// Time after which the caller gives a request up, with all its repetitions.
    pub fn request(&self) -> Duration {
        self.lease / REQUESTS_PER_LEASE
    }

    fn pause(&self) -> Duration {
        self.lease / PAUSES_PER_LEASE
    }

    /// How long the version of an owner with this lease must stay unchanged.
    fn wait(&self, lease: Duration) -> Duration {
        let longest = lease.max(self.lease);
        longest + self.drift.max(longest / DRIFTS_PER_LEASE)
    }
}

/// Who claims a shard.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Candidate {
    /// Identity of the cluster. `None`: that of the record, whichever it is.
    pub cluster: Option<u64>,
    /// Index of the shard.
    pub shard: u32,
    /// Where clients reach the server.
    pub address: String,
    /// The number that the server drew at its start.
    pub incarnation: u64,
    /// When it started, in seconds since 1970, for people.
    pub since: u64,
    /// The file whose lock it holds.
    pub locked: Option<LockedFile>,
    /// The term that `latest` names, or 0: a record that somebody has removed comes back with a later one.
    pub least_term: u64,
}

/// A request to the store. The caller sends it at once and gives [`Claim::answer`] exactly one answer.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Request<V> {
    /// Read the record.
    Read,
    /// Replace the record if it still has this version; `None`: create it if there is none.
    Swap(Box<Record>, Option<V>),
}

/// The answer to a request.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Answer<V> {
    /// The record and its version, or that there is none.
    Found(Option<(Box<Record>, V)>),
    /// The record has been swapped and has this version now.
    Swapped(V),
    /// No answer, or a refusal: a swap may have happened all the same.
    Failed,
}

/// What the caller does for a claim.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Phase {
    /// Another server may own the shard: wait.
    Waiting,
    /// Rewrite `latest` with the term until that succeeds, then call [`Claim::marked`].
    Marking,
    /// List and read what older terms left, then call [`Claim::recovered`].
    Reading,
    /// Wait: the swap that opens is on its way.
    Opening,
    /// Serve, as long as [`Claim::holds`].
    Open,
    /// Answer nobody: the record is being released.
    Releasing,
    /// The next owner need not wait.
    Released,
    /// Another server has taken the shard. The process must start again to claim it.
    Lost,
}

/// A claim to a shard. `V` is the store's version of the record.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Claim<V> {
    pub(super) candidate: Candidate,
    pub(super) timing: Timing,
    pub(super) state: State<V>,
    /// When the request was sent that has not been answered.
    asked: Option<Duration>,
    /// A swap failed: the record must be read before the next one.
    in_doubt: bool,
    /// The newest swap.
    pub(super) swap: Option<Swap>,
    /// No request is sent before this time.
    earliest: Duration,
    /// Swaps sent, and the newest of them that is known to have happened.
    sent: u64,
    confirmed: u64,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) enum State<V> {
    Waiting(Option<Seen<V>>),
    Owning(Box<Owning<V>>),
    Lost(Box<Record>),
}

/// A version of another server's record.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) struct Seen<V> {
    pub(super) record: Option<(Box<Record>, V)>,
    /// When the first answer with this version came; later by the time of requests without an answer since then.
    pub(super) since: Duration,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) struct Owning<V> {
    /// The record in the store, as far as known.
    pub(super) record: Record,
    version: V,
    /// The record with the next swap.
    pub(super) next: Record,
    /// The next swap does not wait for a renewal to be due.
    is_urgent: bool,
    is_marked: bool,
    /// Somebody has asked for the shard.
    is_asked: bool,
    /// When the newest confirmed swap was sent.
    pub(super) leased_from: Option<Duration>,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) struct Swap {
    pub(super) record: Box<Record>,
    number: u64,
    /// When it was sent first.
    pub(super) sent: Duration,
}

impl<V: Clone + PartialEq> Claim<V> {
    /// A claim that has asked nothing yet.
    pub fn new(candidate: Candidate, timing: Timing) -> Self {
        Self {
            candidate,
            timing,
            state: State::Waiting(None),
            asked: None,
            in_doubt: false,
            swap: None,
            earliest: Duration::ZERO,
            sent: 0,
            confirmed: 0,
        }
    }

    /// What the caller does now.
    pub fn phase(&self) -> Phase {
        let owning = match &self.state {
            State::Waiting(_) => return Phase::Waiting,
            State::Lost(_) => return Phase::Lost,
            State::Owning(owning) => owning,
        };
        match (owning.record.stage, owning.next.stage) {
            (Stage::Released, _) => Phase::Released,
            (_, Stage::Released) => Phase::Releasing,
            (Stage::Open, _) => Phase::Open,
            (Stage::Recovering, Stage::Open) => Phase::Opening,
            (Stage::Recovering, _) if owning.is_marked => Phase::Reading,
            (Stage::Recovering, _) => Phase::Marking,
        }
    }

    /// Returns whether the server may answer. `now` must be read after everything that the answer contains or
    /// relies on.
    pub fn holds(&self, now: Duration) -> bool {
        self.phase() == Phase::Open && self.ends().is_some_and(|end| now < end)
    }

    /// When the lease ends, if it is not renewed.
    pub fn ends(&self) -> Option<Duration> {
        let State::Owning(owning) = &self.state else { return None };
        owning.leased_from.map(|from| from + self.timing.lease)
    }

    /// The record, as last read or swapped.
    pub fn record(&self) -> Option<&Record> {
        match &self.state {
            State::Waiting(seen) => seen.as_ref()?.record.as_ref().map(|(record, _)| &**record),
            State::Owning(owning) => Some(&owning.record),
            State::Lost(record) => Some(record),
        }
    }

    /// Number of the newest swap that has been sent.
    pub fn sent(&self) -> u64 {
        self.sent
    }

    /// Number of the newest swap that is known to have happened. What was in the bucket when [`Claim::sent`]
    /// was less than this is in every later term, whatever the clocks did: the record was still this
    /// server's after that.
    pub fn confirmed(&self) -> u64 {
        self.confirmed
    }

    /// When [`Claim::poll`] has a request; `None`: not before an answer or a call.
    pub fn wake(&self) -> Option<Duration> {
        if self.asked.is_some() || matches!(self.phase(), Phase::Lost | Phase::Released) {
            return None;
        }
        let due = match &self.state {
            State::Owning(owning) if !self.in_doubt && !owning.is_urgent => {
                self.swap.as_ref().map_or(Duration::ZERO, |swap| swap.sent + self.timing.renewal())
            }
            _ => Duration::ZERO,
        };
        Some(due.max(self.earliest))
    }

    /// The request to send now, if any. `nonce` must be new and random.
    pub fn poll(&mut self, now: Duration, nonce: u64) -> Option<Request<V>> {
        if self.wake().is_none_or(|wake| now < wake) {
            return None;
        }
        self.asked = Some(now);
        let (record, before) = match &self.state {
            _ if self.in_doubt => return Some(Request::Read),
            State::Waiting(Some(seen)) if now >= self.free_at(seen) => {
                let before = seen.record.as_ref();
                (self.taken(before.map(|(record, _)| &**record)), before.map(|(_, version)| version.clone()))
            }
            State::Owning(owning) => (owning.next.clone(), Some(owning.version.clone())),
            State::Waiting(_) | State::Lost(_) => return Some(Request::Read),
        };
        if let State::Owning(owning) = &mut self.state {
            owning.is_urgent = false;
        }
        let record = Box::new(Record { nonce, ..record });
        self.sent += 1;
        self.swap = Some(Swap { record: record.clone(), number: self.sent, sent: now });
        Some(Request::Swap(record, before))
    }

    /// When a version may be swapped, if it is still there.
    fn free_at(&self, seen: &Seen<V>) -> Duration {
        let wait = match seen.record.as_ref().map(|(record, _)| &**record) {
            None if self.candidate.least_term == 0 => Duration::ZERO,
            None => self.timing.wait(self.timing.lease),
            Some(record) if record.stage == Stage::Released => Duration::ZERO,
            // Only the process that held the lock renews that record.
            Some(record) if record.locked.is_some() && record.locked == self.candidate.locked => {
                Duration::ZERO
            }
            Some(record) => self.timing.wait(record.lease()),
        };
        seen.since + wait
    }

    /// The record that takes over from another.
    fn taken(&self, before: Option<&Record>) -> Record {
        let Candidate { cluster, shard, address, incarnation, since, locked, least_term } =
            self.candidate.clone();
        Record {
            format: Record::format(),
            cluster: before.map(|record| record.cluster).or(cluster).unwrap_or_default(),
            shard,
            term: before.map_or(0, |record| record.term).max(least_term) + 1,
            stage: Stage::Recovering,
            address,
            incarnation,
            since,
            locked,
            lease_ms: self.timing.lease.as_millis() as u64,
            nonce: 0,
            release: false,
            tip: before.map_or_else(Tip::default, |record| record.tip),
            bases: before.map_or_else(Vec::new, |record| record.bases.clone()),
        }
    }

    /// Takes the answer to the request. Fails if the record is another cluster's or shard's: the claim must end
    /// then.
    pub fn answer(&mut self, now: Duration, answer: Answer<V>) -> Result<()> {
        let asked = self.asked.take();
        match answer {
            Answer::Failed => {
                self.in_doubt = true;
                self.earliest = now + self.timing.pause();
                if let (State::Waiting(Some(seen)), Some(asked)) = (&mut self.state, asked) {
                    // A store that does not answer this server may not answer the owner, which renews once it does.
                    seen.since += self.earliest.saturating_sub(asked);
                }
            }
            Answer::Swapped(version) => {
                if let Some(Swap { record, number, sent }) = self.swap.clone() {
                    self.own(*record, version);
                    self.confirm(number, sent);
                }
            }
            Answer::Found(found) => {
                self.in_doubt = false;
                self.found(now, found)?;
            }
        }
        Ok(())
    }

    fn confirm(&mut self, number: u64, sent: Duration) {
        self.confirmed = number;
        if let State::Owning(owning) = &mut self.state {
            owning.leased_from = Some(sent);
        }
    }

    /// The record is this server's.
    fn own(&mut self, record: Record, version: V) {
        if let State::Owning(owning) = &mut self.state {
            owning.is_urgent |= record.stage != owning.next.stage;
            owning.is_asked |= record.release;
            (owning.record, owning.version) = (record, version);
        } else {
            let next = record.clone();
            self.state = State::Owning(Box::new(Owning {
                record,
                version,
                next,
                is_urgent: false,
                is_marked: false,
                is_asked: false,
                leased_from: None,
            }));
        }
    }

    fn found(&mut self, now: Duration, found: Option<(Box<Record>, V)>) -> Result<()> {
        self.check(found.as_ref().map(|(record, _)| &**record))?;
        let own = found.as_ref().filter(|(record, _)| record.incarnation == self.candidate.incarnation);
        if let Some((record, version)) = own {
            self.own((**record).clone(), version.clone());
            match self.swap.as_ref().filter(|swap| swap.record.nonce == record.nonce) {
                Some(&Swap { number, sent, .. }) => self.confirm(number, sent),
                // An earlier swap than the newest: when it was sent is not known any more.
                None => self.hurry(),
            }
            return Ok(());
        }
        match (&mut self.state, found) {
            (State::Waiting(Some(seen)), found)
                if seen.record.as_ref().map(|(_, version)| version)
                    == found.as_ref().map(|(_, version)| version) => {}
            (State::Waiting(seen), record) => *seen = Some(Seen { record, since: now }),
            (State::Owning(_), Some((record, _))) => self.state = State::Lost(record),
            // Somebody has removed it: a server that creates it again waits for this one's lease.
            (State::Owning(owning), None) => self.state = State::Lost(Box::new(owning.record.clone())),
            (State::Lost(_), _) => {}
        }
        if matches!(self.state, State::Waiting(_)) {
            self.look_again(now);
        }
        Ok(())
    }

    /// Sets the time of the next look at another's record, which is not later than the one that takes it.
    fn look_again(&mut self, now: Duration) {
        let State::Waiting(Some(seen)) = &self.state else { return };
        self.earliest = self.free_at(seen).min(now + self.timing.pause());
    }

    fn check(&self, record: Option<&Record>) -> Result<()> {
        let Candidate { cluster, shard, .. } = self.candidate;
        let Some(record) = record else {
            return cluster.map(drop).ok_or_else(|| {
                Error::new(
                    Kind::Config,
                    "no server has owned the shard in this bucket, so none can be followed",
                )
                .shard(shard)
                .expected(
                    "the URL that a server with --owner-lease has as --copy-to",
                    "no record of an owner",
                )
            });
        };
        if record.shard != shard {
            return Err(Error::new(Kind::Config, "the record of the shard's owner is another shard's")
                .expected(format!("shard {shard}"), format!("shard {}", record.shard)));
        }
        match cluster.filter(|cluster| *cluster != record.cluster) {
            None => Ok(()),
            Some(cluster) => {
                let message = "another cluster owns the shard in this bucket: choose another URL";
                Err(Error::new(Kind::Config, message)
                    .shard(shard)
                    .expected(format!("cluster {cluster:016x}"), format!("{:016x}", record.cluster)))
            }
        }
    }

    /// Sends the next swap at once: for what waits for a confirmation.
    pub fn hurry(&mut self) {
        if let State::Owning(owning) = &mut self.state {
            owning.is_urgent = true;
        }
    }

    /// `latest` names the term.
    pub fn marked(&mut self) {
        if let State::Owning(owning) = &mut self.state {
            owning.is_marked = true;
        }
    }

    /// The history that was read ends at `end`; this server's log continues it from `begin` on. Fails if less was
    /// read than the record promises.
    pub fn recovered(&mut self, end: LogPosition, begin: LogPosition) -> Result<()> {
        let Phase::Reading = self.phase() else { return Ok(()) };
        let State::Owning(owning) = &mut self.state else { return Ok(()) };
        let tip = owning.record.tip;
        if end < tip.copied {
            let place = |at: LogPosition| format!("segment {}, byte {}", at.segment, at.offset);
            let message = "the log in the bucket ends before the place that the record of the owner names";
            return Err(Error::new(Kind::Internal, message)
                .shard(self.candidate.shard)
                .expected(place(tip.copied), place(end)));
        }
        let (next, begin) = (&mut owning.next, begin.max(end));
        if tip.term > 0 {
            next.bases.push(Base { term: tip.term, end, begin });
        }
        next.tip = Tip { term: next.term, incarnation: next.incarnation, copied: begin };
        next.stage = Stage::Open;
        owning.is_urgent = true;
        Ok(())
    }

    /// The log is copied up to here; the next renewal says so.
    pub fn copied(&mut self, to: LogPosition) {
        if let State::Owning(owning) = &mut self.state
            && owning.next.stage == Stage::Open
        {
            owning.next.tip.copied = owning.next.tip.copied.max(to);
        }
    }

    /// No kept snapshot needs the log before this place.
    pub fn forget(&mut self, before: LogPosition) {
        if let State::Owning(owning) = &mut self.state {
            owning.next.bases.retain(|base| base.begin > before);
        }
    }

    /// Returns whether somebody has asked this server to give the shard up, since it took it.
    pub fn is_asked_to_release(&self) -> bool {
        matches!(&self.state, State::Owning(owning) if owning.is_asked)
    }

    /// Gives the shard up. From now on the server may answer nobody.
    pub fn release(&mut self) {
        if let State::Owning(owning) = &mut self.state {
            owning.next.stage = Stage::Released;
            owning.is_urgent = true;
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, clippy::panic)]
mod tests {
    use super::*;
    use crate::owner::record::sample;

    fn seconds(seconds: u64) -> Duration {
        Duration::from_secs(seconds)
    }

    fn claim(cluster: Option<u64>, incarnation: u64) -> Claim<u64> {
        let locked = Some(LockedFile { boot: "b".to_owned(), device: 9, inode: incarnation });
        let address = format!("host-{incarnation}:7070");
        let candidate =
            Candidate { cluster, shard: 2, address, incarnation, since: 0, locked, least_term: 0 };
        Claim::new(candidate, Timing::new(seconds(64)))
    }

    /// Sends the request that is due, which must be a swap, and answers it.
    fn swap(claim: &mut Claim<u64>, now: Duration, version: u64) -> (Record, Option<u64>) {
        let Some(Request::Swap(record, before)) = claim.poll(now, version) else { panic!("no swap is due") };
        claim.answer(now, Answer::Swapped(version)).unwrap();
        (*record, before)
    }

    fn look(claim: &mut Claim<u64>, now: Duration, record: Option<(Record, u64)>) -> Result<()> {
        assert_eq!(claim.poll(now, 0), Some(Request::Read));
        claim.answer(now, Answer::Found(record.map(|(record, version)| (Box::new(record), version))))
    }

    /// An owner of term 1 since the start.
    fn owner() -> Claim<u64> {
        let mut claim = claim(Some(7), 1);
        look(&mut claim, Duration::ZERO, None).unwrap();
        let (taken, before) = swap(&mut claim, Duration::ZERO, 1);
        assert_eq!((taken.term, taken.stage, before), (1, Stage::Recovering, None));
        assert_eq!(claim.phase(), Phase::Marking);
        claim.marked();
        let place = LogPosition { segment: 1, offset: 0 };
        claim.recovered(place, place).unwrap();
        assert!(!claim.holds(Duration::ZERO), "the second swap is not confirmed");
        let (opened, before) = swap(&mut claim, Duration::ZERO, 2);
        assert_eq!((opened.tip.term, opened.bases.len(), before), (1, 0, Some(1)));
        claim
    }

    #[test]
    fn an_owner_renews_each_quarter_of_its_lease_and_stops_at_its_end() {
        let mut claim = owner();
        assert_eq!(claim.wake(), Some(seconds(16)));
        assert_eq!(claim.poll(seconds(15), 0), None);
        let (renewed, before) = swap(&mut claim, seconds(20), 3);
        assert_eq!((renewed.stage, renewed.nonce, before), (Stage::Open, 3, Some(2)));
        assert!(claim.holds(seconds(83)) && !claim.holds(seconds(84)));
        // It may renew after its end, if nobody has taken the shard meanwhile.
        swap(&mut claim, seconds(100), 4);
        assert!(claim.holds(seconds(163)));
        assert_eq!(claim.timing.request(), seconds(8));
    }

    #[test]
    fn a_swap_without_an_answer_is_read_back() {
        let mut claim = owner();
        let Some(Request::Swap(lost, _)) = claim.poll(seconds(20), 3) else { panic!() };
        assert_eq!(claim.poll(seconds(21), 4), None, "one request at a time");
        claim.answer(seconds(28), Answer::Failed).unwrap();
        assert!(claim.holds(seconds(63)) && !claim.holds(seconds(64)));
        look(&mut claim, seconds(32), Some((*lost.clone(), 3))).unwrap();
        assert!(claim.holds(seconds(83)) && !claim.holds(seconds(84)), "it counts from before it was sent");
        assert_eq!(claim.confirmed(), 3);
        // It had not happened when it was read back, and happens then.
        let before = claim.record().cloned().unwrap();
        let Some(Request::Swap(late, _)) = claim.poll(seconds(40), 5) else { panic!() };
        claim.answer(seconds(48), Answer::Failed).unwrap();
        look(&mut claim, seconds(52), Some((before, 3))).unwrap();
        let Some(Request::Swap(_, by)) = claim.poll(seconds(52), 6) else { panic!() };
        assert_eq!(by, Some(3));
        claim.answer(seconds(53), Answer::Failed).unwrap();
        look(&mut claim, seconds(57), Some((*late, 5))).unwrap();
        assert!(!claim.holds(seconds(84)), "its own older swap gives no time");
        assert_eq!(swap(&mut claim, seconds(57), 7).1, Some(5));
        assert!(claim.holds(seconds(120)));
    }

    #[test]
    fn a_taker_waits_for_the_lease_of_one_version_and_the_drift() {
        let owned = owner().record().cloned().unwrap();
        let mut claim = claim(None, 2);
        look(&mut claim, seconds(100), Some((owned.clone(), 2))).unwrap();
        look(&mut claim, seconds(150), Some((owned.clone(), 3))).unwrap();
        for now in [160, 217] {
            look(&mut claim, seconds(now), Some((owned.clone(), 3))).unwrap();
        }
        // 64 s and a sixteenth of them after the first answer with version 3.
        let (taken, before) = swap(&mut claim, seconds(218), 4);
        assert_eq!((taken.term, taken.cluster, before), (2, 7, Some(3)));
        assert_eq!(taken.tip, owned.tip, "term 2 has not opened");
        claim.marked();
        let at = |offset| LogPosition { segment: 1, offset };
        claim.recovered(at(50), LogPosition { segment: 2, offset: 0 }).unwrap();
        let (opened, _) = swap(&mut claim, seconds(218), 5);
        assert_eq!(
            opened.bases,
            [Base { term: 1, end: at(50), begin: LogPosition { segment: 2, offset: 0 } }]
        );
        claim.forget(LogPosition { segment: 2, offset: 0 });
        assert!(swap(&mut claim, seconds(234), 6).0.bases.is_empty());
    }

    #[test]
    fn time_without_an_answer_of_the_store_is_not_waited() {
        let owned = owner().record().cloned().unwrap();
        let mut claim = claim(None, 2);
        look(&mut claim, seconds(100), Some((owned.clone(), 2))).unwrap();
        // The store is away for longer than the lease: each request fails after 8 s, and the next one follows after 4.
        for now in (104..200).step_by(12) {
            assert_eq!(claim.poll(seconds(now), 0), Some(Request::Read));
            claim.answer(seconds(now + 8), Answer::Failed).unwrap();
        }
        for now in (200..260).step_by(4) {
            look(&mut claim, seconds(now), Some((owned.clone(), 2))).unwrap();
        }
        look(&mut claim, seconds(263), Some((owned.clone(), 2))).unwrap();
        assert_eq!(swap(&mut claim, seconds(264), 3).1, Some(2));
    }

    #[test]
    fn nobody_waits_for_who_has_released_or_held_the_very_lock() {
        let mut owner = owner();
        owner.release();
        assert!(!owner.holds(seconds(1)) && owner.phase() == Phase::Releasing);
        let (released, _) = swap(&mut owner, seconds(1), 3);
        assert_eq!((owner.phase(), owner.wake()), (Phase::Released, None));
        let mut next = claim(None, 2);
        look(&mut next, seconds(1), Some((released.clone(), 3))).unwrap();
        assert_eq!(swap(&mut next, seconds(1), 4).0.term, 2);
        let killed = Record { stage: Stage::Open, ..released };
        let mut same = claim(Some(7), 1);
        same.candidate.incarnation = 5;
        look(&mut same, seconds(1), Some((killed.clone(), 3))).unwrap();
        assert_eq!(swap(&mut same, seconds(1), 4).0.term, 2);
        let rebooted = Record {
            locked: killed.locked.clone().map(|file| LockedFile { boot: "c".to_owned(), ..file }),
            ..killed
        };
        same = claim(Some(7), 1);
        same.candidate.incarnation = 5;
        look(&mut same, seconds(1), Some((rebooted, 3))).unwrap();
        assert_eq!(same.wake(), Some(seconds(5)), "it looks again");
    }

    #[test]
    fn an_owner_learns_that_it_is_asked_for_the_shard_and_stays_the_owner() {
        let mut owner = owner();
        let asked = owner.record().cloned().unwrap().asking_to_release(77);
        let Some(Request::Swap(late, Some(2))) = owner.poll(seconds(20), 3) else { panic!() };
        assert!(!late.release);
        owner.answer(seconds(20), Answer::Failed).unwrap();
        assert!(!owner.is_asked_to_release());
        look(&mut owner, seconds(24), Some((asked, 9))).unwrap();
        assert!(owner.is_asked_to_release() && owner.phase() == Phase::Open);
        // What was read back says nothing about the time of its own renewals.
        assert!(owner.holds(seconds(63)) && !owner.holds(seconds(64)));
        let (renewed, before) = swap(&mut owner, seconds(24), 4);
        assert!(before == Some(9) && !renewed.release && owner.is_asked_to_release());
        owner.release();
        let (released, _) = swap(&mut owner, seconds(25), 5);
        // The next owner is not asked.
        let mut next = claim(Some(7), 2);
        look(&mut next, seconds(25), Some((released, 5))).unwrap();
        assert!(!swap(&mut next, seconds(25), 6).0.release && !next.is_asked_to_release());
    }

    #[test]
    fn a_removed_record_comes_back_with_a_later_term_after_a_lease() {
        let mut owner = owner();
        let Some(Request::Swap(..)) = owner.poll(seconds(20), 3) else { panic!() };
        owner.answer(seconds(20), Answer::Failed).unwrap();
        look(&mut owner, seconds(24), None).unwrap();
        assert_eq!(owner.phase(), Phase::Lost);
        let mut next = claim(Some(7), 2);
        next.candidate.least_term = 1;
        look(&mut next, seconds(24), None).unwrap();
        look(&mut next, seconds(30), None).unwrap();
        assert_eq!(swap(&mut next, seconds(92), 4).0.term, 2);
    }

    #[test]
    fn records_of_others_end_the_claim_with_the_next_step() {
        for (cluster, record, expected) in [
            (Some(8), Some((sample(), 1)), "choose another URL"),
            (None, Some((Record { shard: 3, ..sample() }, 1)), "another shard's"),
            (None, None, "no server has owned the shard"),
        ] {
            let error = look(&mut claim(cluster, 2), Duration::ZERO, record).unwrap_err();
            assert_eq!(error.kind, Kind::Config);
            assert!(error.message.contains(expected) && error.expected.is_some(), "{error}");
        }
        let mut owner = owner();
        owner.poll(seconds(20), 3).unwrap();
        owner.answer(seconds(20), Answer::Failed).unwrap();
        look(&mut owner, seconds(24), Some((sample(), 9))).unwrap();
        assert_eq!((owner.phase(), owner.record(), owner.wake()), (Phase::Lost, Some(&sample()), None));
        assert!(!owner.holds(seconds(24)));
    }

    #[test]
    fn a_history_that_is_shorter_than_the_record_promises_is_damage() {
        let mut claim = claim(Some(7), 2);
        look(&mut claim, Duration::ZERO, Some((Record { stage: Stage::Released, ..sample() }, 1))).unwrap();
        swap(&mut claim, Duration::ZERO, 2);
        claim.marked();
        let short = LogPosition { segment: 4, offset: 99 };
        let error = claim.recovered(short, short).unwrap_err();
        assert!(error.message.contains("ends before") && error.got.is_some(), "{error}");
        assert_eq!(claim.phase(), Phase::Reading);
    }
}
