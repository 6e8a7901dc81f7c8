//! The record `owner` of a shard: which server owns it, in which term, and where the history of each
//! earlier term ends. It changes only by compare-and-swap.

use crate::files::checksum::{with_checksum, without_checksum};
use crate::files::io::to_json;
use fastps_core::error::{Error, Kind, Result};
use serde::{Deserialize, Serialize};
use std::time::Duration;

/// The format that this version writes and reads.
const FORMAT: u32 = 1;
/// Most bytes of a record.
pub const MAX_RECORD_BYTES: u64 = 64 << 10;
/// Most bytes of an address in it.
const MAX_ADDRESS_BYTES: usize = 1024;
/// Most earlier terms in it. A snapshot ends the need for those before it.
const MAX_BASES: usize = 256;
/// The longest lease, so that no sum of times overflows.
const MAX_LEASE_MS: u64 = 24 * 60 * 60 * 1000;

/// A place in the log of a shard: all bytes before it are part of the history.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct LogPosition {
    /// Number of the segment.
    pub segment: u64,
    /// Bytes of the segment before the place.
    pub offset: u64,
}

/// What an owner may do.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Stage {
    /// It reads what the terms before it left, and answers nobody.
    Recovering,
    /// It serves the shard.
    Open,
    /// It has ended: the next owner need not wait.
    Released,
}

/// The file whose lock the owner holds. Another process that holds the lock of the same file knows that the
/// owner has ended.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct LockedFile {
    /// Identifier of the boot: locks do not outlive it.
    pub boot: String,
    /// Device of the file.
    pub device: u64,
    /// Its inode.
    pub inode: u64,
}

/// The newest term that served the shard.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Tip {
    /// The term; 0: none has served.
    pub term: u64,
    /// Incarnation of its server, which the files of its directory name, too.
    pub incarnation: u64,
    /// Its log is in the bucket up to here, without gaps.
    pub copied: LogPosition,
}

/// Where the history of a term ends, and where that of the next term that served begins.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Base {
    /// The older term. What it wrote after `end` does not exist.
    pub term: u64,
    /// The end of its history.
    pub end: LogPosition,
    /// The place in the next term's log that follows `end`.
    pub begin: LogPosition,
}

/// The record.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Record {
    /// Format of the record.
    pub format: u32,
    /// Identity of the cluster.
    pub cluster: u64,
    /// Index of the shard.
    pub shard: u32,
    /// Counts the owners. Greater than all before.
    pub term: u64,
    /// What the owner may do.
    pub stage: Stage,
    /// Where clients reach it.
    pub address: String,
    /// The owner's incarnation, which it draws at its start.
    pub incarnation: u64,
    /// When it took the shard by its own clock, in seconds since 1970, for people.
    #[serde(default)]
    pub since: u64,
    /// The file whose lock it holds, if it has a data directory.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub locked: Option<LockedFile>,
    /// Without a renewal, the owner stops answering after this time.
    pub lease_ms: u64,
    /// Random, and new in each body: equal bodies have equal `ETag`s.
    pub nonce: u64,
    /// Somebody has asked the owner to give the shard up.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub release: bool,
    /// The newest term that served.
    pub tip: Tip,
    /// The ends of the terms before it, the oldest first.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub bases: Vec<Base>,
}

impl Record {
    /// The lease that the owner keeps.
    pub fn lease(&self) -> Duration {
        Duration::from_millis(self.lease_ms)
    }

    /// Encodes it: one line of JSON, and a line with its checksum.
    pub fn text(&self) -> Result<Vec<u8>> {
        if self.bases.len() > MAX_BASES {
            let why = "too many servers have owned the shard since its last copied snapshot: take a snapshot";
            return Err(Error::new(Kind::Config, why)
                .shard(self.shard)
                .expected(format!("at most {MAX_BASES}"), self.bases.len()));
        }
        if self.address.len() > MAX_ADDRESS_BYTES {
            return Err(Error::new(Kind::Config, "the address of the shard is too long")
                .shard(self.shard)
                .expected(format!("at most {MAX_ADDRESS_BYTES} bytes"), self.address.len()));
        }
        Ok(with_checksum(to_json(self)?))
    }

    /// Parses and checks it. `place` appears in errors.
    pub fn parse(text: &[u8], place: &str) -> Result<Self> {
        /// A later format may change everything else.
        #[derive(Deserialize)]
        struct Format {
            format: u32,
        }
        let damaged =
            || Error::new(Kind::Internal, format!("{place} is damaged, or was not written by fastps"));
        let json = Some(text).filter(|text| text.len() as u64 <= MAX_RECORD_BYTES);
        let json = json.and_then(without_checksum).ok_or_else(damaged)?;
        let Format { format } = serde_json::from_slice(json).map_err(|_| damaged())?;
        if format != FORMAT {
            let message = format!("{place} is of another version of fastps: upgrade this one");
            return Err(Error::new(Kind::Config, message).expected(format!("format {FORMAT}"), format));
        }
        let record: Option<Self> = serde_json::from_slice(json).ok();
        record.filter(Self::is_sound).ok_or_else(damaged)
    }

    /// Terms ascend, and each begins where the one before it ends or later.
    fn is_sound(&self) -> bool {
        let ends = self.bases.iter().map(|base| (base.term, base.end, base.begin));
        let mut spans = ends.chain([(self.tip.term, self.tip.copied, self.tip.copied)]);
        let mut before = None;
        let ascend = spans.all(|(term, end, begin)| {
            let follows = before.is_none_or(|(older, start)| term > older && end >= start);
            before = Some((term, begin));
            follows && begin >= end
        });
        ascend
            && self.term > 0
            && self.tip.term <= self.term
            && self.bases.len() <= MAX_BASES
            && self.address.len() <= MAX_ADDRESS_BYTES
            && (1..=MAX_LEASE_MS).contains(&self.lease_ms)
    }

    /// The record that asks its owner to give the shard up. `nonce` must be new and random.
    pub fn asking_to_release(self, nonce: u64) -> Self {
        Self { nonce, release: true, ..self }
    }

    pub(super) const fn format() -> u32 {
        FORMAT
    }
}

#[cfg(test)]
pub(super) fn sample() -> Record {
    let at = |segment, offset| LogPosition { segment, offset };
    Record {
        format: FORMAT,
        cluster: 7,
        shard: 2,
        term: 5,
        stage: Stage::Open,
        address: "host-a:7070".to_owned(),
        incarnation: u64::MAX,
        since: 1_700_000_000,
        locked: Some(LockedFile { boot: "b".to_owned(), device: 1, inode: 2 }),
        lease_ms: 60_000,
        nonce: 9,
        release: false,
        tip: Tip { term: 5, incarnation: u64::MAX, copied: at(4, 100) },
        bases: vec![
            Base { term: 1, end: at(2, 50), begin: at(3, 0) },
            Base { term: 3, end: at(3, 10), begin: at(3, 10) },
        ],
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn a_record_is_read_back_and_no_other_bytes_are() {
        let record = sample();
        let text = record.text().unwrap();
        assert_eq!(Record::parse(&text, "here").unwrap(), record);
        for at in 0..text.len() {
            let mut flipped = text.clone();
            flipped[at] ^= 1;
            assert!(Record::parse(&flipped, "here").is_err(), "byte {at}");
            assert!(Record::parse(&text[..at], "here").is_err(), "{at} bytes");
        }
        let long = [text, vec![b' '; MAX_RECORD_BYTES as usize]].concat();
        let error = Record::parse(&long, "here").unwrap_err();
        assert!(error.message.contains("here is damaged"), "{error}");
    }

    #[test]
    fn a_record_of_another_version_says_so() {
        let text = with_checksum(br#"{"format": 2, "all": "else"}"#.to_vec());
        let error = Record::parse(&text, "here").unwrap_err();
        assert_eq!((error.kind, error.got.as_deref()), (Kind::Config, Some("2")), "{error}");
    }

    #[test]
    fn a_record_whose_parts_contradict_each_other_is_refused() {
        type Spoil = fn(&mut Record);
        let spoil: [(&str, Spoil); 8] = [
            ("no term", |record| record.term = 0),
            ("a tip after the term", |record| record.tip.term = 6),
            ("no lease", |record| record.lease_ms = 0),
            ("an endless lease", |record| record.lease_ms = u64::MAX),
            ("bases in another order", |record| record.bases.reverse()),
            ("a base of the present term", |record| record.bases[1].term = 5),
            ("a base that begins before its end", |record| record.bases[0].begin = LogPosition::default()),
            ("a copy that ends before its term begins", |record| record.tip.copied.segment = 0),
        ];
        for (what, spoil) in spoil {
            let mut record = sample();
            spoil(&mut record);
            assert!(Record::parse(&record.text().unwrap(), "here").is_err(), "{what}");
        }
    }

    #[test]
    fn a_record_that_would_be_too_long_is_not_written() {
        let mut record = sample();
        record.bases = vec![record.bases[0]; MAX_BASES + 1];
        assert!(record.text().is_err());
        let mut record = sample();
        record.address = "a".repeat(MAX_ADDRESS_BYTES + 1);
        assert!(record.text().is_err());
        record.address.truncate(MAX_ADDRESS_BYTES);
        record.bases = (0..MAX_BASES as u64)
            .map(|term| {
                let end = LogPosition { segment: u64::MAX / 4, offset: u64::MAX / 2 + term };
                Base { term: term + 1, end, begin: end }
            })
            .collect();
        (record.term, record.tip) = (
            u64::MAX,
            Tip { term: u64::MAX, incarnation: u64::MAX, copied: record.bases[MAX_BASES - 1].end },
        );
        let text = record.text().unwrap();
        assert!(text.len() as u64 <= MAX_RECORD_BYTES, "{}", text.len());
        assert_eq!(Record::parse(&text, "here").unwrap(), record);
    }
}
