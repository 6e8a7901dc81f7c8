//! Names of the objects of a history. A name has what its bytes must be, so an object never changes.

use crate::tools::copy::described::{Described, Part};

/// A segment of the log that is written no more.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Sealed {
    /// Its number.
    pub number: u64,
    /// The segment that continues the log; 0: the log could not be written, and goes on with a snapshot.
    pub next: u64,
    /// Bytes of its frames.
    pub bytes: u64,
    /// Their CRC-32C.
    pub crc32c: u32,
    /// When it was written to last, in milliseconds since 1970.
    pub time: u64,
}

/// A snapshot of a history: the folder of its files.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CopiedSnapshot {
    /// Its number.
    pub number: u64,
    /// The segment from which the log is replayed after it.
    pub log: u64,
    /// CRC-32C of its manifest, which has the digests of the other files.
    pub manifest_crc32c: u32,
}

/// A number in a name, without signs and leading blanks.
fn number<T: std::str::FromStr>(digits: &str) -> Option<T> {
    digits.bytes().all(|byte| byte.is_ascii_digit()).then(|| digits.parse().ok()).flatten()
}

fn crc(digits: &str) -> Option<u32> {
    let is_hex = digits.bytes().all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f'));
    (is_hex && digits.len() == 8).then(|| u32::from_str_radix(digits, 16).ok()).flatten()
}

/// Leaves room for a next number, as for files.
fn is_number(number: u64) -> bool {
    (1..1 << 62).contains(&number)
}

impl Sealed {
    /// Its name. Names sort as the segments do.
    pub fn name(&self) -> String {
        let Self { number, next, bytes, crc32c, time } = self;
        format!("log-{number:08}-{next:08}-{bytes}-{crc32c:08x}-{time}")
    }

    /// The segment of a name; `None`: it is no segment's.
    pub fn parse(name: &str) -> Option<Self> {
        let parts: Vec<_> = name.strip_prefix("log-")?.split('-').collect();
        let [own, next, bytes, crc32c, time] = parts.as_slice() else { return None };
        let sealed = Self {
            number: number(own).filter(|own| is_number(*own))?,
            next: number(next)?,
            bytes: number(bytes)?,
            crc32c: crc(crc32c)?,
            time: number(time)?,
        };
        let goes_on = sealed.next == 0 || (sealed.next > sealed.number && is_number(sealed.next));
        (goes_on && sealed.name() == name).then_some(sealed)
    }

    /// What its object must be.
    pub fn part(&self) -> Part {
        Part { name: "log", bytes: self.bytes, crc32c: self.crc32c }
    }
}

impl CopiedSnapshot {
    /// The snapshot of a manifest.
    pub fn of(described: &Described) -> Self {
        let (number, log) = (described.number(), described.log().segment);
        Self { number, log, manifest_crc32c: described.crc32c() }
    }

    /// The name of its folder. Names sort as the snapshots do.
    pub fn name(&self) -> String {
        let Self { number, log, manifest_crc32c } = self;
        format!("generation-{number:08}-{log:08}-{manifest_crc32c:08x}")
    }

    /// The snapshot of a folder's name; `None`: it is no snapshot's.
    pub fn parse(name: &str) -> Option<Self> {
        let parts: Vec<_> = name.strip_prefix("generation-")?.split('-').collect();
        let [own, log, manifest_crc32c] = parts.as_slice() else { return None };
        let (own, log) = (number(own)?, number(log)?);
        let copied = Self { number: own, log, manifest_crc32c: crc(manifest_crc32c)? };
        (is_number(own) && is_number(log) && copied.name() == name).then_some(copied)
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn names_say_what_the_bytes_must_be() {
        let sealed = Sealed { number: 7, next: 9, bytes: 1 << 40, crc32c: 0xAB, time: 1_790_000_000_123 };
        assert_eq!(Sealed::parse(&sealed.name()), Some(sealed.clone()));
        let broken = Sealed { next: 0, ..sealed.clone() };
        assert_eq!(Sealed::parse(&broken.name()), Some(broken));
        let copied = CopiedSnapshot { number: 123_456_789, log: 8, manifest_crc32c: 1 };
        assert_eq!(CopiedSnapshot::parse(&copied.name()), Some(copied.clone()));
        let (one, other) = (sealed.name(), copied.name());
        let wrong = [
            String::new(),
            "log-00000007".to_owned(),
            one.replace("-00000009-", "-00000007-"),
            one.replace("-000000ab-", "-000000AB-"),
            one.replace("00000007", "7"),
            one.replace("00000007", "00000000"),
            one.replace("00000007", "9999999999999999999"),
            one.replace("-1099511627776-", "-+1-"),
            format!("{one}-"),
            format!("{one}.tmp"),
            other.replace("00000008", "00000000"),
            other.replace("generation-", "generation--"),
            format!("{other}0"),
        ];
        for name in wrong {
            assert_eq!((Sealed::parse(&name), CopiedSnapshot::parse(&name)), (None, None), "{name}");
        }
    }
}
