//! The token file: one principal a line, with the SHA-256 of its token and never the token itself.
//!
//! ```text
//! # name  role    groups or namespaces  SHA-256 of the token  options
//! alice   worker  a,b,namespace:n       3f5a...               expires=2027-01-31 frames/s=500 bytes/s=100MiB
//! ops     admin   *                     90c1...
//! ```

use crate::auth::principal::{Limits, Principal};
use crate::auth::principal_uri::check_name;
use crate::human::parse_bytes;
use fastps_core::error::{Error, Kind, Result};
use fastps_core::text::is_hidden;
use fastps_durable::SecretHash;
use fastps_transport::private_file;
use fastps_transport::token::{PREFIX, Token};
use std::collections::HashMap;
use std::collections::hash_map::Entry as Slot;
use std::fmt;
use std::path::Path;
use time::format_description::well_known::Rfc3339;
use time::{Date, Month, OffsetDateTime, UtcDateTime};

/// Most lines of a file.
const MAX_LINES: usize = 10_000;
/// Longest file, in bytes.
const MAX_BYTES: u64 = 16 << 20;
const HASH_DIGITS: usize = 64;

/// A principal and the hash of its token.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Entry {
    /// Its name, role, scope and budget.
    pub principal: Principal,
    /// The SHA-256 of its token.
    pub hash: SecretHash,
    /// When the token ends, in seconds since 1970; `None`: never.
    pub expires: Option<u64>,
}

/// The principals of a file, by the hash of their tokens.
#[derive(Clone, Debug, Default)]
pub struct TokenFile {
    entries: Vec<Entry>,
    /// Index by the first bytes of the hash, which say nothing about the token. The rest is compared in
    /// constant time.
    by_hash: HashMap<[u8; 8], usize>,
}

impl TokenFile {
    /// Reads a file that only its owner can read.
    pub fn read(file: &Path) -> Result<Self> {
        let text = private_file::read(file, MAX_BYTES)?;
        Self::parse(&text).map_err(|mut error| {
            error.message = format!("{}: {}", file.display(), error.message);
            error
        })
    }

    /// Reads the text of a file. An error begins with the number of the line.
    pub fn parse(text: &str) -> Result<Self> {
        let mut found = Self::default();
        let mut lines_of_names: HashMap<String, usize> = HashMap::new();
        let mut lines_of_hashes = Vec::new();
        for (index, line) in text.split_terminator('\n').enumerate() {
            let number = index + 1;
            let at = |mut error: Error| {
                error.message = format!("line {number}: {}", error.message);
                error
            };
            if number > MAX_LINES {
                return Err(at(bad("too many lines", format!("at most {MAX_LINES}"), "more")));
            }
            if line.ends_with('\r') {
                return Err(at(bad("the line ends as on Windows", "LF (run dos2unix)", "CR LF")));
            }
            let Some(entry) = Entry::parse(line).map_err(at)? else { continue };
            let name = entry.name();
            if let Some(first) = lines_of_names.insert(name.to_owned(), number) {
                return Err(at(bad(
                    format!("the name {name:?} is also in line {first}"),
                    "one line a name",
                    "two",
                )));
            }
            match found.by_hash.entry(index_of(&entry.hash)) {
                Slot::Occupied(slot) => {
                    let first: usize = lines_of_hashes[*slot.get()];
                    let message = format!("the hash is also in line {first}");
                    return Err(at(bad(message, "a token for each principal", "one for two")));
                }
                Slot::Vacant(slot) => slot.insert(found.entries.len()),
            };
            found.entries.push(entry);
            lines_of_hashes.push(number);
        }
        Ok(found)
    }

    /// The principal of a token, unless the token has expired at `now`, in seconds since 1970.
    pub fn find(&self, secret: &[u8], now: u64) -> Option<&Entry> {
        let hash = SecretHash::of(secret);
        let entry = &self.entries[*self.by_hash.get(&index_of(&hash))?];
        (entry.hash == hash && !entry.is_expired(now)).then_some(entry)
    }

    /// All principals, in the order of their lines.
    pub fn entries(&self) -> &[Entry] {
        &self.entries
    }
}

/// The hash of a token in the file.
pub fn hash(token: &Token) -> SecretHash {
    SecretHash::of(token.expose().as_bytes())
}

fn index_of(hash: &SecretHash) -> [u8; 8] {
    let bytes = hash.bytes();
    std::array::from_fn(|k| bytes[k])
}

impl Entry {
    /// Reads a line; `None` if it is empty or a comment.
    pub fn parse(line: &str) -> Result<Option<Self>> {
        if line.trim_start().starts_with('#') {
            return Ok(None);
        }
        if let Some(odd) = line.chars().find(|c| is_hidden(*c) && *c != '\t') {
            return Err(bad("a control character", "printable text", format!("{odd:?}")));
        }
        let columns: Vec<_> = line.split_ascii_whitespace().collect();
        let [name, role, scope, hash, options @ ..] = columns.as_slice() else {
            if columns.is_empty() {
                return Ok(None);
            }
            let form = "NAME ROLE GROUPS-OR-NAMESPACES HASH";
            return Err(bad("a column is missing", form, format!("{} columns", columns.len())));
        };
        if [*name, *role, *scope].into_iter().chain(options.iter().copied()).any(|one| one.contains(PREFIX)) {
            return Err(bad("a token stands in the file", "its SHA-256 (fastps token new)", "a token"));
        }
        check_name(name)?;
        let principal = Principal::new(*name, role.parse()?, scope.parse()?);
        let mut entry = Self { principal, hash: parse_hash(hash)?, expires: None };
        for option in options {
            entry.set(option)?;
        }
        Ok(Some(entry))
    }

    fn set(&mut self, option: &str) -> Result<()> {
        let known = "expires=DATE, frames/s=N, bytes/s=SIZE or memory=SIZE";
        let unknown = || bad("unknown option", known, format!("{option:?}"));
        let (key, value) = option.split_once('=').ok_or_else(unknown)?;
        let size =
            || parse_bytes(value).map_err(|error| bad(format!("invalid {key}"), error, format!("{value:?}")));
        let slot = match key {
            "expires" => &mut self.expires,
            "frames/s" => &mut self.principal.limits.frames_per_second,
            "bytes/s" => &mut self.principal.limits.bytes_per_second,
            "memory" => &mut self.principal.limits.memory,
            _ => return Err(unknown()),
        };
        let number = match key {
            "expires" => parse_time(value)?,
            "frames/s" => value
                .parse()
                .ok()
                .filter(|frames| *frames > 0)
                .ok_or_else(|| bad("invalid frames/s", "a whole number above 0", format!("{value:?}")))?,
            _ => size()?,
        };
        if slot.replace(number).is_some() {
            return Err(bad(format!("{key} is given twice"), "once", format!("{option:?}")));
        }
        Ok(())
    }

    /// The name of the principal.
    pub fn name(&self) -> &str {
        self.principal.name.as_deref().unwrap_or_default()
    }

    /// Returns whether the token has expired at `now`, in seconds since 1970.
    pub fn is_expired(&self, now: u64) -> bool {
        self.expires.is_some_and(|end| end <= now)
    }
}

impl fmt::Display for Entry {
    /// The line of a file.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Principal { role, scope, limits, .. } = &self.principal;
        write!(f, "{} {role} {scope} ", self.name())?;
        self.hash.bytes().iter().try_for_each(|byte| write!(f, "{byte:02x}"))?;
        if let Some(end) = self.expires {
            write!(f, " expires={}", time_text(end))?;
        }
        let Limits { frames_per_second, bytes_per_second, memory } = *limits;
        for (key, limit) in
            [("frames/s", frames_per_second), ("bytes/s", bytes_per_second), ("memory", memory)]
        {
            if let Some(limit) = limit {
                write!(f, " {key}={limit}")?;
            }
        }
        Ok(())
    }
}

fn parse_hash(text: &str) -> Result<SecretHash> {
    if text.len() != HASH_DIGITS || !text.bytes().all(|byte| byte.is_ascii_hexdigit()) {
        let got = if text.starts_with(PREFIX) {
            "a token (its SHA-256 belongs here; fastps token new writes it)".to_owned()
        } else {
            format!("{} characters", text.chars().count())
        };
        return Err(bad("invalid SHA-256 of a token", format!("{HASH_DIGITS} hexadecimal digits"), got));
    }
    let digit = |k: usize| char::from(text.as_bytes()[k]).to_digit(16).unwrap_or_default() as u8;
    let bytes: [u8; HASH_DIGITS / 2] = std::array::from_fn(|k| digit(2 * k) << 4 | digit(2 * k + 1));
    Ok(SecretHash::from(bytes))
}

/// Reads a date, whose first moment in UTC counts, or a date and time (RFC 3339). Seconds since 1970.
fn parse_time(text: &str) -> Result<u64> {
    let date = || {
        let mut parts = text.splitn(3, '-');
        let (year, month, day) = (parts.next()?, parts.next()?, parts.next()?);
        let fits = year.len() == 4 && month.len() == 2 && day.len() == 2;
        let month = Month::try_from(month.parse::<u8>().ok()?).ok()?;
        let date = Date::from_calendar_date(year.parse().ok()?, month, day.parse().ok()?).ok()?;
        fits.then(|| date.midnight().assume_utc())
    };
    let time = date().or_else(|| OffsetDateTime::parse(text, &Rfc3339).ok());
    let seconds = time.and_then(|time| u64::try_from(time.unix_timestamp()).ok());
    let form = "a date as 2027-01-31, or a time as 2027-01-31T12:00:00Z, after 1970";
    seconds.ok_or_else(|| bad("invalid time", form, format!("{text:?}")))
}

/// A time in seconds since 1970, as `parse_time` reads it: the date alone at its first moment.
pub fn time_text(seconds: u64) -> String {
    let time = i64::try_from(seconds).ok().and_then(|seconds| UtcDateTime::from_unix_timestamp(seconds).ok());
    let Some(time) = time else { return seconds.to_string() };
    let (year, month, day) = time.date().to_calendar_date();
    let date = format!("{year:04}-{:02}-{day:02}", u8::from(month));
    let (hour, minute, second) = time.as_hms();
    if (hour, minute, second) == (0, 0, 0) {
        date
    } else {
        format!("{date}T{hour:02}:{minute:02}:{second:02}Z")
    }
}

fn bad(message: impl Into<String>, expected: impl fmt::Display, got: impl fmt::Display) -> Error {
    Error::new(Kind::Config, message).expected(expected, got)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::auth::principal_uri;
    use crate::auth::role::Role;
    use proptest::collection;
    use proptest::prelude::*;
    use std::time::{Duration, Instant};

    fn hash(k: usize) -> String {
        SecretHash::of(format!("secret {k}").as_bytes()).bytes().map(|byte| format!("{byte:02x}")).concat()
    }

    #[test]
    fn a_line_has_all_its_columns() {
        let text = format!(
            "# who may\n\n  \nalice worker a,b,namespace:n {} expires=2027-01-31 frames/s=500 \
             bytes/s=1MiB memory=2GiB\n\tops\tadmin\t*\t{}\n",
            hash(0),
            hash(1)
        );
        let file = TokenFile::parse(&text).unwrap();
        let end = 1_801_353_600;
        let alice = file.find(b"secret 0", end - 1).unwrap();
        let limits =
            Limits { frames_per_second: Some(500), bytes_per_second: Some(1 << 20), memory: Some(2 << 30) };
        let principal = Principal::new("alice", Role::Worker, "a,b,namespace:n".parse().unwrap());
        assert_eq!((&alice.principal, alice.expires), (&Principal { limits, ..principal }, Some(end)));
        assert!(file.find(b"secret 0", end).is_none());
        assert_eq!(file.find(b"secret 1", u64::MAX).unwrap().principal.limits, Limits::default());
        assert!(file.find(b"secret 2", 0).is_none() && file.find(b"", 0).is_none());
        // A written file is read as the same.
        let again: Vec<_> = file.entries().iter().map(ToString::to_string).collect();
        let again = again.join("\n");
        assert_eq!(TokenFile::parse(&again).unwrap().entries(), file.entries());
        assert!(!format!("{file:?}").contains(&hash(0)[..16]));
    }

    #[test]
    fn bad_lines_are_refused() {
        let (h, other) = (hash(0), hash(1));
        let token = Token::draw().unwrap();
        let cases = [
            (format!("a worker * {h}\r\n"), "line 1: the line ends as on Windows"),
            (format!("a worker * {h}\n\na reader * {other}"), "line 3: the name \"a\" is also in line 1"),
            (format!("a worker * {h}\nb reader * {h}"), "line 2: the hash is also in line 1"),
            (
                format!("a wroker * {h}"),
                "line 1: unknown role: expected worker (one of reader, worker, admin, server), got \"wroker\"",
            ),
            (format!("a god * {h}"), "one of reader, worker, admin, server"),
            (format!("a worker * {}", &h[1..]), "expected 64 hexadecimal digits, got 63 characters"),
            (format!("a worker * {h}0"), "got 65 characters"),
            (format!("a {PREFIX}0123 * {h}"), "a token stands in the file"),
            (format!("a worker * {h} {PREFIX}0123"), "a token stands in the file"),
            (format!("a worker * {}x", &h[1..]), "invalid SHA-256"),
            (format!("a worker * {}", token.expose()), "got a token"),
            (format!("a worker {h}"), "expected NAME ROLE GROUPS-OR-NAMESPACES HASH, got 3 columns"),
            (format!("a worker a,,b {h}"), "groups or namespaces"),
            (format!("a/b worker * {h}"), "invalid name of a principal"),
            (format!("a worker * {h} expires=tomorrow"), "invalid time"),
            (format!("a worker * {h} expires=2027-02-30"), "invalid time"),
            (format!("a worker * {h} expires=2027-2-3"), "invalid time"),
            (format!("a worker * {h} expires=1969-01-01"), "invalid time"),
            (format!("a worker * {h} frames/s=0"), "a whole number above 0"),
            (format!("a worker * {h} frames/s=-1"), "a whole number above 0"),
            (format!("a worker * {h} bytes/s=many"), "invalid bytes/s"),
            (format!("a worker * {h} memory=0"), "invalid memory"),
            (format!("a worker * {h} memory=1GiB memory=2GiB"), "memory is given twice"),
            (format!("a worker * {h} colour=red"), "unknown option"),
            (format!("a worker * {h} red"), "unknown option"),
            (format!("a worker * {h}\0"), "control character"),
            ("\n".repeat(MAX_LINES + 1), "line 10001: too many lines"),
        ];
        for (text, says) in cases {
            let error = TokenFile::parse(&text).unwrap_err();
            assert!(error.kind == Kind::Config && error.to_string().contains(says), "{text}: {error}");
            assert!(!error.to_string().contains(token.expose()));
        }
    }

    #[test]
    fn times_are_read_as_they_are_written() {
        for (text, seconds) in [
            ("1970-01-01", 0),
            ("2027-01-31", 1_801_353_600),
            ("2027-01-31T12:30:01Z", 1_801_398_601),
            ("2027-01-31T12:30:01+02:00", 1_801_391_401),
        ] {
            assert_eq!(parse_time(text).unwrap(), seconds, "{text}");
            assert_eq!(parse_time(&time_text(seconds)).unwrap(), seconds);
        }
        assert_eq!(time_text(1_801_353_600), "2027-01-31");
    }

    #[test]
    fn many_principals_are_found_as_fast_as_one() {
        let lines = |count: usize| {
            (0..count).map(|k| format!("p{k} worker * {}", hash(k))).collect::<Vec<_>>().join("\n")
        };
        let (one, many) =
            (TokenFile::parse(&lines(1)).unwrap(), TokenFile::parse(&lines(MAX_LINES)).unwrap());
        for k in [0, 1, 5_000, MAX_LINES - 1] {
            assert_eq!(many.find(format!("secret {k}").as_bytes(), 0).unwrap().name(), format!("p{k}"));
        }
        let fastest = |file: &TokenFile| {
            let round = || {
                let start = Instant::now();
                (0..1000).for_each(|_| assert!(file.find(b"secret 0", 0).is_some()));
                start.elapsed()
            };
            (0..20).map(|_| round()).min().unwrap_or(Duration::ZERO)
        };
        let (one, many) = (fastest(&one), fastest(&many));
        assert!(many < one * 3, "{many:?} against {one:?}");
    }

    proptest! {
        #[test]
        fn whatever_is_read_is_written_the_same(lines in collection::vec(line(), 0..6)) {
            let text = lines.join("\n");
            match TokenFile::parse(&text) {
                Err(error) => prop_assert!(error.message.starts_with("line ")),
                Ok(read) => {
                    let written: Vec<_> = read.entries().iter().map(ToString::to_string).collect();
                    let written = written.join("\n");
                    let again = TokenFile::parse(&written).unwrap();
                    prop_assert_eq!(again.entries(), read.entries());
                }
            }
        }

        #[test]
        fn whatever_uri_is_read_is_written_the_same(uri in uri()) {
            if let Ok(read) = principal_uri::parse(&uri) {
                let name = read.name.as_deref().unwrap_or_default();
                let written = principal_uri::text(name, read.role, &read.scope).unwrap();
                prop_assert_eq!(principal_uri::parse(&written).unwrap(), read);
            }
        }
    }

    /// Lines that are nearly right, and any text.
    fn line() -> impl Strategy<Value = String> {
        let options =
            "( (expires=20[0-9]{2}-[01][0-9]-[0-3][0-9]|frames/s=[0-9]|memory=[0-9]{1,2}[kMG]?|x))?";
        let near =
            format!("[a-z]{{1,3}} (reader|server|wroker) (\\*|a|a,b|namespace:n) [0-9a-f]{{63,64}}{options}");
        prop_oneof![proptest::string::string_regex(&near).unwrap(), "#.*", "\\PC{0,60}"]
    }

    fn uri() -> impl Strategy<Value = String> {
        let near =
            "fastps://principal/[a-z ]{1,3}\\?role=(reader|admin|x)(&scope=([a,:%2C*]{1,9}|namespace:n))?";
        prop_oneof![near, "\\PC{0,60}"]
    }
}
