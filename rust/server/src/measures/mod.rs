//! Measurements of a shard: staleness, times of answers, bytes and refusals.
//!
//! The shard's thread counts them with relaxed additions, without a lock and without memory; the web listener
//! reads them.

mod histogram;

use fastps_core::codec::CodecId;
use fastps_core::error::Kind;
use fastps_core::frame::Applied;
use fastps_proto::v1 as pb;
use fastps_transport::Medium;
use fastps_transport::convert::{KIND_NAMES, kind_name};
pub(crate) use histogram::{Histogram, Observed};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

/// Upper bounds of staleness, in changes by others.
const STALENESS: [u64; 12] = [0, 1, 2, 4, 8, 16, 32, 64, 128, 256, 1024, 4096];
/// Upper bounds of the time to an answer, in nanoseconds: 50 us to 10 s.
const NANOSECONDS: [u64; 9] = [
    50_000,
    200_000,
    1_000_000,
    5_000_000,
    20_000_000,
    100_000_000,
    500_000_000,
    2_000_000_000,
    10_000_000_000,
];

/// The kinds of requests by their number on the wire. The first stands for frames that are no request.
const REQUESTS: [&str; 11] = [
    "other",
    "gradient",
    "assign",
    "pull",
    "pull_state",
    "assign_state",
    "resolve",
    "delta",
    "vector",
    "pull_version",
    "portion",
];
const CODECS: usize = CodecId::ALL.len() + 1;

/// A request that was read, until it is answered.
#[derive(Clone, Copy, Debug)]
pub(crate) struct OpenRequest {
    kind: usize,
    pub(crate) at: Instant,
}

impl OpenRequest {
    /// A frame that was read now.
    pub(crate) fn now(frame: &pb::Frame) -> Self {
        let kind = frame.header.as_ref().map_or(0, |header| header.kind as usize);
        Self { kind: if kind < REQUESTS.len() { kind } else { 0 }, at: Instant::now() }
    }
}

/// Bytes of payloads by medium and codec.
#[derive(Debug, Default)]
pub(crate) struct Traffic([[AtomicU64; CODECS]; Medium::ALL.len()]);

impl Traffic {
    fn add(&self, medium: Medium, codec: usize, bytes: usize) {
        self.0[medium as usize][codec].fetch_add(bytes as u64, Ordering::Relaxed);
    }

    /// Codec and medium with the bytes, if there are any. Payloads without a codec are programs on vectors.
    pub(crate) fn counts(&self) -> Vec<(&'static str, &'static str, u64)> {
        let codec = |number| CodecId::by_number(number as i32).map_or("none", CodecId::name);
        let of_medium = |medium: Medium| {
            let counts = self.0[medium as usize].iter().map(|bytes| bytes.load(Ordering::Relaxed));
            counts.enumerate().map(move |(number, bytes)| (codec(number), medium.name(), bytes))
        };
        Medium::ALL.into_iter().flat_map(of_medium).filter(|(.., bytes)| *bytes > 0).collect()
    }
}

/// The measurements.
#[derive(Debug)]
pub(crate) struct Measures {
    /// Of applied pushes whose base is known, per slice.
    staleness: Histogram<{ STALENESS.len() }>,
    answers: [Histogram<{ NANOSECONDS.len() }>; REQUESTS.len()],
    received: Traffic,
    sent: Traffic,
    refusals: [AtomicU64; KIND_NAMES.len()],
}

impl Default for Measures {
    fn default() -> Self {
        Self {
            staleness: Histogram::new(&STALENESS),
            answers: std::array::from_fn(|_| Histogram::new(&NANOSECONDS)),
            received: Traffic::default(),
            sent: Traffic::default(),
            refusals: std::array::from_fn(|_| AtomicU64::new(0)),
        }
    }
}

impl Measures {
    /// Counts the payload of a frame that was read.
    pub(crate) fn received(&self, frame: &pb::Frame, medium: Medium) {
        if frame.payload.is_empty() {
            return;
        }
        let codec = frame.header.as_ref().map_or(0, |header| header.codec as usize);
        self.received.add(medium, if codec < CODECS { codec } else { 0 }, frame.payload.len());
    }

    /// Counts values that are sent.
    pub(crate) fn sent(&self, codec: CodecId, bytes: usize, medium: Medium) {
        self.sent.add(medium, codec as usize, bytes);
    }

    /// Counts a push that a slice applied.
    pub(crate) fn applied(&self, applied: &Applied) {
        if let Some(staleness) = applied.staleness {
            self.staleness.observe(staleness);
        }
    }

    /// Counts a request that is answered now.
    pub(crate) fn answered(&self, asked: OpenRequest) {
        self.answers[asked.kind].observe(asked.at.elapsed().as_nanos() as u64);
    }

    /// Counts a refusal.
    pub(crate) fn refused(&self, kind: Kind) {
        let name = kind_name(kind);
        if let Some(at) = KIND_NAMES.iter().position(|one| *one == name) {
            self.refusals[at].fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Staleness of applied pushes.
    pub(crate) fn staleness(&self) -> Observed {
        self.staleness.observed()
    }

    /// Nanoseconds from a frame to its answer, by kind of request. Kinds that no client sends are left out.
    pub(crate) fn answers(&self) -> impl Iterator<Item = (&'static str, Observed)> {
        let all = REQUESTS.into_iter().zip(self.answers.iter().map(Histogram::observed));
        all.filter(|(kind, observed)| !matches!(*kind, "other" | "delta") || observed.count() > 0)
    }

    /// Bytes of payloads received, and of values sent.
    pub(crate) fn traffic(&self) -> [&Traffic; 2] {
        [&self.received, &self.sent]
    }

    /// Refusals by kind.
    pub(crate) fn refusals(&self) -> impl Iterator<Item = (&'static str, u64)> {
        KIND_NAMES.into_iter().zip(self.refusals.iter().map(|count| count.load(Ordering::Relaxed)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kinds_and_codecs_are_those_of_the_wire() {
        for (number, name) in REQUESTS.iter().enumerate().skip(1) {
            let kind = pb::Kind::try_from(number as i32).unwrap();
            assert_eq!(kind.as_str_name(), format!("KIND_{}", name.to_ascii_uppercase()));
        }
        assert!(CodecId::ALL.iter().all(|codec| (*codec as usize) < CODECS));
    }

    #[test]
    fn frames_of_unknown_kind_and_codec_are_counted() {
        let measures = Measures::default();
        for (kind, codec) in [(1, 3), (99, 99), (-1, -1)] {
            let header = pb::Header { kind, codec, ..pb::Header::default() };
            let frame = pb::Frame { header: Some(header), payload: vec![0; 10].into() };
            measures.received(&frame, Medium::Tls);
            measures.answered(OpenRequest::now(&frame));
        }
        assert_eq!(measures.traffic()[0].counts(), [("none", "tls", 20), ("Int8", "tls", 10)]);
        let counted: Vec<_> = measures.answers().filter(|(_, observed)| observed.count() > 0).collect();
        assert_eq!(
            counted.iter().map(|(kind, o)| (*kind, o.count())).collect::<Vec<_>>(),
            [("other", 2), ("gradient", 1)]
        );
        measures.refused(Kind::StalePush);
        assert!(measures.refusals().eq(KIND_NAMES.map(|name| (name, u64::from(name == "stale_push")))));
    }
}
