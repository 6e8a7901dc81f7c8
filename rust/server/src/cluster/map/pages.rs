//! Pages of the map: tensors in the order of names, as many as a message takes.

use super::{Map, MapEntry};
use crate::auth::scope::{self, Scope};
use fastps_proto::v1 as pb;
use prost::Message;
use std::cmp::Reverse;
use std::collections::{BTreeSet, BinaryHeap, btree_map};
use std::ops::Bound;
use std::sync::Arc;

/// Default number of entries of a page.
const MAX_PAGE_ENTRIES: usize = 1000;
/// Names that one page looks at: of those asked for, some may not exist.
const MAX_PAGE_NAMES: u64 = 10_000;
/// A page ends after the entry that passes this many bytes.
const MAX_PAGE_BYTES: usize = 1 << 20;
/// Message bytes of a tensor listed on a shard, beside its name.
const LISTED_BYTES: usize = 32;

impl Map {
    /// One page of tensors within `scope` in the order of names, and the name to continue after, if there is
    /// more: of a tensor within `scope`, or one of `names`. Reads only the entries asked for.
    pub(crate) fn page(
        &mut self,
        names: &[String],
        after: &str,
        page_size: usize,
        scope: &Scope,
    ) -> (Vec<pb::MapEntry>, String) {
        let limit = if page_size == 0 { MAX_PAGE_ENTRIES } else { page_size.min(MAX_PAGE_ENTRIES) };
        let mut touched = 0;
        let page = if names.is_empty() {
            fill(self.within(scope, after).map(|(name, entry)| (name, Some(entry))), limit, &mut touched)
        } else {
            let wanted: BTreeSet<_> = names.iter().map(String::as_str).filter(|name| *name > after).collect();
            let entry = |name| self.entries.get(name).filter(|entry| entry.is_within(scope));
            fill(wanted.into_iter().map(|name| (name, entry(name))), limit, &mut touched)
        };
        self.touched += touched;
        page
    }

    /// The tensors within `scope` whose names are after `after`, in the order of names. Passes over no
    /// others, except tensors of the scope's groups and namespaces that mix namespaces.
    pub(super) fn within<'a>(
        &'a self,
        scope: &'a Scope,
        after: &str,
    ) -> Box<dyn Iterator<Item = (&'a str, &'a MapEntry)> + 'a> {
        let Scope::Only { groups, namespaces } = scope else {
            return Box::new(self.range(after).map(|(name, entry)| (&**name, entry)));
        };
        let from = bound(after);
        let of_group = |group: &Arc<str>| -> Option<Names<'a>> {
            let tensors = self.groups.tensors(group)?.range::<str, _>((from, Bound::Unbounded));
            Some(Box::new(tensors.map(|name| &**name)))
        };
        let of_namespace = |namespace: &Arc<str>| -> Names<'a> {
            let prefix = scope::prefix(namespace);
            let first = if after >= &*prefix { from } else { Bound::Included(&*prefix) };
            let names = self.entries.range::<str, _>((first, Bound::Unbounded));
            Box::new(names.map(|(name, _)| &**name).take_while(move |name| name.starts_with(&prefix)))
        };
        let lists = groups.iter().filter_map(of_group).chain(namespaces.iter().map(of_namespace));
        let entries = &self.entries;
        let found = Merged::new(lists).filter_map(move |name| Some((name, entries.get(name)?)));
        Box::new(found.filter(move |(_, entry)| entry.is_within(scope)))
    }

    fn range(&self, after: &str) -> btree_map::Range<'_, Arc<str>, MapEntry> {
        self.entries.range::<str, _>((bound(after), Bound::Unbounded))
    }

    /// The tensors after a name that have slices on a shard, and the name to continue after, if there are
    /// more.
    pub(crate) fn listed_on(&mut self, shard: u32, after: &str) -> (Vec<pb::ListedTensor>, String) {
        let (mut listed, mut next, mut bytes, mut touched) = (Vec::new(), String::new(), 0, 0);
        for (name, entry) in self.range(after) {
            touched += 1;
            let slices = entry.shards().iter().filter(|one| **one == shard).count() as u64;
            if slices > 0 {
                bytes += name.len() + LISTED_BYTES;
                let (name, reservation) = (name.to_string(), entry.reservation);
                listed.push(pb::ListedTensor { name, reservation, slices });
            }
            if bytes >= MAX_PAGE_BYTES {
                next = name.to_string();
                break;
            }
        }
        self.touched += touched;
        (listed, next)
    }
}

/// Where the names after one begin.
fn bound(after: &str) -> Bound<&str> {
    if after.is_empty() { Bound::Unbounded } else { Bound::Excluded(after) }
}

/// Names in their order.
type Names<'a> = Box<dyn Iterator<Item = &'a str> + 'a>;

/// Several lists of names as one, in the order of names. No name is in two of them.
struct Merged<'a> {
    /// The next name of each list.
    next: BinaryHeap<Reverse<(&'a str, usize)>>,
    lists: Vec<Names<'a>>,
}

impl<'a> Merged<'a> {
    fn new(lists: impl Iterator<Item = Names<'a>>) -> Self {
        let mut lists: Vec<_> = lists.collect();
        let first = lists.iter_mut().enumerate();
        let next = first.filter_map(|(index, list)| Some(Reverse((list.next()?, index)))).collect();
        Self { next, lists }
    }
}

impl<'a> Iterator for Merged<'a> {
    type Item = &'a str;

    fn next(&mut self) -> Option<&'a str> {
        let Reverse((name, index)) = self.next.pop()?;
        self.next.extend(self.lists[index].next().map(|name| Reverse((name, index))));
        Some(name)
    }
}

/// Takes entries until the page is full, or until it has looked at many names.
fn fill<'a>(
    entries: impl Iterator<Item = (&'a str, Option<&'a MapEntry>)>,
    limit: usize,
    touched: &mut u64,
) -> (Vec<pb::MapEntry>, String) {
    let (mut page, mut bytes, mut last) = (Vec::new(), 0, "");
    for (name, entry) in entries {
        if *touched >= MAX_PAGE_NAMES {
            return (page, last.to_owned());
        }
        *touched += 1;
        let Some(entry) = entry else {
            last = name;
            continue;
        };
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
