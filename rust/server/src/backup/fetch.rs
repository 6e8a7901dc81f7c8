//! Lists and verifies the copies in a bucket, and makes a data directory of them.

use super::bucket::{Bucket, MAX_MANIFEST_BYTES, Sum, block};
use super::upload::folders;
use fastps_core::error::{Error, Kind, Result};
use fastps_durable::copy::{Described, Fetched, Latest, MANIFEST_NAME, Part};
use futures_util::{StreamExt, TryStreamExt, stream};
use object_store::ObjectStoreExt;
use object_store::path::Path;
use std::fs::File;
use std::io::Write;
use std::path::Path as FilePath;

/// Limit on restarts of a fetch because a newer snapshot replaced the one being read.
const MAX_READ_ATTEMPTS: usize = 5;
/// Bytes of an object that a request reads, and requests at a time.
const READ_BYTES: u64 = 8 << 20;
const READS: usize = 4;

/// One copy in a bucket.
#[derive(Clone, Debug)]
pub struct Stored {
    /// Index of its shard.
    pub shard: u32,
    /// Shards of its cluster, if its manifest can be read.
    pub shards: Option<u32>,
    /// The snapshot's number.
    pub number: u64,
    /// Folder of the copy.
    pub place: String,
    /// A fetch uses this one.
    pub latest: bool,
    /// Fault of the copy; `None` if its manifest is whole, and all files exist in full length.
    pub problem: Option<String>,
    /// When it was written, in seconds since 1970.
    pub written: u64,
    /// Bytes of its files.
    pub bytes: u64,
    /// Slices in it.
    pub slices: u64,
    /// The group whose tensors are of one moment in all shards, if any.
    pub cut: Option<String>,
}

/// Result of reading every byte of a shard's copies.
#[derive(Clone, Debug)]
pub struct Verified {
    /// Index of the shard.
    pub shard: u32,
    /// Folder of its copies.
    pub place: String,
    /// Numbers of the whole snapshots, newest first.
    pub whole: Vec<u64>,
    /// A sentence per damage.
    pub damages: Vec<String>,
}

/// A fetched copy.
#[derive(Clone, Debug)]
pub struct Got {
    /// Index of its shard.
    pub shard: u32,
    /// The snapshot's number.
    pub number: u64,
    /// Bytes of its files.
    pub bytes: u64,
    /// Slices in it.
    pub slices: u64,
    /// Where it was copied from.
    pub place: String,
}

/// The shards that a bucket has folders of, ascending.
pub(super) async fn shards(bucket: &Bucket) -> Result<Vec<u32>> {
    let listed = bucket.store.list_with_delimiter(Some(&bucket.prefix)).await;
    let listed = listed.map_err(|error| bucket.failed("list", &bucket.prefix, &error))?;
    let shard = |place: &Path| place.filename()?.strip_prefix("shard-")?.parse().ok();
    let mut shards: Vec<u32> = listed.common_prefixes.iter().filter_map(shard).collect();
    shards.sort_unstable();
    if shards.is_empty() {
        let message = format!("{} has no shard-0, shard-1, ... in it", bucket.url);
        return Err(
            Error::new(Kind::Config, message).expected("the URL that a server has as --copy-to", &bucket.url)
        );
    }
    Ok(shards)
}

pub(super) async fn described(bucket: &Bucket, folder: &Path) -> Result<Described> {
    let place = folder.clone().join(MANIFEST_NAME);
    match bucket.read(&place, MAX_MANIFEST_BYTES).await? {
        Some((text, _)) => Described::parse(text, &bucket.name(&place)),
        None => Err(Error::new(Kind::Internal, format!("{} is missing", bucket.name(&place)))),
    }
}

/// Reads an object to its end, and compares its checksum. A large one is read by several requests at a time,
/// since one connection to a store is slower than the link.
async fn read(
    bucket: &Bucket,
    place: &Path,
    part: Part,
    mut each: impl FnMut(&[u8]) -> Result<()>,
) -> Result<()> {
    let damaged = |why: &str| Error::new(Kind::Internal, format!("{} {why}", bucket.name(place)));
    let failed = |error| match error {
        object_store::Error::NotFound { .. } => damaged("is missing"),
        error => bucket.failed("read", place, &error),
    };
    let size = bucket.store.head(place).await.map_err(failed)?.size;
    if size != part.bytes {
        return Err(damaged(&format!("has {size} bytes in place of {}", part.bytes)));
    }
    let begins = (0..size).step_by(READ_BYTES as usize);
    let reads = begins.map(|begin| bucket.store.get_range(place, begin..size.min(begin + READ_BYTES)));
    let (mut sum, mut chunks) = (Sum::new(), stream::iter(reads).buffered(READS));
    while let Some(chunk) = chunks.try_next().await.map_err(failed)? {
        sum.update(&chunk);
        each(&chunk)?;
    }
    if sum.is(part) { Ok(()) } else { Err(damaged("is damaged: its checksum is wrong")) }
}

/// The copies of each shard, the newest first.
pub fn list(bucket: &Bucket) -> Result<Vec<Stored>> {
    block(async {
        let mut stored = Vec::new();
        for shard in shards(bucket).await? {
            stored.extend(list_shard(bucket, shard).await?);
        }
        Ok(stored)
    })
}

async fn list_shard(bucket: &Bucket, shard: u32) -> Result<Vec<Stored>> {
    let (home, mut stored) = (bucket.shard(shard), Vec::new());
    let latest = bucket.latest(shard).await?.map(|(latest, _)| latest.folder);
    for ((number, name), objects) in folders(bucket, &home).await?.into_iter().rev() {
        let folder = home.clone().join(name.as_str());
        let place = bucket.name(&folder);
        let latest = latest.as_ref() == Some(&name);
        let empty = Stored {
            shard,
            shards: None,
            number,
            place,
            latest,
            problem: None,
            written: 0,
            bytes: 0,
            slices: 0,
            cut: None,
        };
        stored.push(match described(bucket, &folder).await {
            Err(error) => Stored { problem: Some(error.message.clone()), ..empty },
            Ok(described) => {
                let length = |part: Part| {
                    let object = objects.iter().find(|object| object.location.filename() == Some(part.name));
                    object.map(|object| object.size)
                };
                let short = described.parts().find(|part| length(*part) != Some(part.bytes));
                let problem = short.map(|part| format!("{} is missing or has the wrong length", part.name));
                let (written, bytes, slices) = (described.written(), described.bytes(), described.slices());
                let cut = described.cut().map(|cut| cut.group.clone());
                Stored { shards: Some(described.shard().1), problem, written, bytes, slices, cut, ..empty }
            }
        });
    }
    Ok(stored)
}

/// Reads every byte of every copy.
pub fn verify(bucket: &Bucket) -> Result<Vec<Verified>> {
    block(async {
        let mut verified = Vec::new();
        for shard in shards(bucket).await? {
            let mut found = verify_shard(bucket, shard).await?;
            if !found.damages.is_empty() {
                // A server may have removed the copy during the check.
                found = verify_shard(bucket, shard).await?;
            }
            verified.push(found);
        }
        Ok(verified)
    })
}

async fn verify_shard(bucket: &Bucket, shard: u32) -> Result<Verified> {
    let home = bucket.shard(shard);
    let (mut whole, mut damages) = (Vec::new(), Vec::new());
    let latest = bucket.latest(shard).await?.map(|(latest, _)| latest);
    let mut there = false;
    for ((number, name), objects) in folders(bucket, &home).await?.into_iter().rev() {
        let is_latest = latest.as_ref().is_some_and(|latest| latest.folder == name);
        there |= is_latest;
        let is_manifest =
            |object: &object_store::ObjectMeta| object.location.filename() == Some(MANIFEST_NAME);
        if !is_latest && !objects.iter().any(is_manifest) {
            // Incomplete: being written, or abandoned by a server. The next copy removes it.
            continue;
        }
        match verify_folder(bucket, &home.clone().join(name.as_str())).await {
            Ok(()) => whole.push(number),
            Err(error) if error.kind == Kind::Internal => damages.push(error.message.clone()),
            Err(error) => return Err(error),
        }
    }
    let place = bucket.name(&home);
    match latest {
        None => damages.push(format!("{place} has no complete copy")),
        Some(latest) if !there => damages.push(format!("{place}/{} is missing", latest.folder)),
        Some(_) => {}
    }
    Ok(Verified { shard, place, whole, damages })
}

async fn verify_folder(bucket: &Bucket, folder: &Path) -> Result<()> {
    let described = described(bucket, folder).await?;
    for part in described.parts() {
        read(bucket, &folder.clone().join(part.name), part, |_| Ok(())).await?;
    }
    Ok(())
}

/// Which copies are fetched.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Which {
    /// Each shard's newest.
    Newest,
    /// Those of the newest cut that all shards have.
    Cut,
}

/// Makes a data directory from copies, one per shard, whole or not at all.
pub fn fetch(bucket: &Bucket, which: Which, target: &FilePath) -> Result<Vec<Got>> {
    block(async {
        let mut fetched = Fetched::begin(target)?;
        let got = match which {
            Which::Newest => fetch_newest(bucket, &mut fetched).await?,
            Which::Cut => fetch_cut(bucket, &mut fetched).await?,
        };
        fetched.finish()?;
        Ok(got)
    })
}

async fn fetch_newest(bucket: &Bucket, fetched: &mut Fetched) -> Result<Vec<Got>> {
    let (mut got, mut shards) = (Vec::new(), 1);
    while (got.len() as u32) < shards {
        let shard = got.len() as u32;
        let (one, of) = fetch_shard(bucket, shard, fetched).await.map_err(|error| error.shard(shard))?;
        if shard > 0 && of != shards {
            let message = format!("{} has shards of clusters of different sizes", bucket.url);
            return Err(Error::new(Kind::Config, message).shard(shard).expected(shards, of));
        }
        shards = of;
        got.push(one);
    }
    Ok(got)
}

async fn fetch_cut(bucket: &Bucket, fetched: &mut Fetched) -> Result<Vec<Got>> {
    let mut got = Vec::new();
    for named in newest_cut(bucket).await? {
        let shard = named.shard;
        got.push(fetch_copy(bucket, &named, fetched).await.map_err(|error| error.shard(shard))?);
    }
    Ok(got)
}

/// The copies of the newest cut that all shards have, in the order of the shards.
async fn newest_cut(bucket: &Bucket) -> Result<Vec<Latest>> {
    let mut of_shards = Vec::new();
    for shard in shards(bucket).await? {
        of_shards.push(cuts(bucket, shard).await?);
    }
    let of = |id: u64| {
        let copies = of_shards.iter().filter_map(|cuts| cuts.iter().find(|(found, _)| *found == id));
        let copies: Vec<_> = copies.map(|(_, named)| named.clone()).collect();
        let complete = copies.iter().zip(0..).all(|(named, index)| named.shard == index)
            && copies.first().is_some_and(|first| first.shards as usize == copies.len());
        complete.then_some(copies)
    };
    let cuts = of_shards.first().into_iter().flatten();
    cuts.map(|(id, _)| *id).find_map(of).ok_or_else(|| {
        let message = format!("{} has no cut over all shards", bucket.url);
        Error::new(Kind::Config, message)
            .expected("copies of snapshots by `fastps checkpoint save --consistent=GROUP`", "only others")
    })
}

/// A shard's copies that belong to a cut, newest first, each with the cut's identifier. Skips copies that
/// cannot be read.
async fn cuts(bucket: &Bucket, shard: u32) -> Result<Vec<(u64, Latest)>> {
    let (home, mut cuts) = (bucket.shard(shard), Vec::new());
    for ((_, name), _) in folders(bucket, &home).await?.into_iter().rev() {
        match described(bucket, &home.clone().join(name.as_str())).await {
            Ok(described) => cuts.extend(described.cut().map(|cut| (cut.id, described.latest(&name)))),
            Err(error) if error.kind == Kind::Internal => {}
            Err(error) => return Err(error),
        }
    }
    Ok(cuts)
}

/// Fetches the newest copy of a shard. Also returns the number of shards.
async fn fetch_shard(bucket: &Bucket, shard: u32, fetched: &mut Fetched) -> Result<(Got, u32)> {
    let mut result = Err(missing(bucket, shard));
    let mut tried = String::new();
    for _ in 0..MAX_READ_ATTEMPTS {
        let Some((latest, _)) = bucket.latest(shard).await? else { return Err(missing(bucket, shard)) };
        if latest.folder == tried {
            break;
        }
        tried.clone_from(&latest.folder);
        result = fetch_copy(bucket, &latest, fetched).await.map(|got| (got, latest.shards.max(1)));
        if result.is_ok() {
            break;
        }
        // The server may have removed it for a newer one.
    }
    result
}

pub(super) fn missing(bucket: &Bucket, shard: u32) -> Error {
    let message = format!("{} has no complete copy of shard {shard}", bucket.url);
    Error::new(Kind::Config, message).expected("the URL that a server has as --copy-to", &bucket.url)
}

async fn fetch_copy(bucket: &Bucket, named: &Latest, fetched: &mut Fetched) -> Result<Got> {
    let folder = bucket.shard(named.shard).join(named.folder.as_str());
    let described = described(bucket, &folder).await?;
    if !named.names(&described) {
        let message =
            format!("{} is not the manifest that latest names", bucket.name(&folder.join(MANIFEST_NAME)));
        return Err(Error::new(Kind::Internal, message));
    }
    download(bucket, &folder, &described, &fetched.folder(&described)?).await?;
    fetched.complete(&described, &named.folder)?;
    let (number, bytes, slices) = (described.number(), described.bytes(), described.slices());
    Ok(Got { shard: named.shard, number, bytes, slices, place: bucket.name(&folder) })
}

/// Writes the files of a copy, except the manifest, to a folder.
pub(super) async fn download(
    bucket: &Bucket,
    folder: &Path,
    described: &Described,
    to: &FilePath,
) -> Result<()> {
    for part in described.parts() {
        let place = folder.clone().join(part.name);
        download_file(bucket, &place, part, &to.join(part.name)).await?.sync_all().map_err(|error| {
            Error::new(Kind::Internal, format!("cannot write {}: {error}", to.join(part.name).display()))
        })?;
    }
    Ok(())
}

/// Writes an object to a new file, and compares its checksum.
pub(super) async fn download_file(bucket: &Bucket, place: &Path, part: Part, to: &FilePath) -> Result<File> {
    let failed =
        |error: std::io::Error| Error::new(Kind::Internal, format!("cannot write {}: {error}", to.display()));
    let mut file = File::create_new(to).map_err(failed)?;
    read(bucket, place, part, |bytes| file.write_all(bytes).map_err(failed)).await?;
    Ok(file)
}
