//! Writing a snapshot while pushes continue: each slice at its current version, or all at a cut. The snapshot
//! appears complete, by rename, or not at all.

use crate::catalog::{Catalog, Reservation};
use crate::files::directory::Directory;
use crate::files::io::{failed, sync_directory};
use crate::files::output::{FileDigest, Output};
use crate::files::removal::remove;
use crate::frame::{Author, FORMAT, Origin};
use crate::snapshot::generation::Generation;
use crate::snapshot::layout::in_order;
use crate::snapshot::manifest::{Cut, MANIFEST, Manifest};
use crate::snapshot::slice_files::SliceFiles;
use fastps_core::error::Result;
use fastps_core::failpoint::{fail, reach};
use fastps_core::slice::Slice;
use fastps_core::tensor::SliceId;
use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::sync::Arc;
use std::time::{Instant, SystemTime};

/// Bytes between background syncs.
const SYNC_INTERVAL_BYTES: u64 = 32 << 20;
/// Bytes between background syncs while the log is also being written, so that its syncs do not wait long.
const SYNC_INTERVAL_WITH_LOG_BYTES: u64 = 8 << 20;

/// What to snapshot.
pub(crate) struct SnapshotInput<'a> {
    /// Looks up a slice of the catalog. `None`: it was freed meanwhile.
    pub(crate) slice: &'a dyn Fn(SliceId) -> Option<Arc<Slice>>,
    pub(crate) catalog: Arc<Catalog>,
    pub(crate) origin: Origin,
    pub(crate) author: Author,
    /// The first log segment after the snapshot.
    pub(crate) log: u64,
    /// The cut that the shard has begun.
    pub(crate) cut: Option<Cut>,
    /// The last synced log segment, and how many of its bytes are durable.
    pub(crate) synced: &'a dyn Fn() -> (u64, u64),
    /// Set while the log has unwritten changes.
    pub(crate) logging: &'a dyn Fn() -> bool,
}

/// Writes a snapshot and renames it once it is durable. `after_last_slice` is called after the last slice.
pub(crate) fn write(
    directory: &Directory,
    number: u64,
    input: &SnapshotInput<'_>,
    after_last_slice: impl FnOnce(),
) -> Result<Generation> {
    let folder = directory.unfinished(number);
    remove(&folder)?;
    std::fs::create_dir(&folder).map_err(|error| failed("create", &folder, &error))?;
    reach("snapshot_create");
    let name = directory.generation(number);
    let written = write_into(&folder, number, input, after_last_slice).and_then(|manifest| {
        // Another server may own the directory by now.
        let renamed = fail("snapshot_rename").and_then(|()| directory.lock().check());
        let renamed = renamed.and_then(|()| std::fs::rename(&folder, &name));
        renamed.map_err(|error| failed("rename", &folder, &error))?;
        reach("snapshot_renamed");
        sync_directory(directory.path())?;
        Ok(manifest)
    });
    match written {
        Ok(manifest) => Ok(Generation::of(name, manifest)?),
        Err(error) => {
            // The next start would remove it, but it occupies disk space until then.
            let _ = remove(&folder);
            Err(error)
        }
    }
}

fn write_into(
    folder: &Path,
    number: u64,
    input: &SnapshotInput<'_>,
    after_last_slice: impl FnOnce(),
) -> Result<Manifest> {
    let slices = in_order(&input.catalog);
    let mut files = SliceFiles::create(folder, &slices)?;
    let seen = write_slices(&slices, input, &mut files)?;
    after_last_slice();
    let files = files.finish()?;
    let manifest = manifest(number, input, files, seen);
    reach("snapshot_manifest");
    let mut file = Output::create(&folder.join(MANIFEST))?;
    manifest.write(&mut file)?;
    file.finish()?;
    sync_directory(folder)?;
    Ok(manifest)
}

/// Irregularities found while the slices were written.
#[derive(Default)]
struct Seen {
    /// Slices that were freed meanwhile.
    gone: BTreeSet<u64>,
    /// Tensors with values or state that are not finite.
    not_finite: BTreeSet<String>,
}

/// Writes all slices.
fn write_slices(
    slices: &[(u64, usize, &Reservation)],
    input: &SnapshotInput<'_>,
    files: &mut SliceFiles,
) -> Result<Seen> {
    let (logging, of_cut) = (input.logging, input.cut.is_some());
    let mut seen = Seen::default();
    let mut begun = Instant::now();
    for (id, index, reservation) in slices {
        // While pushes are logged, writing pauses after each slice for as long as the slice took. Pushes that
        // wait for a cut are held as copies, so a cut is written without pauses.
        if !of_cut && logging() {
            std::thread::sleep(begun.elapsed());
        }
        begun = Instant::now();
        let Some(slice) = (input.slice)(SliceId(*id)) else {
            seen.gone.insert(*id);
            files.write_zeros(*index, reservation)?;
            continue;
        };
        let image = if of_cut { slice.image_in_cut()? } else { slice.image()? };
        if !slice.is_finite(&image) {
            seen.not_finite.insert(slice.spec().name.to_string());
        }
        files.write(*id, image)?;
        files.sync_every(if logging() { SYNC_INTERVAL_WITH_LOG_BYTES } else { SYNC_INTERVAL_BYTES })?;
    }
    Ok(seen)
}

fn manifest(
    number: u64,
    input: &SnapshotInput<'_>,
    files: BTreeMap<String, FileDigest>,
    Seen { gone, not_finite }: Seen,
) -> Manifest {
    let SnapshotInput { catalog, origin, author, log, cut, synced, .. } = input;
    let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
    Manifest {
        format: FORMAT,
        id: origin.id,
        shard: origin.shard,
        shards: origin.shards,
        generation: number,
        log: *log,
        incarnation: author.incarnation,
        predecessor: author.predecessor,
        durable: Some(synced()).filter(|(number, _)| number >= log),
        written: now.map_or(0, |since| since.as_secs()),
        files,
        gone,
        not_finite,
        cut: cut.clone(),
        catalog: catalog.clone(),
    }
}
