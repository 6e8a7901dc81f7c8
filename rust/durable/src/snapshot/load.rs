//! Loading a snapshot into an empty shard.

use crate::files::checksum::crc32c;
use crate::files::damage::Unusable;
use crate::files::io::failed;
use crate::files::output::Extent;
use crate::frame::{Content, VectorsEntry};
use crate::snapshot::generation::Generation;
use crate::snapshot::manifest::{SLICES, STATE, VALUES};
use fastps_core::shard::Shard;
use fastps_core::slice::Standing;
use fastps_core::tensor::SliceId;
use std::collections::BTreeSet;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

impl Generation {
    /// Creates the snapshot's slices in an empty shard. After an error some may exist. `on_slice` is called
    /// for each slice, with its state and the number of bytes read.
    pub(crate) fn load(
        &self,
        shard: &Shard,
        mut on_slice: impl FnMut(&Standing, u64),
    ) -> Result<(), Unusable> {
        let catalog = &self.manifest.catalog;
        for reservation in catalog.reservations.values() {
            let slices: Vec<_> =
                reservation.slices.iter().map(|(id, k)| (SliceId(*id), *k as usize)).collect();
            shard.create(&Arc::new(reservation.spec.clone()), reservation.group, &slices)?;
        }
        let gone: Vec<_> = self.manifest.gone.iter().map(|id| SliceId(*id)).collect();
        shard.remove(&gone);
        let arrays = (ArrayFile::open(&self.path, VALUES)?, ArrayFile::open(&self.path, STATE)?);
        let (mut values, mut state) = (Vec::new(), Vec::new());
        let mut missing: BTreeSet<_> = catalog.slices().map(|(id, ..)| id).collect();
        missing.retain(|id| !self.manifest.gone.contains(id));
        let mut space: Option<LoadedSpace> = None;
        self.entries(|content| {
            let entry = match content {
                Content::Slice(entry) if space.is_none() => entry,
                Content::Vectors(entry) if space.is_none() => {
                    if missing.contains(&entry.slice) || shard.slice(SliceId(entry.slice)).is_err() {
                        return self.damaged(SLICES, "has the vectors of a slice before the slice");
                    }
                    space = Some(LoadedSpace { entry, arrays: Vec::new() });
                    return Ok(());
                }
                Content::Array(values) => {
                    let Some(loaded) = &mut space else {
                        return self.damaged(SLICES, "has a vector of no space");
                    };
                    loaded.arrays.push(values.to_vec());
                    return space
                        .take_if(|loaded| loaded.is_complete())
                        .map_or(Ok(()), |all| all.restore(shard));
                }
                _ => return self.damaged(SLICES, "lacks vectors of a space"),
            };
            let slice = shard.slice(SliceId(entry.slice)).ok().filter(|_| missing.remove(&entry.slice));
            let Some(slice) = slice else {
                return self.damaged(SLICES, "names a slice that is not in the manifest");
            };
            let (of_values, of_state) = (slice.bytes() as u64, slice.slot_bytes() as u64 * slots(&slice));
            if entry.values.bytes != of_values || entry.state.bytes != of_state {
                return self.damaged(SLICES, "contradicts the manifest on the size of a slice");
            }
            arrays.0.read(entry.values, &mut values)?;
            arrays.1.read(entry.state, &mut state)?;
            slice.restore(&entry.standing, &values, &state)?;
            on_slice(&entry.standing, entry.values.bytes + entry.state.bytes);
            Ok(())
        })?;
        if space.is_some() {
            return self.damaged(SLICES, "lacks vectors of a space");
        }
        if missing.is_empty() { Ok(()) } else { self.damaged(SLICES, "lacks slices that the manifest lists") }
    }
}

/// The space of a slice, and those of its vectors that were read.
struct LoadedSpace {
    entry: VectorsEntry,
    arrays: Vec<Vec<u8>>,
}

impl LoadedSpace {
    fn is_complete(&self) -> bool {
        self.arrays.len() == self.entry.space.vectors.len()
    }

    fn restore(self, shard: &Shard) -> Result<(), Unusable> {
        let VectorsEntry { slice, space, standing } = &self.entry;
        let arrays: Vec<_> = self.arrays.iter().map(Vec::as_slice).collect();
        Ok(shard.slice(SliceId(*slice))?.restore_space(space, standing, &arrays)?)
    }
}

fn slots(slice: &fastps_core::slice::Slice) -> u64 {
    slice.spec().slots().len() as u64
}

/// A safetensors file being read.
struct ArrayFile {
    path: PathBuf,
    file: File,
}

impl ArrayFile {
    fn open(folder: &Path, name: &str) -> Result<Self, Unusable> {
        let path = folder.join(name);
        let file = File::open(&path).map_err(|error| failed("read", &path, &error))?;
        Ok(Self { path, file })
    }

    /// Reads and verifies an extent. The caller has checked its length.
    fn read(&self, extent: Extent, into: &mut Vec<u8>) -> Result<(), Unusable> {
        into.resize(extent.bytes as usize, 0);
        match self.file.read_exact_at(into, extent.offset) {
            Ok(()) if crc32c(into) == extent.crc32c => Ok(()),
            Ok(()) => Err(Unusable::Damaged(format!(
                "{} is damaged: the checksum of the {} bytes at {} is wrong",
                self.path.display(),
                extent.bytes,
                extent.offset
            ))),
            Err(error) if error.kind() == std::io::ErrorKind::UnexpectedEof => {
                Err(Unusable::Damaged(format!("{} is too short", self.path.display())))
            }
            Err(error) => Err(failed("read", &self.path, &error).into()),
        }
    }
}
