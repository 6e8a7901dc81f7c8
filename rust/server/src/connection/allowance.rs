//! Limits the control frames of a connection. `h2` and hyper answer PING, SETTINGS, `WINDOW_UPDATE` and the
//! like without showing them, so they are counted below both, in the nine bytes that begin each HTTP/2
//! frame (RFC 9113, 4.1).
//!
//! Data in either direction earns an allowance, since a client sends window updates for what it received
//! and measures the round trip meanwhile. A client without data gets a few frames a second, enough for
//! keep-alive.

use crate::auth::rate::{Bucket, Rate};
use std::time::Instant;

const FRAME_HEADER_BYTES: usize = 9;
/// Types of frames.
const DATA: u8 = 0;
const HEADERS: u8 = 1;
const SETTINGS: u8 = 4;
const PING: u8 = 6;
/// Flag of a DATA frame: the last one of its stream.
const END_STREAM: u8 = 1;
/// Flag of SETTINGS and PING.
const ACK: u8 = 1;
/// Most control frames in a row, which is also the initial allowance, and those that time earns.
const RATE: Rate = Rate { burst: 768.0, per_second: 10.0 };
/// Frames earned by each DATA frame, and bytes that earn one more.
const EARNED_PER_DATA_FRAME: u32 = 4;
const DATA_BYTES_PER_CREDIT: u32 = 1 << 10;

/// The allowance of one connection.
#[derive(Debug)]
pub(crate) struct Allowance {
    incoming: FrameScanner,
    outgoing: FrameScanner,
    left: Bucket,
    /// Bytes of messages whose frames have begun to arrive since the last take.
    messages: u64,
}

/// Finds the headers of frames in the bytes of one direction.
#[derive(Debug, Default)]
struct FrameScanner {
    header: [u8; FRAME_HEADER_BYTES],
    /// Bytes of the header received so far.
    seen: usize,
    /// Bytes before the next header.
    before: usize,
}

impl Allowance {
    /// The allowance of a connection that begins with `preface` bytes outside of frames.
    pub(crate) fn new(preface: usize) -> Self {
        let incoming = FrameScanner { before: preface, ..FrameScanner::default() };
        Self { incoming, outgoing: FrameScanner::default(), left: Bucket::default(), messages: 0 }
    }

    /// Counts received bytes. Returns false if they contain too many control frames.
    pub(crate) fn received(&mut self, bytes: &[u8]) -> bool {
        let (mut spent, mut earned) = (0_u32, 0_u32);
        let messages = &mut self.messages;
        self.incoming.pass(bytes, |kind, flags, length| match kind {
            DATA if length > 0 => {
                *messages += u64::from(length);
                earned = earned.saturating_add(EARNED_PER_DATA_FRAME + length / DATA_BYTES_PER_CREDIT);
            }
            DATA if flags & END_STREAM != 0 => {}
            HEADERS => {}
            _ => spent += 1,
        });
        self.left.add(earned.into(), RATE);
        if spent == 0 {
            return true;
        }
        let (now, spent) = (Instant::now(), f64::from(spent));
        let left = self.left.level(RATE, now);
        self.left.take(spent.min(left), RATE, now);
        spent <= left
    }

    /// Bytes of messages in frames whose headers arrived since the last call.
    pub(crate) fn take_messages(&mut self) -> u64 {
        std::mem::take(&mut self.messages)
    }

    /// Counts sent bytes.
    pub(crate) fn sent(&mut self, bytes: &[u8]) {
        let mut earned = 0_u32;
        self.outgoing.pass(bytes, |kind, flags, length| match kind {
            DATA if length > 0 => {
                earned = earned.saturating_add(EARNED_PER_DATA_FRAME + length / DATA_BYTES_PER_CREDIT);
            }
            // The peer acknowledges these. Its acknowledged frames earn it nothing.
            SETTINGS | PING if flags & ACK == 0 => earned += 1,
            _ => {}
        });
        self.left.add(earned.into(), RATE);
    }

    /// Returns whether the sent bytes end with a frame.
    pub(crate) fn is_between_frames(&self) -> bool {
        (self.outgoing.seen, self.outgoing.before) == (0, 0)
    }
}

impl FrameScanner {
    /// Calls `frame` with type, flags and length of each frame whose header ends in these bytes.
    fn pass(&mut self, mut bytes: &[u8], mut frame: impl FnMut(u8, u8, u32)) {
        while self.before < bytes.len() {
            bytes = &bytes[self.before..];
            self.before = 0;
            let n = bytes.len().min(FRAME_HEADER_BYTES - self.seen);
            self.header[self.seen..self.seen + n].copy_from_slice(&bytes[..n]);
            self.seen += n;
            bytes = &bytes[n..];
            if self.seen == FRAME_HEADER_BYTES {
                let [a, b, c, kind, flags, ..] = self.header;
                let length = u32::from_be_bytes([0, a, b, c]);
                (self.seen, self.before) = (0, length as usize);
                frame(kind, flags, length);
            }
        }
        self.before -= bytes.len();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    const WINDOW_UPDATE: u8 = 8;

    fn frame(kind: u8, flags: u8, length: u32) -> Vec<u8> {
        let mut bytes = length.to_be_bytes()[1..].to_vec();
        bytes.extend([kind, flags, 0, 0, 0, 1]);
        bytes.resize(FRAME_HEADER_BYTES + length as usize, 0xff);
        bytes
    }

    /// Number of these frames that are accepted.
    fn admitted(allowance: &mut Allowance, kind: u8, length: u32) -> u32 {
        let bytes = frame(kind, 0, length);
        (0..10_000).find(|_| !allowance.received(&bytes)).unwrap()
    }

    #[test]
    fn frames_are_found_however_the_bytes_are_cut() {
        let kinds = [(SETTINGS, 0), (PING, 8), (DATA, 70_000), (0xfa, 3), (DATA, 0), (HEADERS, 100)];
        let mut bytes = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n".to_vec();
        for (kind, length) in kinds {
            bytes.extend(frame(kind, 7, length));
        }
        for most in [1, 2, 8, 9, 10, 1000, bytes.len()] {
            let mut frames = FrameScanner { before: 24, ..FrameScanner::default() };
            let mut found = Vec::new();
            for part in bytes.chunks(most) {
                frames.pass(part, |kind, flags, length| {
                    assert_eq!(flags, 7);
                    found.push((kind, length));
                });
            }
            assert_eq!(found, kinds);
            assert_eq!((frames.seen, frames.before), (0, 0));
        }
    }

    #[test]
    fn control_frames_alone_are_soon_too_many() {
        for (kind, length) in
            [(2, 5), (3, 4), (SETTINGS, 0), (PING, 8), (WINDOW_UPDATE, 4), (0xfa, 0), (DATA, 0)]
        {
            let admitted = admitted(&mut Allowance::new(0), kind, length);
            assert!((768..1000).contains(&admitted), "{admitted} of type {kind}");
        }
    }

    #[test]
    fn an_acknowledgement_earns_no_further_frame() {
        for (kind, length) in [(SETTINGS, 0), (PING, 8)] {
            let mut allowance = Allowance::new(0);
            let admitted = (0..10_000).find(|_| {
                allowance.sent(&frame(kind, ACK, length));
                !allowance.received(&frame(kind, 0, length))
            });
            assert!(admitted.is_some_and(|admitted| admitted < 1000), "{admitted:?} of type {kind}");
            // Acknowledgements of the server's frames are free.
            let mut allowance = Allowance::new(0);
            for _ in 0..10_000 {
                allowance.sent(&frame(kind, 0, length));
                assert!(allowance.received(&frame(kind, ACK, length)));
            }
        }
    }

    #[test]
    fn data_earns_an_allowance_in_both_directions() {
        let mut allowance = Allowance::new(0);
        for _ in 0..10_000 {
            // A receipt; its client updates both windows, measures the round trip, and answers nothing else.
            allowance.sent(&frame(DATA, 0, 60));
            (0..3).for_each(|_| assert!(allowance.received(&frame(WINDOW_UPDATE, 0, 4))));
        }
        for _ in 0..100 {
            // Values; their client updates both windows for each 4 KiB.
            allowance.sent(&frame(DATA, 0, 16 << 10));
            (0..8).for_each(|_| assert!(allowance.received(&frame(WINDOW_UPDATE, 0, 4))));
        }
        for _ in 0..10_000 {
            assert!(allowance.received(&frame(DATA, 0, 10)) && allowance.received(&frame(PING, 0, 8)));
            assert!(
                allowance.received(&frame(DATA, END_STREAM, 0)) && allowance.received(&frame(HEADERS, 0, 9))
            );
        }
        assert!(admitted(&mut allowance, PING, 8) < 1000, "the earnings are bounded");
    }

    #[test]
    fn time_earns_enough_for_keep_alive() {
        let mut allowance = Allowance::new(0);
        let begin = Instant::now();
        for second in 1..100 {
            assert!(allowance.received(&[frame(PING, 0, 8), frame(PING, 1, 8)].concat()));
            let now = begin + second * Duration::from_secs(1);
            let left = allowance.left.level(RATE, now);
            allowance.left.take((left - 2.0).max(0.0), RATE, now);
        }
        assert_eq!(allowance.left.level(RATE, begin + Duration::from_hours(1)), RATE.burst);
        assert!(admitted(&mut allowance, PING, 8) < 1000);
    }

    #[test]
    fn a_goaway_is_sent_between_frames_alone() {
        let mut allowance = Allowance::new(24);
        let bytes = frame(DATA, 0, 100);
        assert!(allowance.is_between_frames());
        for cut in [1, 9, 50] {
            allowance.sent(&bytes[..cut]);
            assert!(!allowance.is_between_frames());
            allowance.sent(&bytes[cut..]);
            assert!(allowance.is_between_frames());
        }
    }
}
