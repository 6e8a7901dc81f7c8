//! Copies a snapshot into a bucket: its files, its manifest, then `latest`. A copy that another server's
//! `latest` names is never overwritten.

use super::bucket::{Bucket, Sum, block};
use fastps_core::error::{Error, Kind, Result};
use fastps_core::failpoint::reach;
use fastps_durable::copy::{self, Held, Latest, MANIFEST_NAME, Part};
use futures_util::{StreamExt, TryStreamExt};
use object_store::path::Path;
use object_store::{ObjectMeta, ObjectStoreExt, PutPayload, WriteMultipart};
use std::collections::BTreeMap;
use std::fs::{DirBuilder, File};
use std::io::Read;
use std::os::unix::fs::DirBuilderExt;
use std::path::Path as FilePath;
use std::time::{Duration, SystemTime};

/// Smallest part sent in one request.
const MIN_PART_BYTES: u64 = 8 << 20;
/// Most parts of a file (S3 has 10,000).
const MAX_PARTS_PER_FILE: u64 = 9000;
/// Parts of a file that are on their way at a time.
const MAX_PARTS_IN_FLIGHT: usize = 2;

/// Number and age of the copies to keep.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Keep {
    /// Number of newest copies to keep, at least 1.
    pub(crate) count: usize,
    /// Younger copies are kept, too.
    pub(crate) younger: Duration,
}

/// Outcome of an upload.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Uploaded {
    /// Index of its shard.
    pub shard: u32,
    /// The snapshot's number.
    pub number: u64,
    /// Bytes of its files.
    pub bytes: u64,
    /// Location of the copy.
    pub place: String,
    /// Set when the copy existed already.
    pub was_there: bool,
    /// Error from removing older copies.
    pub left: Option<Error>,
}

/// Copies a snapshot of the shard whose directory this is, which a server owns in this term; 0: without an
/// owner's lease.
pub(crate) async fn upload(
    bucket: &Bucket,
    directory: &FilePath,
    held: Held,
    keep: Keep,
    term: u64,
) -> Result<Uploaded> {
    let described = &held.described;
    let ((shard, _), number) = (described.shard(), described.number());
    if let Some(folder) = &bucket.folder {
        // A model's values are private to its owner.
        let made = DirBuilder::new().recursive(true).mode(0o700).create(folder);
        made.map_err(|error| {
            Error::new(Kind::Config, format!("cannot make {}: {error}", folder.display())).shard(shard)
        })?;
    }
    let home = bucket.shard(shard);
    let uploaded = |folder: &str, was_there| Uploaded {
        shard,
        number,
        bytes: described.bytes(),
        place: bucket.name(&home.clone().join(folder)),
        was_there,
        left: None,
    };
    let mut before = None;
    if let Some((found, version)) = bucket.latest_or_fence(shard).await? {
        if found.term > term {
            return Err(newer_term(bucket, term, &found));
        }
        let ours = copy::copied(directory)?.contains(&found.folder);
        // A directory uses each number once.
        if ours && found.generation == number {
            return Ok(uploaded(&found.folder, true));
        }
        // The owner continues from whatever it was started with.
        if term == 0 && (!ours || found.generation > number) {
            return Err(conflict(bucket, &described.latest(""), &found));
        }
        before = Some(version);
    }
    let folder = copy::new_folder(number)?;
    let to = home.clone().join(folder.as_str());
    let latest = described.latest(&folder).in_term(term);
    for (part, file) in &held.files {
        send(bucket, &to.clone().join(part.name), *part, file, &held.path.join(part.name)).await?;
        reach("snapshot_file_copied");
    }
    let place = to.clone().join(MANIFEST_NAME);
    let manifest = PutPayload::from(described.text().to_vec());
    bucket.store.put(&place, manifest).await.map_err(|error| bucket.failed("write", &place, &error))?;
    reach("snapshot_manifest_copied");
    copy::note_copied(directory, &folder)?;
    if !bucket.swap(&latest, before).await? {
        // A copy that lost the race belongs to no snapshot.
        let _ = remove(
            bucket,
            held.files
                .iter()
                .map(|(part, _)| part.name)
                .chain([MANIFEST_NAME])
                .map(|name| to.clone().join(name)),
        )
        .await;
        let found = bucket.latest_or_fence(shard).await?;
        return Err(found.map_or_else(
            || conflict(bucket, &latest, &latest),
            |(found, _)| conflict(bucket, &latest, &found),
        ));
    }
    reach("latest_swapped");
    let left = prune(bucket, &latest, keep).await.err();
    Ok(Uploaded { left, ..uploaded(&folder, false) })
}

/// Refusal to overwrite copies of a later owner.
fn newer_term(bucket: &Bucket, term: u64, found: &Latest) -> Error {
    let place = bucket.name(&bucket.shard(found.shard));
    let message = format!(
        "{place} belongs to a later owner of the shard; nothing there is written over. Start with --owner-lease, or \
         choose another URL"
    );
    Error::new(Kind::Config, message)
        .shard(found.shard)
        .expected(format!("at most term {term}"), format!("term {}", found.term))
}

/// Refusal to overwrite copies that are newer, or another server's.
fn conflict(bucket: &Bucket, ours: &Latest, found: &Latest) -> Error {
    let place = bucket.name(&bucket.shard(ours.shard));
    let say = |latest: &Latest| {
        format!("snapshot {} of directory {}, {} shards", latest.generation, latest.directory, latest.shards)
    };
    let why = if ours.directory == found.directory && found.generation >= ours.generation {
        "has a later snapshot of this directory: another server continues from a copy of it, or an older copy of the directory \
         was put back"
    } else {
        "has snapshots of another server"
    };
    let message = format!(
        "{place} {why}; nothing there is written over. Choose another URL, or continue from its copies (fastps checkpoint \
         fetch), or remove it if it is not needed"
    );
    Error::new(Kind::Config, message).shard(ours.shard).expected(say(ours), say(found))
}

/// Sends the first bytes of a file, in parts if they are many, and compares their checksum. `name` is the file's.
pub(super) async fn send(
    bucket: &Bucket,
    place: &Path,
    part: Part,
    file: &File,
    name: &FilePath,
) -> Result<()> {
    let failed = |error| bucket.failed("write", place, &error);
    let (size, left) = (part_size(part.bytes), part.bytes);
    let mut reading = Reading { file, sum: Sum::new(), name, size, left };
    if part.bytes <= MIN_PART_BYTES {
        let bytes = reading.next()?;
        reading.check(part)?;
        return bucket.store.put(place, PutPayload::from(bytes)).await.map(drop).map_err(failed);
    }
    let upload = bucket.store.put_multipart(place).await.map_err(failed)?;
    let mut writing = WriteMultipart::new_with_chunk_size(upload, reading.size as usize);
    let sent = async {
        loop {
            let bytes = reading.next()?;
            if bytes.is_empty() {
                return reading.check(part);
            }
            writing.wait_for_capacity(MAX_PARTS_IN_FLIGHT).await.map_err(failed)?;
            writing.put(bytes.into());
        }
    };
    match sent.await {
        Ok(()) => writing.finish().await.map(drop).map_err(failed),
        Err(error) => {
            let _ = writing.abort().await;
            Err(error)
        }
    }
}

/// Part size that keeps a file of this size below the limit on parts.
fn part_size(bytes: u64) -> u64 {
    MIN_PART_BYTES.max(bytes.div_ceil(MAX_PARTS_PER_FILE))
}

/// A file read part by part.
struct Reading<'a> {
    file: &'a File,
    sum: Sum,
    name: &'a FilePath,
    size: u64,
    /// Bytes that are still to be read.
    left: u64,
}

impl Reading<'_> {
    /// The next part; empty at the end.
    fn next(&mut self) -> Result<Vec<u8>> {
        let mut bytes = Vec::new();
        let read = self.file.take(self.size.min(self.left)).read_to_end(&mut bytes);
        read.map_err(|error| {
            Error::new(Kind::Internal, format!("cannot read {}: {error}", self.name.display()))
        })?;
        self.sum.update(&bytes);
        self.left -= bytes.len() as u64;
        Ok(bytes)
    }

    /// Fails unless the bytes read are the bytes written.
    fn check(&self, part: Part) -> Result<()> {
        if self.sum.is(part) {
            return Ok(());
        }
        let message = format!("{} is damaged: its checksum is wrong. It is not copied", self.name.display());
        Err(Error::new(Kind::Internal, message))
    }
}

pub(super) async fn remove(
    bucket: &Bucket,
    places: impl Iterator<Item = Path> + Send,
) -> object_store::Result<()> {
    let places: Vec<_> = places.map(Ok).collect();
    let places = futures_util::stream::iter(places).boxed();
    let mut removed = object_store::ObjectStore::delete_stream(&*bucket.store, places);
    while let Some(one) = removed.next().await {
        match one {
            Ok(_) | Err(object_store::Error::NotFound { .. }) => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

/// Removes copies older than those to be kept, and incomplete ones. Leaves newer ones and unknown names.
async fn prune(bucket: &Bucket, latest: &Latest, keep: Keep) -> Result<()> {
    let home = bucket.shard(latest.shard);
    let failed = |error| bucket.failed("remove older snapshots from", &home, &error);
    let folders = folders(bucket, &home).await?;
    let young = |manifest: &ObjectMeta| {
        let age = SystemTime::now().duration_since(SystemTime::from(manifest.last_modified));
        age.is_ok_and(|age| age < keep.younger)
    };
    let (mut kept, mut gone) = (0, Vec::new());
    for ((number, name), objects) in folders.into_iter().rev() {
        let manifest = objects.iter().find(|object| object.location.filename() == Some(MANIFEST_NAME));
        if name == latest.folder {
            kept += 1;
        } else if number <= latest.generation {
            if manifest.is_some_and(|manifest| kept < keep.count.max(1) || young(manifest)) {
                kept += 1;
            } else {
                gone.extend(objects.into_iter().map(|object| object.location));
            }
        }
    }
    // Removes the manifest first: a copy without one is incomplete.
    gone.sort_by_key(|place| place.filename() != Some(MANIFEST_NAME));
    remove(bucket, gone.into_iter()).await.map_err(failed)
}

/// The folders of a shard's copies with what is in them, by number and name.
pub(super) async fn folders(
    bucket: &Bucket,
    home: &Path,
) -> Result<BTreeMap<(u64, String), Vec<ObjectMeta>>> {
    let mut folders: BTreeMap<_, Vec<_>> = BTreeMap::new();
    let mut objects = bucket.store.list(Some(home));
    while let Some(object) = objects.try_next().await.map_err(|error| bucket.failed("list", home, &error))? {
        let parts: Vec<_> = object.location.prefix_match(home).into_iter().flatten().collect();
        let [folder, _] = parts.as_slice() else { continue };
        let folder = folder.as_ref().to_owned();
        if let Some(number) = copy::number_of(&folder) {
            folders.entry((number, folder)).or_default().push(object);
        }
    }
    Ok(folders)
}

/// The term in which a server opened a directory last; 0: none with an owner's lease has.
fn term_of(directory: &FilePath) -> Result<u64> {
    Ok(copy::served(directory)?.unwrap_or(0))
}

/// Copies the newest whole snapshot of each shard of a data directory that no server uses.
pub fn upload_all(data_dir: &FilePath, bucket: &Bucket, keep: usize) -> Result<Vec<Uploaded>> {
    let keep = Keep { count: keep, younger: Duration::ZERO };
    block(async {
        let mut uploaded = Vec::new();
        for shard in copy::shards(data_dir)? {
            let directory = fastps_durable::shard_folder(data_dir, shard);
            let _locked = copy::lock(&directory)?;
            let Some(held) = Held::newest(&directory)? else {
                let message = format!("{} has no snapshot yet", directory.display());
                return Err(Error::new(Kind::Config, message).shard(shard));
            };
            uploaded.push(
                upload(bucket, &directory, held, keep, term_of(&directory)?)
                    .await
                    .map_err(|error| error.shard(shard))?,
            );
        }
        Ok(uploaded)
    })
}
