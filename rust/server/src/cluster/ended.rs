//! Incarnations whose sessions have ended: the slices no longer remember their pushes, so they must never
//! come back. The oldest are forgotten, after a week at the latest.

use fastps_core::error::Result;
use fastps_core::fault::fault;
use fastps_core::shard::{Charge, Meter, Purpose};
use fastps_durable::Ended;
use std::collections::{HashSet, VecDeque};
use std::sync::Arc;

/// Most incarnations remembered.
const MAX_ENDED: u64 = 1_000_000;
/// Divisor of the shard's memory that bounds their memory, unless they are few.
const MEMORY_PART: u64 = 16;
const FEW: u64 = 1024;
/// How long an incarnation is remembered.
const REMEMBERED_S: u32 = 7 * 24 * 3600;
/// Bytes of one incarnation, in this table, in the catalog of the log and in the copies of a snapshot.
pub(super) const ENDED_BYTES: u64 = 128;

#[derive(Debug, Default)]
pub(super) struct EndedSessions {
    known: HashSet<u64>,
    /// Incarnations and the ends of their sessions in seconds since 1970, the oldest first.
    order: VecDeque<(u64, u32)>,
    /// `None` until something is remembered.
    memory: Option<Charge>,
}

fn most(limit: u64) -> usize {
    (limit / MEMORY_PART / ENDED_BYTES).clamp(FEW, MAX_ENDED) as usize
}

impl EndedSessions {
    /// Adopts the incarnations of an earlier process.
    pub(super) fn restore(&mut self, ended: &Ended, meter: &Arc<Meter>, now_s: u32) -> Result<()> {
        let young = |at: &u32| now_s.saturating_sub(*at) <= REMEMBERED_S;
        let newest = ended.iter().rev().filter(|(_, at)| young(at)).take(most(meter.limit()));
        self.order = newest.collect();
        self.order.make_contiguous().reverse();
        self.known = self.order.iter().map(|(client, _)| *client).collect();
        self.memory = Some(meter.take(Purpose::Identities, ENDED_BYTES * self.order.len() as u64)?);
        Ok(())
    }

    /// Remembers one, in memory of its session. Returns the number remembered.
    pub(super) fn add(&mut self, client: u64, mut memory: Charge, limit: u64, now_s: u32) -> u32 {
        memory.shrink_to(ENDED_BYTES);
        match &mut self.memory {
            Some(all) => all.absorb(memory),
            none => *none = Some(memory),
        }
        self.known.insert(client);
        self.order.push_back((client, now_s));
        self.forget(most(limit), now_s);
        self.order.len() as u32
    }

    /// Forgets all but the newest `most`, and the old ones.
    fn forget(&mut self, most: usize, now_s: u32) {
        while let Some((client, at)) = self.order.front()
            && (self.order.len() > most || now_s.saturating_sub(*at) > REMEMBERED_S)
        {
            self.known.remove(client);
            self.order.pop_front();
            if let Some(memory) = &mut self.memory {
                memory.give_back(ENDED_BYTES);
            }
        }
    }

    pub(super) fn contains(&self, client: u64) -> bool {
        self.known.contains(&client) && !fault("ended_forgotten")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn session(meter: &Arc<Meter>) -> Charge {
        meter.take(Purpose::Identities, 2 * ENDED_BYTES).unwrap()
    }

    #[test]
    fn the_oldest_are_forgotten_and_memory_is_counted() {
        let meter = Meter::new(1 << 20);
        let mut ended = EndedSessions::default();
        for client in 1..=2 * FEW {
            ended.add(client, session(&meter), meter.limit(), 100);
        }
        assert_eq!(most(meter.limit()) as u64, FEW);
        assert!(!ended.contains(FEW) && ended.contains(FEW + 1) && ended.contains(2 * FEW));
        assert_eq!(meter.used(), FEW * ENDED_BYTES);
        assert_eq!(ended.add(7, session(&meter), meter.limit(), 100 + REMEMBERED_S), FEW as u32);
        assert_eq!(ended.add(8, session(&meter), meter.limit(), 101 + REMEMBERED_S), 2);
        assert!(!ended.contains(2 * FEW) && ended.contains(7));
        assert_eq!(meter.used(), 2 * ENDED_BYTES);
        assert_eq!(most(u64::MAX), 1_000_000);
    }

    #[test]
    fn a_restart_forgets_the_same() {
        let meter = Meter::new(1 << 20);
        let mut catalog = fastps_durable::Catalog::default();
        for client in 1..=FEW + 3 {
            catalog.apply(&fastps_durable::Event::SessionBegan(client));
            let at = if client < 5 { 1 } else { 2 };
            catalog.apply(&fastps_durable::Event::SessionOver { client, at, remembered: u32::MAX });
        }
        let mut ended = EndedSessions::default();
        ended.restore(&catalog.ended, &meter, 2 + REMEMBERED_S).unwrap();
        assert!(!ended.contains(4) && ended.contains(5) && ended.contains(FEW + 3));
        assert_eq!(meter.used(), (FEW - 1) * ENDED_BYTES);
        assert_eq!(ended.add(3, session(&meter), meter.limit(), 2 + REMEMBERED_S), FEW as u32);
        assert!(ended.contains(5));
        let none = Meter::new(ENDED_BYTES);
        assert!(EndedSessions::default().restore(&catalog.ended, &none, 2).is_err());
    }
}
