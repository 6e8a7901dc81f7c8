//! Which copies of a history go: those that the server's own history no longer has and that there is no room for,
//! the oldest first, and what lies before a gap.

use super::listing::Listing;
use fastps_durable::KeptHistory;
use fastps_durable::copy::Sealed;

/// The segment that the copied history begins with from now on.
pub(super) fn begin(listing: &Listing, kept: &KeptHistory) -> u64 {
    let connected = connected(listing);
    let logs = listing.snapshots.values().map(|stored| stored.snapshot.log);
    // The log alone is a history if it begins with the shard.
    let mut begins: Vec<_> = [1]
        .into_iter()
        .filter(|first| listing.segments.contains_key(first))
        .chain(logs)
        .filter(|log| *log >= connected)
        .collect();
    begins.sort_unstable();
    begins.dedup();
    let room = |begin: &u64| bytes(listing, *begin) <= kept.most_bytes;
    let own = begins.iter().rfind(|begin| **begin <= kept.begin).copied();
    let Some(own) = own else { return begins.first().copied().unwrap_or(0) };
    begins.iter().take_while(|begin| **begin < own).find(|begin| room(begin)).copied().unwrap_or(own)
}

/// The first segment of those that reach the last without a gap.
fn connected(listing: &Listing) -> u64 {
    let mut later: Option<&Sealed> = None;
    for segment in listing.segments.values().rev() {
        if later.is_some_and(|later| segment.next != 0 && segment.next != later.number) {
            break;
        }
        later = Some(segment);
    }
    later.map_or(0, |first| first.number)
}

/// Bytes of the history from a segment on.
pub(super) fn bytes(listing: &Listing, begin: u64) -> u64 {
    let log = listing.segments.range(begin..).map(|(_, segment)| segment.bytes);
    let snapshots = listing.snapshots.values().filter(|stored| stored.snapshot.log >= begin);
    log.chain(snapshots.map(|stored| stored.bytes)).fold(0, u64::saturating_add)
}

#[cfg(test)]
mod tests {
    use super::super::listing::Stored;
    use super::*;
    use fastps_durable::copy::CopiedSnapshot;

    /// Segments of 10 bytes, and snapshots of 5 with their logs.
    fn listing(segments: &[(u64, u64)], logs: &[u64]) -> Listing {
        let segment = |(number, next): &(u64, u64)| {
            (*number, Sealed { number: *number, next: *next, bytes: 10, crc32c: 0, time: 0 })
        };
        let snapshot = |log: &u64| {
            let snapshot = CopiedSnapshot { number: *log, log: *log, manifest_crc32c: 0 };
            (*log, Stored { snapshot, bytes: 5, places: Vec::new() })
        };
        Listing {
            segments: segments.iter().map(segment).collect(),
            snapshots: logs.iter().map(snapshot).collect(),
            ..Listing::default()
        }
    }

    #[test]
    fn the_oldest_go_first_but_none_that_the_server_has() {
        let all = [(1, 2), (2, 3), (3, 4), (4, 5), (5, 6)];
        for (segments, logs, own, most, expected) in [
            (&all[..], &[2, 4][..], 1, 0, 1),
            (&all, &[2, 4], 1, 1000, 1),
            (&all, &[2, 4], 4, 1000, 1),
            // 50 bytes from segment 2 on, and 25 from segment 4.
            (&all, &[2, 4], 4, 59, 2),
            (&all, &[2, 4], 4, 50, 2),
            (&all, &[2, 4], 4, 49, 4),
            (&all, &[2, 4], 4, 0, 4),
            (&all, &[2, 4], 5, 0, 4),
            // What lies before a gap is reached from nowhere.
            (&[(1, 2), (3, 4), (4, 5)], &[3], 3, 1000, 3),
            (&[(1, 2), (2, 0), (3, 4)], &[3], 3, 1000, 1),
            (&[(2, 3), (3, 4)], &[3], 3, 1000, 3),
            (&[], &[3], 3, 0, 3),
            (&[], &[], 1, 0, 0),
        ] {
            let kept = KeptHistory {
                directory: String::new(),
                begin: own,
                segments: Vec::new(),
                snapshots: Vec::new(),
                most_bytes: most,
            };
            assert_eq!(
                begin(&listing(segments, logs), &kept),
                expected,
                "{segments:?} {logs:?} {own} {most}"
            );
        }
    }
}
