//! What a bucket has of the history of a shard's directory.

use crate::backup::bucket::Bucket;
use fastps_core::error::{Error, Kind, Result};
use fastps_durable::copy::{CopiedSnapshot, MANIFEST_NAME, Sealed};
use futures_util::TryStreamExt;
use object_store::path::Path;
use std::collections::BTreeMap;

/// The objects of a history.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Listing {
    /// The sealed segments, by their numbers.
    pub(super) segments: BTreeMap<u64, Sealed>,
    /// The whole snapshots, by their numbers.
    pub(super) snapshots: BTreeMap<u64, Stored>,
    /// Snapshots without a manifest, by their numbers: a server has not completed them yet, or never will.
    pub(super) incomplete: BTreeMap<u64, Stored>,
}

/// A snapshot in a bucket.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Stored {
    pub(super) snapshot: CopiedSnapshot,
    /// Bytes of its objects.
    pub(super) bytes: u64,
    /// Its objects; the manifest, if there is one, is the first.
    pub(super) places: Vec<Path>,
}

impl Stored {
    fn add(&mut self, place: Path, bytes: u64) {
        self.bytes += bytes;
        self.places.push(place);
        if self.is_whole_by_last() {
            let last = self.places.len() - 1;
            self.places.swap(0, last);
        }
    }

    fn is_whole_by_last(&self) -> bool {
        self.places.last().is_some_and(is_manifest)
    }

    fn is_whole(&self) -> bool {
        self.places.first().is_some_and(is_manifest)
    }
}

fn is_manifest(place: &Path) -> bool {
    place.filename() == Some(MANIFEST_NAME)
}

impl Bucket {
    /// Folder of the history of a shard's directory.
    pub(super) fn history(&self, shard: u32, directory: &str) -> Path {
        self.prefix.clone().join(format!("history-{shard}")).join(directory)
    }

    /// Lists the history in such a folder. Fails if it has two different files of one number: they are of servers
    /// that did not follow each other.
    pub(super) async fn list_history(&self, home: &Path) -> Result<Listing> {
        let mut listing = Listing::default();
        let mut folders: BTreeMap<String, Stored> = BTreeMap::new();
        let mut objects = self.store.list(Some(home));
        let failed = |error| self.failed("list", home, &error);
        while let Some(object) = objects.try_next().await.map_err(failed)? {
            let parts: Vec<_> = object.location.prefix_match(home).into_iter().flatten().collect();
            match parts.as_slice() {
                [name] => {
                    let Some(sealed) = Sealed::parse(name.as_ref()) else { continue };
                    if let Some(other) = listing.segments.insert(sealed.number, sealed.clone()) {
                        return Err(self.two(home, &sealed.name(), &other.name()));
                    }
                }
                [folder, _] => {
                    let Some(snapshot) = CopiedSnapshot::parse(folder.as_ref()) else { continue };
                    let empty = || Stored { snapshot, bytes: 0, places: Vec::new() };
                    let stored = folders.entry(folder.as_ref().to_owned()).or_insert_with(empty);
                    stored.add(object.location.clone(), object.size);
                }
                _ => {}
            }
        }
        for (name, stored) in folders {
            let number = stored.snapshot.number;
            let of = if stored.is_whole() { &mut listing.snapshots } else { &mut listing.incomplete };
            if let Some(other) = of.insert(number, stored) {
                return Err(self.two(home, &name, &other.snapshot.name()));
            }
        }
        Ok(listing)
    }

    fn two(&self, home: &Path, one: &str, other: &str) -> Error {
        let message = format!(
            "{} has two different files of one number, of servers that did not follow each other: remove those of one",
            self.name(home)
        );
        Error::new(Kind::Config, message).expected("one file of each number", format!("{other} and {one}"))
    }
}
