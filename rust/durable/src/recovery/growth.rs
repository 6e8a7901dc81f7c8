//! Length of the log after the newest snapshot, all of which a start must replay.

/// A log up to this length is never too long: it is replayed quickly, however small the state is.
const MIN_LOG_BYTES: u64 = 1 << 20;
/// Maximum number of segments, however short they are.
const MAX_SEGMENTS: usize = 16;

/// The log after the newest snapshot.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Growth {
    /// Bytes that the start replayed.
    pub(crate) replayed: u64,
    /// Number of segments that the start replayed.
    pub(crate) segments: usize,
    /// The log position at the newest snapshot or, without one since, at the start.
    pub(crate) from: u64,
    /// Bytes of the snapshot, if there is one.
    pub(crate) state: Option<u64>,
}

impl Growth {
    /// The log after a snapshot of `state` bytes, taken at position `from`.
    pub(crate) fn after_snapshot(from: u64, state: u64) -> Self {
        Self { from, state: Some(state), ..Self::default() }
    }

    /// Whether the log is longer than `times` the state, or has too many segments. `measure` returns the
    /// bytes of the state if there is no snapshot.
    pub(crate) fn is_too_long(&self, position: u64, times: u64, measure: impl FnOnce() -> u64) -> bool {
        let bytes = self.replayed + position.saturating_sub(self.from);
        if times == 0 {
            return false;
        }
        let is_long = || bytes > self.state.unwrap_or_else(measure).saturating_mul(times);
        self.segments > MAX_SEGMENTS || bytes > MIN_LOG_BYTES && is_long()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn log_length_is_measured_against_the_state() {
        let too_long = |growth: Growth, position, times| growth.is_too_long(position, times, || 10 << 20);
        let behind = Growth::after_snapshot(1000, 1 << 20);
        for (bytes, times, expected) in [(4 << 20, 4, false), ((4 << 20) + 1, 4, true), (1 << 40, 0, false)] {
            assert_eq!(too_long(behind, 1000 + bytes, times), expected, "{bytes} {times}");
        }
        // Without a snapshot the slices are measured, and a short log is never too long.
        let none = Growth::default();
        assert!(!too_long(none, 40 << 20, 4) && too_long(none, (40 << 20) + 1, 4));
        let tiny = Growth::after_snapshot(0, 10);
        assert!(!too_long(tiny, MIN_LOG_BYTES, 4) && too_long(tiny, MIN_LOG_BYTES + 1, 4));
        // The part that the start replayed counts, too, in bytes and in segments.
        assert!(too_long(Growth { replayed: 4 << 20, ..behind }, 1001, 4));
        assert!(too_long(Growth { segments: MAX_SEGMENTS + 1, ..Growth::default() }, 0, 4));
        assert!(!too_long(Growth { segments: MAX_SEGMENTS, ..Growth::default() }, 0, 4));
    }
}
