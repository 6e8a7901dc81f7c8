//! Tests the claim on which `hogwild` rests: racing vectors may mix, but lanes never tear.
//!
//! Two threads store vectors of one pattern each into the same line of racing memory. A third thread loads,
//! and now and then stores either pattern, so that patterns also meet where only two threads have a core. A
//! lane with neither pattern was torn. No vendor promises that wide vectors do not tear, so this is tested on
//! the CPU at hand: in memory of this process, and in memory that each of the three threads has mapped for
//! itself, as the processes of a shared store do.

use crate::base::error::Result;
use crate::base::isa::Isa;
use crate::base::sync::{Arc, AtomicU32, Ordering};
use crate::memory::{RacyBuffer, SharedMemory};
use std::sync::Barrier;

const PAGE: u64 = 4096;
/// Elements of a cache line, and of the widest vector.
const LINE: usize = 16;
/// Offsets of the tested line in elements, so that vectors straddle a line border: none, half a line, one
/// lane.
const SHIFTS: [usize; 3] = [0, LINE / 2, 1];
/// Loads of the third thread per store; the first loads after a store may return the value just stored.
const LOADS: u64 = 16;
/// Two values that differ in every bit, so that each part of a lane shows which pattern it is from.
const PATTERNS: [u32; 2] = [0x3355_1177, !0x3355_1177];

/// The result at one offset.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Trial {
    /// Elements between the tested line and the border of a cache line.
    pub shift: usize,
    /// Lines of 16 lanes that were loaded.
    pub loads: u64,
    /// Lines that held lanes of both patterns, which is allowed.
    pub mixed: u64,
    /// Lanes that matched neither pattern; there must be none.
    pub torn_lanes: u64,
}

/// The results at all offsets.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TearReport {
    /// The instruction set that was tested.
    pub isa: Isa,
    /// One per offset: on the border of a cache line, half a line after it, one lane after it.
    pub trials: Vec<Trial>,
}

impl TearReport {
    /// Torn lanes over all offsets.
    pub fn torn_lanes(&self) -> u64 {
        self.trials.iter().map(|trial| trial.torn_lanes).sum()
    }
}

/// Which memory the threads race for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mapping {
    /// Memory of this process.
    Private,
    /// Memory of a shared store: each thread has its own mapping.
    Shared,
}

/// Loads `loads` lines at each offset while other threads store into them. A million loads take about a tenth
/// of a second.
pub fn tearing(isa: Isa, mapping: Mapping, loads: u64) -> Result<TearReport> {
    let trial = |shift| Ok(trial(isa, &buffers(mapping)?, shift, loads));
    Ok(TearReport { isa, trials: SHIFTS.into_iter().map(trial).collect::<Result<_>>()? })
}

/// The same two lines, one buffer per thread.
fn buffers(mapping: Mapping) -> Result<[Arc<RacyBuffer>; 3]> {
    if mapping == Mapping::Private {
        let buffer = Arc::new(RacyBuffer::filled(2 * LINE, 0.0));
        return Ok([buffer.clone(), buffer.clone(), buffer]);
    }
    let memory = SharedMemory::create()?;
    memory.grow(PAGE)?;
    let map = || -> Result<_> {
        let region = Arc::new(memory.map(0, PAGE as usize)?);
        Ok(Arc::new(RacyBuffer::shared(region, 0, 2 * LINE)))
    };
    Ok([map()?, map()?, map()?])
}

fn trial(isa: Isa, buffers: &[Arc<RacyBuffer>; 3], shift: usize, loads: u64) -> Trial {
    let [stored @ .., loaded] = buffers;
    loaded.store(isa, 0, &[f32::from_bits(PATTERNS[0]); 2 * LINE]);
    let (start, stop) = (Barrier::new(3), AtomicU32::new(0));
    let mut seen = Trial { shift, loads, mixed: 0, torn_lanes: 0 };
    std::thread::scope(|scope| {
        let storing = [0, 1].map(|k| {
            let (buffer, pattern, start, stop) = (&stored[k], PATTERNS[k], &start, &stop);
            scope.spawn(move || {
                let line = [f32::from_bits(pattern); LINE];
                start.wait();
                while stop.load(Ordering::Relaxed) == 0 {
                    buffer.store(isa, shift, &line);
                }
            })
        });
        start.wait();
        let mut line = [0.0; LINE];
        for k in 0..loads {
            if k % LOADS == 0 {
                let pattern = PATTERNS[(k / LOADS % 2) as usize];
                loaded.store(isa, shift, &[f32::from_bits(pattern); LINE]);
            }
            loaded.load(isa, shift, &mut line);
            seen.count(&line);
        }
        stop.store(1, Ordering::Relaxed);
        for thread in storing {
            drop(thread.join());
        }
    });
    seen
}

impl Trial {
    fn count(&mut self, line: &[f32; LINE]) {
        let of = |pattern| line.iter().filter(|x| x.to_bits() == pattern).count();
        let [one, other] = PATTERNS.map(of);
        self.mixed += u64::from(one > 0 && other > 0);
        self.torn_lanes += (LINE - one - other) as u64;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_lane_tears_on_this_cpu() {
        for isa in Isa::ALL.into_iter().filter(|isa| isa.is_available()) {
            for mapping in [Mapping::Private, Mapping::Shared] {
                if mapping == Mapping::Shared && (cfg!(miri) || !cfg!(target_os = "linux")) {
                    continue;
                }
                let report = tearing(isa, mapping, if cfg!(miri) { 50 } else { 200_000 }).unwrap();
                assert_eq!(report.torn_lanes(), 0, "{report:?}");
                assert_eq!(report.trials.len(), SHIFTS.len());
            }
        }
    }

    #[test]
    fn mixed_lines_and_torn_lanes_differ() {
        let [one, other] = PATTERNS.map(f32::from_bits);
        let torn = f32::from_bits((PATTERNS[0] & 0xFFFF_0000) | (PATTERNS[1] & 0xFFFF));
        let mut seen = Trial { shift: 0, loads: 0, mixed: 0, torn_lanes: 0 };
        let mut line = [one; LINE];
        seen.count(&line);
        assert_eq!((seen.mixed, seen.torn_lanes), (0, 0));
        line[3] = other;
        seen.count(&line);
        assert_eq!((seen.mixed, seen.torn_lanes), (1, 0));
        line[4] = torn;
        line[15] = torn;
        seen.count(&line);
        assert_eq!((seen.mixed, seen.torn_lanes), (2, 2));
    }
}
