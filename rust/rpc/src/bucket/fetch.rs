//! The way back: what lies in a bucket, whether it is whole, and a data directory made of it.

use super::upload::folders;
use super::{Bucket, MOST_MANIFEST, Sum};
use fastps_core::error::{Error, Kind, Result};
use fastps_durable::copy::{Described, Fetched, Latest, MANIFEST_NAME, Part};
use futures_util::TryStreamExt;
use object_store::ObjectStoreExt;
use object_store::path::Path;
use std::fs::File;
use std::io::Write;
use std::path::Path as FilePath;

/// How often a fetch begins anew because a newer snapshot took the place of the one that it read.
const TRIES: usize = 5;

/// One copy in a bucket.
#[derive(Clone, Debug)]
pub(crate) struct Stored {
    pub(crate) shard: u32,
    /// Shards of its cluster, if its manifest can be read.
    pub(crate) shards: Option<u32>,
    /// The snapshot's number.
    pub(crate) number: u64,
    /// Where it lies.
    pub(crate) place: String,
    /// A fetch uses this one.
    pub(crate) latest: bool,
    /// What is wrong with it; nothing: its manifest is whole, and its files are there in full length.
    pub(crate) problem: Option<String>,
    /// When it was written, in seconds since 1970.
    pub(crate) written: u64,
    pub(crate) bytes: u64,
    pub(crate) slices: u64,
}

/// What a look at every byte of a shard's copies has found.
#[derive(Clone, Debug)]
pub(crate) struct Verified {
    pub(crate) shard: u32,
    pub(crate) place: String,
    /// The snapshots that are whole, the newest first.
    pub(crate) whole: Vec<u64>,
    /// A sentence per damage.
    pub(crate) damages: Vec<String>,
}

/// What was fetched.
#[derive(Clone, Debug)]
pub(crate) struct Got {
    pub(crate) shard: u32,
    pub(crate) number: u64,
    pub(crate) bytes: u64,
    pub(crate) slices: u64,
    pub(crate) place: String,
}

/// Runs on a thread of its own kind: the command line has no runtime.
pub(super) fn block<T>(work: impl Future<Output = Result<T>>) -> Result<T> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    runtime
        .map_err(|error| Error::new(Kind::Internal, format!("cannot start a runtime: {error}")))?
        .block_on(work)
}

/// The shards that a bucket has folders of, ascending.
async fn shards(bucket: &Bucket) -> Result<Vec<u32>> {
    let listed = bucket.store.list_with_delimiter(Some(&bucket.prefix)).await;
    let listed = listed.map_err(|error| bucket.failed("list", &bucket.prefix, &error))?;
    let shard = |place: &Path| place.filename()?.strip_prefix("shard-")?.parse().ok();
    let mut shards: Vec<u32> = listed.common_prefixes.iter().filter_map(shard).collect();
    shards.sort_unstable();
    if shards.is_empty() {
        let message = format!("{} has no shard-0, shard-1, ... in it", bucket.url);
        return Err(
            Error::new(Kind::Config, message).expected("what a server is told by --copy-to", &bucket.url)
        );
    }
    Ok(shards)
}

async fn described(bucket: &Bucket, folder: &Path) -> Result<Described> {
    let place = folder.clone().join(MANIFEST_NAME);
    match bucket.read(&place, MOST_MANIFEST).await? {
        Some((text, _)) => Described::parse(text, &bucket.name(&place)),
        None => Err(Error::new(Kind::Internal, format!("{} is missing", bucket.name(&place)))),
    }
}

/// Reads a file of a copy to its end, and compares its checksum.
async fn read(
    bucket: &Bucket,
    folder: &Path,
    part: Part,
    mut each: impl FnMut(&[u8]) -> Result<()>,
) -> Result<()> {
    let place = folder.clone().join(part.name);
    let damaged = |why: &str| Error::new(Kind::Internal, format!("{} {why}", bucket.name(&place)));
    let failed = |error| match error {
        object_store::Error::NotFound { .. } => damaged("is missing"),
        error => bucket.failed("read", &place, &error),
    };
    let got = bucket.store.get(&place).await.map_err(failed)?;
    if got.meta.size != part.bytes {
        return Err(damaged(&format!("has {} bytes in place of {}", got.meta.size, part.bytes)));
    }
    let (mut sum, mut stream) = (Sum::new(), got.into_stream());
    while let Some(chunk) = stream.try_next().await.map_err(failed)? {
        sum.update(&chunk);
        each(&chunk)?;
    }
    if sum.is(part) { Ok(()) } else { Err(damaged("is damaged: its checksum is wrong")) }
}

/// The copies of each shard, the newest first.
pub(crate) fn list(bucket: &Bucket) -> Result<Vec<Stored>> {
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
        };
        stored.push(match described(bucket, &folder).await {
            Err(error) => Stored { problem: Some(error.message.clone()), ..empty },
            Ok(described) => {
                let length = |part: Part| {
                    let object = objects.iter().find(|object| object.location.filename() == Some(part.name));
                    object.map(|object| object.size)
                };
                let short = described.parts().find(|part| length(*part) != Some(part.bytes));
                let problem = short.map(|part| format!("{} is missing, or has another length", part.name));
                let (written, bytes, slices) = (described.written(), described.bytes(), described.slices());
                Stored { shards: Some(described.shard().1), problem, written, bytes, slices, ..empty }
            }
        });
    }
    Ok(stored)
}

/// Reads every byte of every copy.
pub(crate) fn verify(bucket: &Bucket) -> Result<Vec<Verified>> {
    block(async {
        let mut verified = Vec::new();
        for shard in shards(bucket).await? {
            let mut found = verify_shard(bucket, shard).await?;
            if !found.damages.is_empty() {
                // A server may just have removed what was looked at.
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
            // On its way, or left by a server that was ended: the next copy removes it.
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
        None => damages.push(format!("{place} has no copy that is complete")),
        Some(latest) if !there => damages.push(format!("{place}/{} is missing", latest.folder)),
        Some(_) => {}
    }
    Ok(Verified { shard, place, whole, damages })
}

async fn verify_folder(bucket: &Bucket, folder: &Path) -> Result<()> {
    let described = described(bucket, folder).await?;
    for part in described.parts() {
        read(bucket, folder, part, |_| Ok(())).await?;
    }
    Ok(())
}

/// Makes a data directory of each shard's newest copy. It is there whole, or not at all.
pub(crate) fn fetch(bucket: &Bucket, target: &FilePath) -> Result<Vec<Got>> {
    block(async {
        let mut fetched = Fetched::begin(target)?;
        let (mut got, mut shards) = (Vec::new(), 1);
        while (got.len() as u32) < shards {
            let shard = got.len() as u32;
            let (one, of) =
                fetch_shard(bucket, shard, &mut fetched).await.map_err(|error| error.shard(shard))?;
            if shard > 0 && of != shards {
                let message = format!("{} has shards of clusters of different sizes", bucket.url);
                return Err(Error::new(Kind::Config, message).shard(shard).expected(shards, of));
            }
            shards = of;
            got.push(one);
        }
        fetched.finish()?;
        Ok(got)
    })
}

/// Fetches one shard; how many there are.
async fn fetch_shard(bucket: &Bucket, shard: u32, fetched: &mut Fetched) -> Result<(Got, u32)> {
    let mut result = Err(missing(bucket, shard));
    let mut tried = String::new();
    for _ in 0..TRIES {
        let Some((latest, _)) = bucket.latest(shard).await? else { return Err(missing(bucket, shard)) };
        if latest.folder == tried {
            break;
        }
        tried.clone_from(&latest.folder);
        result = fetch_latest(bucket, &latest, fetched).await;
        if result.is_ok() {
            break;
        }
        // The server may have removed it, as soon as a newer one was there.
    }
    result
}

fn missing(bucket: &Bucket, shard: u32) -> Error {
    let message = format!("{} has no copy of shard {shard} that is complete", bucket.url);
    Error::new(Kind::Config, message).expected("what a server is told by --copy-to", &bucket.url)
}

async fn fetch_latest(bucket: &Bucket, latest: &Latest, fetched: &mut Fetched) -> Result<(Got, u32)> {
    let folder = bucket.shard(latest.shard).join(latest.folder.as_str());
    let described = described(bucket, &folder).await?;
    if described.latest(&latest.folder) != *latest {
        let message =
            format!("{} is not the manifest that latest names", bucket.name(&folder.join(MANIFEST_NAME)));
        return Err(Error::new(Kind::Internal, message));
    }
    let path = fetched.folder(&described)?;
    for part in described.parts() {
        let name = path.join(part.name);
        let failed = |error: std::io::Error| {
            Error::new(Kind::Internal, format!("cannot write {}: {error}", name.display()))
        };
        let mut file = File::create_new(&name).map_err(failed)?;
        read(bucket, &folder, part, |bytes| file.write_all(bytes).map_err(failed)).await?;
        file.sync_all().map_err(failed)?;
    }
    fetched.complete(&described, &latest.folder)?;
    let (number, bytes, slices) = (described.number(), described.bytes(), described.slices());
    let got = Got { shard: latest.shard, number, bytes, slices, place: bucket.name(&folder) };
    Ok((got, latest.shards.max(1)))
}
