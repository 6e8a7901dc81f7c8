//! Incarnations whose sessions have ended. The slices no longer remember their pushes, so a shard refuses
//! them.

use serde::de::Error as _;
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use std::collections::VecDeque;
use std::fmt::Write as _;

/// Most incarnations that a catalog lists, whatever its events say.
const MAX_LISTED: usize = 1_000_000;
/// Hex digits of an incarnation and of its end.
const ENTRY_DIGITS: usize = 24;
const CLIENT_DIGITS: usize = 16;

/// Incarnations and the ends of their sessions in seconds since 1970, the oldest first. A manifest lists them
/// as one text of hex digits.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Ended(VecDeque<(u64, u32)>);

impl Ended {
    /// Adds an incarnation, and keeps the newest `remembered`.
    pub(super) fn add(&mut self, client: u64, at: u32, remembered: u32) {
        self.0.push_back((client, at));
        let surplus = self.0.len().saturating_sub((remembered as usize).min(MAX_LISTED));
        self.0.drain(..surplus);
    }

    /// Joins the lists of several shards; an incarnation that several list counts once.
    pub(crate) fn join<'a>(lists: impl Iterator<Item = &'a Self>) -> Self {
        let mut all: Vec<_> =
            lists.flat_map(|list| list.0.iter().map(|(client, at)| (*at, *client))).collect();
        all.sort_unstable();
        let mut seen = std::collections::HashSet::new();
        let mut newest: VecDeque<_> = all
            .into_iter()
            .rev()
            .filter(|(_, client)| seen.insert(*client))
            .take(MAX_LISTED)
            .map(|(at, client)| (client, at))
            .collect();
        newest.make_contiguous().reverse();
        Self(newest)
    }

    /// Incarnations and the ends of their sessions, the oldest first.
    pub fn iter(&self) -> impl DoubleEndedIterator<Item = (u64, u32)> + '_ {
        self.0.iter().copied()
    }

    /// Returns whether no incarnation is listed.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    fn parse(text: &str) -> Option<Self> {
        let (entries, rest) = text.as_bytes().as_chunks::<ENTRY_DIGITS>();
        let entry = |entry: &[u8; ENTRY_DIGITS]| {
            let (client, at) = std::str::from_utf8(entry).ok()?.split_at_checked(CLIENT_DIGITS)?;
            Some((u64::from_str_radix(client, 16).ok()?, u32::from_str_radix(at, 16).ok()?))
        };
        if !rest.is_empty() || entries.len() > MAX_LISTED {
            return None;
        }
        entries.iter().map(entry).collect::<Option<_>>().map(Self)
    }
}

impl Serialize for Ended {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut text = String::with_capacity(ENTRY_DIGITS * self.0.len());
        for (client, at) in &self.0 {
            let _ = write!(text, "{client:016x}{at:08x}");
        }
        serializer.serialize_str(&text)
    }
}

impl<'de> Deserialize<'de> for Ended {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = String::deserialize(deserializer)?;
        Self::parse(&text).ok_or_else(|| D::Error::custom("not a list of ended incarnations"))
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn the_newest_are_kept_and_survive_their_text() {
        let mut ended = Ended::default();
        assert_eq!(serde_json::to_string(&ended).unwrap(), "\"\"");
        for client in 1..=5 {
            ended.add(client, 7 + client as u32, 3);
        }
        ended.add(u64::MAX, u32::MAX, 4);
        let listed = [(3, 10), (4, 11), (5, 12), (u64::MAX, u32::MAX)];
        assert_eq!(ended.iter().collect::<Vec<_>>(), listed);
        let text = serde_json::to_string(&ended).unwrap();
        assert_eq!(text.len(), 2 + 4 * ENTRY_DIGITS);
        assert_eq!(serde_json::from_str::<Ended>(&text).unwrap(), ended);
        for bad in [&text[..text.len() - 3], "\"x\"", "\"zzzzzzzzzzzzzzzzzzzzzzzz\"", "[]"] {
            assert!(serde_json::from_str::<Ended>(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn joined_lists_name_each_incarnation_once() {
        let list = |entries: &[(u64, u32)]| Ended(entries.iter().copied().collect());
        let joined = Ended::join([list(&[(1, 5), (2, 9)]), list(&[(3, 1), (1, 6)])].iter());
        assert_eq!(joined, list(&[(3, 1), (1, 6), (2, 9)]));
    }
}
