//! Pages of the map: tensors in the order of names, as many as a message takes.

use super::{Map, MapEntry};
use crate::auth::scope::Scope;
use fastps_proto::v1 as pb;
use prost::Message;
use std::collections::BTreeSet;
use std::ops::Bound;

/// Default number of entries of a page.
const MAX_PAGE_ENTRIES: usize = 1000;
/// A page ends after the entry that passes this many bytes.
const MAX_PAGE_BYTES: usize = 1 << 20;
/// Message bytes of a tensor listed on a shard, beside its name.
const LISTED_BYTES: usize = 32;

impl Map {
    /// One page of tensors within `scope` in the order of names, and the name to continue after, if there is
    /// more. Reads only the entries asked for.
    pub(crate) fn page(
        &mut self,
        names: &[String],
        after: &str,
        page_size: usize,
        scope: &Scope,
    ) -> (Vec<pb::MapEntry>, String) {
        let limit = if page_size == 0 { MAX_PAGE_ENTRIES } else { page_size.min(MAX_PAGE_ENTRIES) };
        if names.is_empty() {
            let from = if after.is_empty() { Bound::Unbounded } else { Bound::Excluded(after) };
            let all = self.entries.range::<str, _>((from, Bound::Unbounded));
            let all = all.map(|(name, entry)| (&**name, Some(entry).filter(|entry| entry.is_within(scope))));
            return fill(all, limit, &mut self.touched);
        }
        let wanted: BTreeSet<&str> = names.iter().map(String::as_str).filter(|name| *name > after).collect();
        let entry = |name| self.entries.get(name).filter(|entry| entry.is_within(scope));
        let found = wanted.into_iter().map(|name| (name, entry(name)));
        fill(found, limit, &mut self.touched)
    }

    /// The tensors after a name that have slices on a shard, and the name to continue after, if there are
    /// more.
    pub(crate) fn listed_on(&mut self, shard: u32, after: &str) -> (Vec<pb::ListedTensor>, String) {
        let from = if after.is_empty() { Bound::Unbounded } else { Bound::Excluded(after) };
        let (mut listed, mut bytes) = (Vec::new(), 0);
        for (name, entry) in self.entries.range::<str, _>((from, Bound::Unbounded)) {
            self.touched += 1;
            let slices = entry.shards().iter().filter(|one| **one == shard).count() as u64;
            if slices > 0 {
                bytes += name.len() + LISTED_BYTES;
                let (name, reservation) = (name.to_string(), entry.reservation);
                listed.push(pb::ListedTensor { name, reservation, slices });
            }
            if bytes >= MAX_PAGE_BYTES {
                return (listed, name.to_string());
            }
        }
        (listed, String::new())
    }
}

/// Takes entries until the page is full.
fn fill<'a>(
    entries: impl Iterator<Item = (&'a str, Option<&'a MapEntry>)>,
    limit: usize,
    touched: &mut u64,
) -> (Vec<pb::MapEntry>, String) {
    let (mut page, mut bytes, mut last) = (Vec::new(), 0, "");
    for (name, entry) in entries {
        *touched += 1;
        let Some(entry) = entry else { continue };
        if page.len() >= limit || bytes >= MAX_PAGE_BYTES {
            return (page, last.to_owned());
        }
        // A placement can reach 3 MiB: such an entry gets a separate page.
        let size = entry.wire.encoded_len();
        if !page.is_empty() && bytes + size > 2 * MAX_PAGE_BYTES {
            return (page, last.to_owned());
        }
        bytes += size;
        page.push(entry.wire.clone());
        last = name;
    }
    (page, String::new())
}
