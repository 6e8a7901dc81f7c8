//! Length of the log after the newest snapshot, all of which a start must replay.

/// A log up to this length is never too long: it is replayed quickly, however small the state is.
const MIN_LOG_BYTES: u64 = 1 << 20;
/// Maximum number of segments, however short they are.
const MAX_SEGMENTS: usize = 16;
/// While a snapshot is written, the log may grow to this many times what is too long, and by some more: a
/// snapshot of a small state takes as long as its syncs.
const LIMIT_TIMES: u64 = 2;
const LIMIT_SLACK_BYTES: u64 = 16 << 20;

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

/// How long the log may become.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Bounds {
    /// Bytes from which on it is too long.
    pub(crate) bytes: u64,
    /// The position at which it is too long.
    pub(crate) due: u64,
    /// The position at which it may grow no more.
    pub(crate) limit: u64,
}

impl Growth {
    /// The log after a snapshot of `state` bytes, taken at position `from`.
    pub(crate) fn after_snapshot(from: u64, state: u64) -> Self {
        Self { from, state: Some(state), ..Self::default() }
    }

    /// The bounds of a log that is too long beyond `times` the state; `None` for 0. The slices have `slices`
    /// bytes now, which may be more than in the snapshot.
    pub(crate) fn bounds(&self, times: u64, slices: u64) -> Option<Bounds> {
        let bytes = self.state.unwrap_or(0).max(slices).saturating_mul(times).max(MIN_LOG_BYTES);
        let position = |bytes: u64| self.from.saturating_add(bytes.saturating_sub(self.replayed));
        let most = bytes.saturating_mul(LIMIT_TIMES).saturating_add(LIMIT_SLACK_BYTES);
        (times > 0).then(|| {
            let due =
                if self.segments > MAX_SEGMENTS { self.from } else { position(bytes.saturating_add(1)) };
            Bounds { bytes, due, limit: position(most) }
        })
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn log_length_is_measured_against_the_state() {
        let due = |growth: Growth, slices| growth.bounds(4, slices).map(|bounds| bounds.due);
        let behind = Growth::after_snapshot(1000, 1 << 20);
        assert_eq!(due(behind, 5), Some(1000 + (4 << 20) + 1));
        assert_eq!(behind.bounds(0, 5), None);
        // Slices that the snapshot lacks count, too.
        assert_eq!(due(behind, 10 << 20), Some(1000 + (40 << 20) + 1));
        assert_eq!(due(Growth::default(), 10 << 20), Some((40 << 20) + 1));
        // A short log is never too long.
        assert_eq!(due(Growth::after_snapshot(0, 10), 10), Some(MIN_LOG_BYTES + 1));
        // The part that the start replayed counts, in bytes and in segments.
        assert_eq!(due(Growth { replayed: 4 << 20, ..behind }, 0), Some(1001));
        assert_eq!(due(Growth { replayed: 1 << 30, ..behind }, 0), Some(1000));
        assert_eq!(due(Growth { segments: MAX_SEGMENTS + 1, ..behind }, 0), Some(1000));
        assert_eq!(due(Growth { segments: MAX_SEGMENTS, ..behind }, 0), due(behind, 0));
    }

    #[test]
    fn a_log_may_grow_while_a_snapshot_is_written() {
        let bounds = Growth::after_snapshot(1000, 10 << 20).bounds(4, 0).unwrap();
        assert_eq!((bounds.bytes, bounds.limit), (40 << 20, 1000 + (80 << 20) + LIMIT_SLACK_BYTES));
        let huge = Growth::after_snapshot(1000, u64::MAX).bounds(u64::MAX, 0).unwrap();
        assert_eq!(huge.limit, u64::MAX);
    }
}
