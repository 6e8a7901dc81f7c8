//! Deals the portions of one batch to replicas: DistBelief's load balancing with backup tasks (section 4.2).
//!
//! Every replica begins with a contiguous range, the same in each batch while the replicas are the same. A
//! replica without a range takes the far end of the longest range left, and when every portion was given, a
//! copy of the portion that has been outstanding longest. A portion has at most two holders, and the first to
//! finish it counts. The same requests in the same order give the same portions: nothing depends on a
//! clock or on chance.

use crate::base::error::{Error, Kind, Result};
use crate::base::sync::Arc;
use crate::tensor::program;
use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

/// Most portions of a batch.
pub const MAX_PORTIONS: u64 = program::MAX_PORTIONS as u64;
/// Most failures that a batch keeps.
const MAX_FAILURES: usize = 64;

/// A client, and the number of one of its replicas.
pub type ReplicaId = (u64, u64);

/// A coordinator's task for the replicas.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BatchTask {
    /// Number of the batch; those of a space increase.
    pub batch: u64,
    /// Number of portions that the samples are cut into.
    pub portions: u64,
    /// Only portions 0 to `asked` are computed.
    pub asked: u64,
    /// Number of samples.
    pub samples: u64,
    /// Index of the vector that the replicas pull.
    pub vector: u32,
    /// Replicas that must be present before portions are dealt.
    pub min_replicas: u64,
    /// Set if replicas without a portion compute copies of outstanding ones.
    pub backups: bool,
}

impl BatchTask {
    /// Fails for a batch that cannot be dealt.
    pub fn check(&self) -> Result<()> {
        let fail = |what: &str, expected: String, got: u64| {
            Err(Error::new(Kind::Config, format!("invalid {what} of a batch")).expected(expected, got))
        };
        let most = MAX_PORTIONS.min(self.samples);
        match self {
            Self { batch: 0, .. } => fail("number", "1 or more".to_owned(), 0),
            Self { samples: 0, .. } => fail("samples", "1 or more".to_owned(), 0),
            Self { portions, .. } if !(1..=most).contains(portions) => fail(
                "portions",
                format!("1 to {MAX_PORTIONS}, at most the {} samples", self.samples),
                *portions,
            ),
            Self { asked, portions, .. } if !(1..=*portions).contains(asked) => {
                fail("number of asked portions", format!("1 to {portions}"), *asked)
            }
            Self { min_replicas, .. } if !(1..=MAX_PORTIONS).contains(min_replicas) => {
                fail("min_replicas", format!("1 to {MAX_PORTIONS}"), *min_replicas)
            }
            _ => Ok(()),
        }
    }
}

/// Reason why a portion cannot be part of its sum.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FailureKind {
    /// The loss or a gradient is not finite.
    NotFinite,
    /// A value is outside the grid: the batch begins again on a coarser one.
    Outside,
    /// A shard has no open sum of this batch, as after a restart: the batch begins again.
    SumLost,
}

impl FailureKind {
    /// The meaning of a slice's refusal of a portion; `None` if the batch continues.
    pub fn of(refusal: Kind) -> Option<Self> {
        match refusal {
            Kind::NonFinite => Some(Self::NotFinite),
            Kind::Precondition => Some(Self::Outside),
            Kind::UnknownOutcome => Some(Self::SumLost),
            _ => None,
        }
    }
}

/// A portion that could not be added. It ends the batch.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PortionFailure {
    /// Name of the replica.
    pub replica: Arc<str>,
    /// The portion.
    pub portion: u64,
    /// The fault.
    pub kind: FailureKind,
    /// The tensor concerned; empty: the loss.
    pub tensor: Arc<str>,
}

/// A portion that was given and not finished.
#[derive(Clone, Debug)]
struct Outstanding {
    /// How many portions had been given then: the smallest number has been outstanding longest.
    given: u64,
    first: Option<ReplicaId>,
    /// Computes a copy.
    second: Option<ReplicaId>,
}

impl Outstanding {
    fn is_held_by(&self, replica: ReplicaId) -> bool {
        self.first == Some(replica) || self.second == Some(replica)
    }

    fn holders(&self) -> usize {
        usize::from(self.first.is_some()) + usize::from(self.second.is_some())
    }
}

/// A finished portion.
#[derive(Clone, Debug, PartialEq)]
pub struct Finished {
    /// The sum of its samples' losses.
    pub loss: f64,
    /// Name of the replica that finished it first.
    pub replica: Arc<str>,
}

/// The portions of one batch: waiting, outstanding or finished.
#[derive(Debug)]
pub struct Batch {
    /// The task.
    pub task: BatchTask,
    /// The rest of each replica's range; without an owner if the replica has left.
    ranges: Vec<(Option<ReplicaId>, Range<u64>)>,
    /// First portion of each range as dealt: where a replica begins the next batch, if nothing changes.
    first: BTreeMap<ReplicaId, u64>,
    /// Portions that were given, and returned unfinished.
    returned: BTreeSet<u64>,
    outstanding: BTreeMap<u64, Outstanding>,
    /// Number of portions given so far.
    given: u64,
    /// The portion that each replica was given last, and the one before, which it may report once more.
    given_to: BTreeMap<ReplicaId, [Option<u64>; 2]>,
    /// The names of those that have finished portions: one copy of each.
    names: BTreeSet<Arc<str>>,
    /// The finished portions, by number.
    pub finished: Vec<Option<Finished>>,
    unfinished: u64,
    /// Copies that were given.
    pub backups_issued: u64,
    /// Copies that were finished before the original.
    pub backups_won: u64,
    /// Portions that could not be added.
    pub failures: Vec<PortionFailure>,
}

impl Batch {
    /// Deals the ranges to these replicas, in their order.
    pub fn new(task: BatchTask, replicas: &[ReplicaId]) -> Self {
        let count = replicas.len().max(1) as u64;
        let range = |k: u64| task.asked * k / count..task.asked * (k + 1) / count;
        let ranges: Vec<_> = if replicas.is_empty() {
            vec![(None, range(0))]
        } else {
            replicas.iter().zip(0..).map(|(replica, k)| (Some(*replica), range(k))).collect()
        };
        let begin = |(owner, range): &(Option<ReplicaId>, Range<u64>)| Some(((*owner)?, range.start));
        Self {
            task,
            first: ranges.iter().filter(|(_, range)| !range.is_empty()).filter_map(begin).collect(),
            ranges,
            returned: BTreeSet::new(),
            outstanding: BTreeMap::new(),
            given: 0,
            given_to: BTreeMap::new(),
            names: BTreeSet::new(),
            finished: vec![None; task.asked as usize],
            unfinished: task.asked,
            backups_issued: 0,
            backups_won: 0,
            failures: Vec::new(),
        }
    }

    /// Returns whether nothing is left to compute.
    pub fn is_over(&self) -> bool {
        self.unfinished == 0 || !self.failures.is_empty()
    }

    /// Number of unfinished portions.
    pub fn unfinished(&self) -> u64 {
        self.unfinished
    }

    fn is_finished(&self, portion: u64) -> bool {
        self.finished.get(portion as usize).is_none_or(Option::is_some)
    }

    /// The next portion for the replica among those that no replica computes, and the range it comes from.
    fn waiting(&self, replica: ReplicaId) -> Option<(u64, Option<usize>)> {
        if let Some(portion) = self.returned.first() {
            return Some((*portion, None));
        }
        let own =
            |(owner, range): &(Option<ReplicaId>, Range<u64>)| *owner == Some(replica) && !range.is_empty();
        if let Some(k) = self.ranges.iter().position(own) {
            return Some((self.ranges[k].1.start, Some(k)));
        }
        let longest = |(k, (_, range)): (usize, &(_, Range<u64>))| {
            // Of equals the first.
            (!range.is_empty()).then_some((range.end - range.start, usize::MAX - k))
        };
        let (_, k) = self.ranges.iter().enumerate().filter_map(longest).max()?;
        let k = usize::MAX - k;
        Some((self.ranges[k].1.end - 1, Some(k)))
    }

    /// The portion that has been outstanding longest, among those of one other holder.
    fn copy(&self, replica: ReplicaId) -> Option<u64> {
        let held_once = self
            .outstanding
            .iter()
            .filter(|(_, held)| self.task.backups && held.holders() == 1 && !held.is_held_by(replica));
        held_once.min_by_key(|(_, held)| held.given).map(|(portion, _)| *portion)
    }

    /// The next portion for a replica that holds none. `None`: it waits for the next batch, or for a portion
    /// that comes back.
    pub fn take(&mut self, replica: ReplicaId) -> Option<u64> {
        let portion = self.take_any(replica)?;
        let [last, before] = self.given_to.entry(replica).or_default();
        (*last, *before) = (Some(portion), *last);
        Some(portion)
    }

    /// Returns whether the replica was given this portion, last or before that.
    pub fn was_given(&self, replica: ReplicaId, portion: u64) -> bool {
        self.given_to.get(&replica).is_some_and(|given| given.contains(&Some(portion)))
    }

    fn take_any(&mut self, replica: ReplicaId) -> Option<u64> {
        if self.is_over() {
            return None;
        }
        while let Some((portion, from)) = self.waiting(replica) {
            self.remove_waiting(portion, from);
            if self.is_finished(portion) {
                continue;
            }
            self.given += 1;
            let held = Outstanding { given: self.given, first: Some(replica), second: None };
            self.outstanding.insert(portion, held);
            return Some(portion);
        }
        let portion = self.copy(replica)?;
        let held = self.outstanding.get_mut(&portion)?;
        *(if held.first.is_none() { &mut held.first } else { &mut held.second }) = Some(replica);
        self.backups_issued += 1;
        Some(portion)
    }

    /// The portion that the replica was given and has not finished: a repeated request gets it again.
    pub fn held(&self, replica: ReplicaId) -> Option<u64> {
        if self.is_over() {
            return None;
        }
        self.outstanding.iter().find(|(_, held)| held.is_held_by(replica)).map(|(portion, _)| *portion)
    }

    /// The replicas that hold portions.
    pub fn holders(&self) -> BTreeSet<ReplicaId> {
        let held = |held: &Outstanding| [held.first, held.second];
        self.outstanding.values().flat_map(held).flatten().collect()
    }

    fn remove_waiting(&mut self, portion: u64, from: Option<usize>) {
        match from.and_then(|k| self.ranges.get_mut(k)) {
            Some((_, range)) if range.start == portion => range.start += 1,
            Some((_, range)) => range.end = portion,
            None => drop(self.returned.remove(&portion)),
        }
    }

    /// The portion that the replica will probably get next, in this batch or as the first of the next one.
    pub fn likely_next(&self, replica: ReplicaId) -> Option<u64> {
        self.waiting(replica).map(|(portion, _)| portion).or_else(|| self.first.get(&replica).copied())
    }

    /// Returns whether the replica still computes this portion.
    pub fn holds(&self, replica: ReplicaId, portion: u64) -> bool {
        !self.is_over() && self.outstanding.get(&portion).is_some_and(|held| held.is_held_by(replica))
    }

    /// Notes that a replica has added a portion to the sum on every shard. Returns whether it is the first.
    pub fn finish(&mut self, replica: ReplicaId, name: &Arc<str>, portion: u64, loss: f64) -> bool {
        if self.is_over() || self.is_finished(portion) {
            return false;
        }
        let held = self.outstanding.remove(&portion);
        self.backups_won += u64::from(held.is_some_and(|held| held.second == Some(replica)));
        self.returned.remove(&portion);
        let name = self.names.get(name).unwrap_or(name).clone();
        self.names.insert(name.clone());
        self.finished[portion as usize] = Some(Finished { loss, replica: name });
        self.unfinished -= 1;
        true
    }

    /// Notes that a portion cannot be added, which ends the batch.
    pub fn fail(&mut self, failure: PortionFailure) {
        if self.failures.len() < MAX_FAILURES && self.unfinished > 0 && !self.is_finished(failure.portion) {
            self.failures.push(failure);
        }
    }

    /// Bytes of the names that it keeps.
    pub(super) fn name_bytes(&self) -> u64 {
        let entry = size_of::<Arc<str>>() * 2;
        let names = self.names.iter().map(|name| name.len() + entry);
        let failures = self.failures.iter().map(|failure| failure.replica.len() + failure.tensor.len() + 128);
        names.chain(failures).sum::<usize>() as u64
    }

    /// Removes a replica: its portion, and the rest of its range, go to others.
    pub fn leave(&mut self, replica: ReplicaId) {
        for (owner, _) in &mut self.ranges {
            owner.take_if(|owner| *owner == replica);
        }
        self.first.remove(&replica);
        self.given_to.remove(&replica);
        self.outstanding.retain(|portion, held| {
            held.first.take_if(|holder| *holder == replica);
            held.second.take_if(|holder| *holder == replica);
            let kept = held.holders() > 0;
            if !kept {
                self.returned.insert(*portion);
            }
            kept
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::cmp::Reverse;
    use std::collections::BinaryHeap;

    fn task(portions: u64) -> BatchTask {
        let samples = 10 * portions;
        BatchTask { batch: 1, portions, asked: portions, samples, vector: 1, min_replicas: 1, backups: true }
    }

    fn replicas(count: u64) -> Vec<ReplicaId> {
        (1..=count).map(|client| (client, 1)).collect()
    }

    fn finish(batch: &mut Batch, replica: ReplicaId, portion: u64) -> bool {
        batch.finish(replica, &format!("r{}", replica.0).into(), portion, portion as f64)
    }

    const A: ReplicaId = (1, 1);
    const B: ReplicaId = (2, 1);
    const C: ReplicaId = (3, 1);

    #[test]
    fn ranges_are_contiguous_and_the_longest_is_stolen_from_its_end() {
        let mut batch = Batch::new(task(10), &[A, B]);
        assert_eq!(batch.take(A), Some(0));
        assert_eq!(batch.likely_next(A), Some(1));
        for expected in 5..10 {
            assert_eq!(batch.take(B), Some(expected));
            assert!(finish(&mut batch, B, expected));
        }
        // A replica that came late has no range, and one that is done with its own: the far end of A's.
        assert_eq!((batch.take(C), batch.take(B)), (Some(4), Some(3)));
        assert_eq!(batch.likely_next(C), Some(2));
        assert_eq!((batch.take(A), batch.take(C)), (Some(1), Some(2)));
        // The likely next portion is of the next batch.
        assert_eq!(batch.likely_next(B), Some(5));
        assert_eq!(batch.likely_next(C), None);
    }

    #[test]
    fn copies_are_of_the_longest_outstanding_portion_and_have_two_holders_at_most() {
        let mut batch = Batch::new(task(2), &[A, B]);
        assert_eq!((batch.take(A), batch.take(B)), (Some(0), Some(1)));
        assert_eq!(batch.take(C), Some(0));
        assert_eq!(batch.take((4, 1)), Some(1));
        assert_eq!(batch.take((5, 1)), None);
        assert_eq!((batch.backups_issued, batch.backups_won), (2, 0));
        assert!(finish(&mut batch, C, 0) && !finish(&mut batch, A, 0));
        assert_eq!(batch.backups_won, 1);
        // No replica copies its own portion.
        assert_eq!(batch.take(B), None);
        assert!(finish(&mut batch, B, 1));
        assert_eq!((batch.backups_issued, batch.backups_won, batch.is_over()), (2, 1, true));
        let without = BatchTask { backups: false, ..task(1) };
        let mut batch = Batch::new(without, &[A]);
        assert_eq!((batch.take(A), batch.take(B)), (Some(0), None));
    }

    #[test]
    fn what_a_dead_replica_held_and_had_left_goes_to_others() {
        let mut batch = Batch::new(task(4), &[A, B]);
        assert_eq!((batch.take(A), batch.take(B)), (Some(0), Some(2)));
        batch.leave(A);
        assert!(finish(&mut batch, B, 2));
        assert_eq!(batch.take(B), Some(0));
        assert!(finish(&mut batch, B, 0));
        assert_eq!(batch.take(B), Some(3));
        assert_eq!(batch.take(C), Some(1));
        // One of two holders dies: the portion is not returned, and may be copied again.
        assert_eq!(batch.take(A), Some(3));
        batch.leave(B);
        assert_eq!(batch.take((4, 1)), Some(3));
        assert!(batch.holds((4, 1), 3) && !batch.holds(B, 3));
        // It had added its portion before it died.
        assert!(finish(&mut batch, B, 3) && finish(&mut batch, C, 1));
        assert!(batch.is_over());
    }

    #[test]
    fn a_portion_that_was_finished_before_it_was_given_is_not_given() {
        let mut batch = Batch::new(task(3), &[A]);
        assert!(finish(&mut batch, B, 0) && finish(&mut batch, B, 2));
        assert!(!finish(&mut batch, B, 3));
        assert_eq!((batch.take(A), batch.take(C)), (Some(1), Some(1)));
        assert_eq!(batch.unfinished(), 1);
    }

    #[test]
    fn a_failure_ends_the_batch() {
        let mut batch = Batch::new(task(3), &[A, B]);
        assert_eq!(batch.take(A), Some(0));
        assert!(finish(&mut batch, A, 0));
        let failure = |portion| PortionFailure {
            replica: "r1".into(),
            portion,
            kind: FailureKind::NotFinite,
            tensor: "w".into(),
        };
        batch.fail(failure(0));
        assert!(!batch.is_over());
        batch.fail(failure(1));
        assert!(batch.is_over());
        assert_eq!((batch.take(B), finish(&mut batch, B, 1)), (None, false));
        assert_eq!(batch.failures, [failure(1)]);
    }

    #[test]
    fn what_cannot_be_dealt_is_refused() {
        let good = task(4);
        good.check().unwrap();
        for bad in [
            BatchTask { batch: 0, ..good },
            BatchTask { portions: 0, ..good },
            BatchTask { portions: 41, asked: 41, ..good },
            BatchTask { portions: MAX_PORTIONS + 1, asked: 1, samples: 1 << 40, ..good },
            BatchTask { asked: 0, ..good },
            BatchTask { asked: 5, ..good },
            BatchTask { samples: 0, ..good },
            BatchTask { min_replicas: 0, ..good },
        ] {
            assert_eq!(bad.check().unwrap_err().kind, Kind::Config, "{bad:?}");
        }
    }

    /// Replicas in virtual time: the first takes `slowness` x as long as the others, whose portions take
    /// `1 / per_replica`. Returns when the batch ends.
    fn makespan(count: u64, per_replica: u64, backups: bool) -> f64 {
        const TICKS: u64 = 1 << 20;
        let all = replicas(count);
        let task = BatchTask { backups, ..task(count * per_replica) };
        let mut batch = Batch::new(task, &all);
        let duration = |replica: ReplicaId| if replica == A { 10 } else { 1 } * TICKS / per_replica;
        let mut events: BinaryHeap<_> = all.iter().map(|replica| Reverse((0, *replica, None))).collect();
        let (mut idle, mut end) = (Vec::new(), 0);
        while let Some(Reverse((now, replica, portion))) = events.pop() {
            if let Some(portion) = portion {
                finish(&mut batch, replica, portion);
            }
            if batch.is_over() {
                end = now;
                break;
            }
            match batch.take(replica) {
                Some(portion) => events.push(Reverse((now + duration(replica), replica, Some(portion)))),
                None => idle.push(replica),
            }
        }
        assert!(batch.is_over(), "{idle:?} wait for ever");
        assert_eq!(batch.finished.iter().flatten().count() as u64, count * per_replica);
        end as f64 / TICKS as f64
    }

    #[test]
    fn one_slow_replica_delays_a_batch_by_two_portions_at_most() {
        for count in [2, 4, 8, 16] {
            let (small, coarse) = (makespan(count, 16, true), makespan(count, 1, false));
            let ideal = count as f64 / (count as f64 - 1.0 + 0.1);
            assert!(small <= ideal + 2.0 / 16.0, "{count} replicas: {small}, ideal {ideal}");
            assert!(coarse >= 5.0 * small, "{count} replicas: {coarse} against {small}");
            let backed = makespan(count, 1, true);
            assert!(coarse >= 4.0 * backed, "{count} replicas: {coarse} against {backed}");
            assert_eq!(makespan(count, 16, true), small);
        }
    }
}
