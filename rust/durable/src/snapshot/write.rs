//! Writing a snapshot: every slice at one version of its own, while pushes go on. It is there whole, or not at all.

use crate::catalog::{Catalog, Reservation};
use crate::files::directory::Directory;
use crate::files::io::{failed, sync_directory};
use crate::files::output::Output;
use crate::files::removal::remove;
use crate::frame::{self, Author, FORMAT, Origin, Piece};
use crate::snapshot::generation::Generation;
use crate::snapshot::layout::{in_order, layout};
use crate::snapshot::manifest::{Cut, MANIFEST, Manifest, SLICES, STATE, VALUES};
use fastps_core::error::{Error, Kind, Result};
use fastps_core::failpoint::{fail, reach};
use fastps_core::slice::Slice;
use fastps_core::tensor::SliceId;
use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::sync::Arc;
use std::time::{Instant, SystemTime};

/// So much is synced at a time, while the next is written.
const PACE: u64 = 32 << 20;
/// The same while a log on the same disk is synced, too, and would wait for it.
const PACE_BESIDE_LOG: u64 = 8 << 20;

/// What a snapshot is of.
pub(crate) struct Subject<'a> {
    /// The slices of the catalog; `None`: it was freed meanwhile.
    pub(crate) slice: &'a dyn Fn(SliceId) -> Option<Arc<Slice>>,
    pub(crate) catalog: Catalog,
    pub(crate) origin: Origin,
    pub(crate) author: Author,
    /// The first segment of the log behind it.
    pub(crate) log: u64,
    /// The cut that the shard has begun.
    pub(crate) cut: Option<Cut>,
    /// The segment of the log that was synced last, and how much of it is durable.
    pub(crate) synced: &'a dyn Fn() -> (u64, u64),
    /// Whether the log is written meanwhile.
    pub(crate) logging: &'a dyn Fn() -> bool,
}

/// Writes a generation, and gives it its name when all of it is durable.
/// `behind` is called after the last slice.
pub(crate) fn write(
    directory: &Directory,
    number: u64,
    subject: &Subject<'_>,
    behind: impl FnOnce(),
) -> Result<Generation> {
    let folder = directory.unfinished(number);
    remove(&folder)?;
    std::fs::create_dir(&folder).map_err(|error| failed("make", &folder, &error))?;
    reach("snapshot_create");
    let written = write_into(&folder, number, subject, behind).and_then(|()| {
        let name = directory.generation(number);
        // Another server may have the directory by now.
        let renamed = fail("snapshot_rename").and_then(|()| directory.lock().check());
        let renamed = renamed.and_then(|()| std::fs::rename(&folder, &name));
        renamed.map_err(|error| failed("rename", &folder, &error))?;
        reach("snapshot_renamed");
        sync_directory(directory.path())
    });
    if let Err(error) = written {
        // It would be removed at the next start, and takes place until then.
        let _ = remove(&folder);
        return Err(error);
    }
    Ok(Generation::open(directory.path(), number)?)
}

fn write_into(folder: &Path, number: u64, subject: &Subject<'_>, behind: impl FnOnce()) -> Result<()> {
    let Subject { slice, catalog, origin, author, log, cut, synced, logging } = subject;
    let slices = in_order(catalog);
    let unwritable = |error: serde_json::Error| Error::new(Kind::Internal, error.to_string());
    let headers = layout(&slices);
    let (mut values, mut state) =
        (Output::create(&folder.join(VALUES))?, Output::create(&folder.join(STATE))?);
    let mut list = Output::create(&folder.join(SLICES))?;
    values.write(&headers.0.header().map_err(unwritable)?)?;
    state.write(&headers.1.header().map_err(unwritable)?)?;
    let (mut gone, mut entry) = (BTreeSet::new(), Vec::new());
    let mut begun = Instant::now();
    for (id, index, reservation) in &slices {
        // While pushes are logged, a slice is followed by a rest of what it took. What waits for a cut is kept in copies: there is
        // no rest then.
        if cut.is_none() && logging() {
            std::thread::sleep(begun.elapsed());
        }
        begun = Instant::now();
        let Some(slice) = slice(SliceId(*id)) else {
            gone.insert(*id);
            fill(*index, reservation, &mut values, &mut state)?;
            continue;
        };
        let image = if cut.is_some() { slice.image_in_cut()? } else { slice.image()? };
        let piece = Piece {
            slice: *id,
            values: values.write(image.values.as_ref())?,
            state: state.write(image.state.as_ref())?,
            standing: image.standing,
        };
        entry.clear();
        if !frame::slice(&mut entry, &piece) {
            return Err(Error::new(Kind::Capacity, "a slice remembers too many clients for one entry"));
        }
        frame::seal(&mut entry);
        list.write(&entry)?;
        let pace = if logging() { PACE_BESIDE_LOG } else { PACE };
        values.keep_pace(pace)?;
        state.keep_pace(pace)?;
    }
    behind();
    let files = [(VALUES, values), (STATE, state), (SLICES, list)];
    let mut written = BTreeMap::new();
    for (name, file) in files {
        written.insert(name.to_owned(), file.finish()?);
    }
    let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
    let manifest = Manifest {
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
        files: written,
        gone,
        cut: cut.clone(),
        catalog: catalog.clone(),
    };
    reach("snapshot_manifest");
    let mut file = Output::create(&folder.join(MANIFEST))?;
    file.write(&manifest.text().map_err(unwritable)?)?;
    file.finish()?;
    sync_directory(folder)
}

/// Zeros in place of a slice that was freed meanwhile, so that all others lie where the headers say.
fn fill(index: usize, reservation: &Reservation, values: &mut Output, state: &mut Output) -> Result<()> {
    let spec = &reservation.spec;
    let zeros = vec![0; spec.dtype.size() * spec.slice_range(index).len()];
    values.write(&zeros)?;
    for _ in spec.optimizer.slots() {
        state.write(&zeros)?;
    }
    Ok(())
}
