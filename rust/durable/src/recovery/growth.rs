//! How long the log behind the newest snapshot is: a start has to read all of it.

/// A log that is no longer than this is read in no time, however small the state is.
const LEAST: u64 = 1 << 20;
/// So many segments are few, however short they are.
const FEW: usize = 16;

/// The log behind the newest snapshot.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Growth {
    /// Bytes that the start has read.
    pub(crate) replayed: u64,
    /// In so many segments.
    pub(crate) segments: usize,
    /// The log's position where what came since then begins.
    pub(crate) from: u64,
    /// Bytes of the snapshot, if there is one.
    pub(crate) state: Option<u64>,
}

impl Growth {
    /// Behind a snapshot of so many bytes.
    pub(crate) fn behind(from: u64, state: u64) -> Self {
        Self { from, state: Some(state), ..Self::default() }
    }

    /// Whether the log is longer than so many times the state, or its segments are many. `measure` tells the bytes of the
    /// state where no snapshot does.
    pub(crate) fn is_much(&self, position: u64, times: u64, measure: impl FnOnce() -> u64) -> bool {
        let bytes = self.replayed + position.saturating_sub(self.from);
        if times == 0 {
            return false;
        }
        let is_long = || bytes > self.state.unwrap_or_else(measure).saturating_mul(times);
        self.segments > FEW || bytes > LEAST && is_long()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_log_is_measured_by_the_state() {
        let much = |growth: Growth, position, times| growth.is_much(position, times, || 10 << 20);
        let behind = Growth::behind(1000, 1 << 20);
        for (bytes, times, expected) in [(4 << 20, 4, false), ((4 << 20) + 1, 4, true), (1 << 40, 0, false)] {
            assert_eq!(much(behind, 1000 + bytes, times), expected, "{bytes} {times}");
        }
        // Without a snapshot the slices say it, and what is short is never much.
        let none = Growth::default();
        assert!(!much(none, 40 << 20, 4) && much(none, (40 << 20) + 1, 4));
        let tiny = Growth::behind(0, 10);
        assert!(!much(tiny, LEAST, 4) && much(tiny, LEAST + 1, 4));
        // What the start has read counts as well, in bytes and in files.
        assert!(much(Growth { replayed: 4 << 20, ..behind }, 1001, 4));
        assert!(much(Growth { segments: FEW + 1, ..Growth::default() }, 0, 4));
        assert!(!much(Growth { segments: FEW, ..Growth::default() }, 0, 4));
    }
}
