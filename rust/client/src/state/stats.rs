//! A client's counters.

use bytes::Bytes;
use fastps_core::error::Result;
use fastps_core::frame::Applied;
use fastps_proto::v1 as pb;
use fastps_transport::convert;
use std::sync::atomic::{AtomicU64, Ordering};

#[derive(Debug, Default)]
pub(crate) struct Counters {
    pub(crate) pushes: AtomicU64,
    pub(crate) pulls: AtomicU64,
    pub(crate) bytes_pushed: AtomicU64,
    pub(crate) bytes_saved: AtomicU64,
    pub(crate) bytes_pulled: AtomicU64,
    pub(crate) frames_sent: AtomicU64,
    pub(crate) frames_resent: AtomicU64,
    pub(crate) duplicates: AtomicU64,
    pub(crate) in_doubt: AtomicU64,
    pub(crate) reconnects: AtomicU64,
    pub(crate) pushes_lost: AtomicU64,
}

pub(crate) fn count(counter: &AtomicU64, by: u64) {
    counter.fetch_add(by, Ordering::Relaxed);
}

/// Counts a frame that was passed to a connection.
pub(crate) fn sent(counters: &Counters, header: &pb::Header, bytes: usize, attempts: u32) {
    count(&counters.frames_sent, 1);
    if attempts > 1 {
        count(&counters.frames_resent, 1);
    } else if header.kind == pb::Kind::Gradient as i32 {
        count(&counters.bytes_pushed, bytes as u64);
        count(&counters.bytes_saved, convert::plain_len(header).saturating_sub(bytes as u64));
    }
}

/// Counts a frame that was answered without an error.
pub(crate) fn answered(counters: &Counters, applied: &Applied, identified: bool, values: Option<&Bytes>) {
    if identified && applied.duplicate {
        count(&counters.duplicates, 1);
    }
    if let Some(values) = values {
        count(&counters.bytes_pulled, values.len() as u64);
    }
}

/// Counts the answered parts of a message, and the bytes of their values.
pub(crate) fn parts_answered(
    counters: &Counters,
    outcomes: &[Result<Applied>],
    identified: bool,
    bytes: usize,
) {
    if identified {
        let duplicate = |outcome: &&Result<Applied>| outcome.as_ref().is_ok_and(|applied| applied.duplicate);
        count(&counters.duplicates, outcomes.iter().filter(duplicate).count() as u64);
    }
    count(&counters.bytes_pulled, bytes as u64);
}

impl Counters {
    pub(crate) fn list(&self) -> Vec<(String, u64)> {
        [
            ("pushes", &self.pushes),
            ("pulls", &self.pulls),
            ("bytes_pushed", &self.bytes_pushed),
            ("bytes_saved", &self.bytes_saved),
            ("bytes_pulled", &self.bytes_pulled),
            ("frames_sent", &self.frames_sent),
            ("frames_resent", &self.frames_resent),
            ("duplicates", &self.duplicates),
            ("in_doubt", &self.in_doubt),
            ("reconnects", &self.reconnects),
            ("pushes_lost", &self.pushes_lost),
        ]
        .map(|(name, counter)| (name.to_owned(), counter.load(Ordering::Relaxed)))
        .to_vec()
    }
}
