//! Writing a snapshot: every slice at one version of its own, while pushes go on. It is there whole, or not at all.

use crate::catalog::{Catalog, Reservation};
use crate::files::checksum::{Summed, crc32c};
use crate::files::directory::{Directory, failed, remove, sync_directory};
use crate::frame::{self, Author, FORMAT, Origin, Piece, Place};
use crate::snapshot::generation::{Cut, Generation, MANIFEST, Manifest, SLICES, STATE, VALUES, Written};
use crate::snapshot::safetensors::Layout;
use fastps_core::error::{Error, Kind, Result};
use fastps_core::failpoint::{fail, reach};
use fastps_core::slice::Slice;
use fastps_core::tensor::SliceId;
use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Instant, SystemTime};

/// What is shorter is gathered before it is written.
const BUFFER: usize = 64 << 10;
/// So much is synced at a time, while the next is written.
const PACE: u64 = 32 << 20;
/// The same while a log on the same disk is synced, too, and would wait for it.
const PACE_BESIDE_LOG: u64 = 8 << 20;

/// A file that is being written.
pub(crate) struct Output {
    path: PathBuf,
    to: Summed<BufWriter<File>>,
    /// Its first bytes that are durable, or are being made so.
    paced: u64,
    syncing: Option<JoinHandle<std::io::Result<()>>>,
}

impl Output {
    pub(crate) fn create(path: &Path) -> Result<Self> {
        let file = File::create_new(path).map_err(|error| failed("make", path, &error))?;
        let to = Summed::new(BufWriter::with_capacity(BUFFER, file));
        Ok(Self { path: path.to_owned(), to, paced: 0, syncing: None })
    }

    /// Appends bytes; says where they lie.
    pub(crate) fn write(&mut self, bytes: &[u8]) -> Result<Place> {
        let place = Place { offset: self.to.bytes, bytes: bytes.len() as u64, crc32c: crc32c(bytes) };
        let written = fail("snapshot_write").and_then(|()| self.to.write_all(bytes));
        written.map_err(|error| failed("write", &self.path, &error))?;
        Ok(place)
    }

    /// Has the disk write while more is added, so that it is not all left for the end.
    fn keep_pace(&mut self, pace: u64) -> Result<()> {
        if self.to.bytes - self.paced < pace {
            return Ok(());
        }
        self.sync_behind().map_err(|error| failed("write", &self.path, &error))
    }

    fn sync_behind(&mut self) -> std::io::Result<()> {
        self.to.flush()?;
        self.paced = self.to.bytes;
        self.wait()?;
        let file = self.to.get_ref().get_ref().try_clone()?;
        let thread = std::thread::Builder::new().name("fastps-sync".to_owned());
        self.syncing = Some(thread.spawn(move || file.sync_data())?);
        Ok(())
    }

    /// Waits for the sync under way: the system tells of a failure once, and perhaps only there.
    fn wait(&mut self) -> std::io::Result<()> {
        let Some(syncing) = self.syncing.take() else { return Ok(()) };
        syncing.join().unwrap_or_else(|_| Err(std::io::Error::other("a thread that synced it panicked")))
    }

    /// Makes it durable.
    pub(crate) fn finish(mut self) -> Result<Written> {
        let bytes = self.to.bytes;
        self.wait().map_err(|error| failed("write", &self.path, &error))?;
        let (crc32c, writer) = self.to.finish();
        let synced = writer.into_inner().map_err(std::io::IntoInnerError::into_error);
        let synced = synced.and_then(|file| fail("snapshot_sync").and_then(|()| file.sync_all()));
        synced.map_err(|error| failed("write", &self.path, &error))?;
        Ok(Written { bytes, crc32c })
    }
}

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

/// The slices in the order in which they are written: tensor by tensor, each in its own order.
fn in_order(catalog: &Catalog) -> Vec<(u64, usize, &Reservation)> {
    let mut slices: Vec<_> = catalog.slices().collect();
    slices.sort_by(|a, b| (&a.2.spec.name, a.1, a.0).cmp(&(&b.2.spec.name, b.1, b.0)));
    slices
}

/// Lays out both files: a tensor that is here as a whole under its name and in its shape; of others each run of slices
/// by itself, flat, as `name[first:end]`. State has the name of its slot behind that of its tensor.
fn layout(slices: &[(u64, usize, &Reservation)]) -> (Layout, Layout) {
    let (mut values, mut state) = (Layout::default(), Layout::default());
    for run in slices.chunk_by(|a, b| std::ptr::eq(a.2, b.2) && a.1 + 1 == b.1) {
        let (Some((_, first, reservation)), Some((_, last, _))) = (run.first(), run.last()) else { continue };
        let spec = &reservation.spec;
        let elements = spec.slice_range(*first).start..spec.slice_range(*last).end;
        let (name, shape) = if run.len() == spec.slice_count() {
            (spec.name.to_string(), spec.shape.clone())
        } else {
            let name = format!("{}[{}:{}]", spec.name, elements.start, elements.end);
            (name, vec![elements.len() as u64])
        };
        let bytes = (spec.dtype.size() * elements.len()) as u64;
        values.add(name.clone(), shape, bytes);
        // The slots of a slice lie one after the other, so those of several slices are interleaved.
        for (_, k, _) in run {
            let slice = spec.slice_range(*k);
            for slot in spec.optimizer.slots() {
                let whole = run.len() == 1 && spec.slice_count() == 1;
                let (name, shape) = if whole {
                    (format!("{}.{slot}", spec.name), spec.shape.clone())
                } else {
                    let name = format!("{}.{slot}[{}:{}]", spec.name, slice.start, slice.end);
                    (name, vec![slice.len() as u64])
                };
                state.add(name, shape, (spec.dtype.size() * slice.len()) as u64);
            }
        }
    }
    (values, state)
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
