//! Making the slices of an empty shard what a snapshot says.

use crate::files::checksum::crc32c;
use crate::files::damage::Unusable;
use crate::files::io::failed;
use crate::files::output::Place;
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
    /// Makes the slices of an empty shard what the snapshot says. On an error some may be there.
    /// Each slice's standing is shown to `met`, with the number of bytes that were read for it.
    pub(crate) fn load(&self, shard: &Shard, mut met: impl FnMut(&Standing, u64)) -> Result<(), Unusable> {
        let catalog = &self.manifest.catalog;
        for reservation in catalog.reservations.values() {
            let slices: Vec<_> =
                reservation.slices.iter().map(|(id, k)| (SliceId(*id), *k as usize)).collect();
            shard.create(&Arc::new(reservation.spec.clone()), reservation.group, &slices)?;
        }
        let gone: Vec<_> = self.manifest.gone.iter().map(|id| SliceId(*id)).collect();
        shard.remove(&gone);
        let arrays = (Arrays::open(&self.path, VALUES)?, Arrays::open(&self.path, STATE)?);
        let (mut values, mut state) = (Vec::new(), Vec::new());
        let mut missing: BTreeSet<_> = catalog.slices().map(|(id, ..)| id).collect();
        missing.retain(|id| !self.manifest.gone.contains(id));
        self.pieces(|piece| {
            let slice = shard.slice(SliceId(piece.slice)).ok().filter(|_| missing.remove(&piece.slice));
            let Some(slice) = slice else {
                return self.damaged(SLICES, "names a slice that is not in the manifest");
            };
            let bytes = slice.bytes() as u64;
            if piece.values.bytes != bytes || piece.state.bytes != bytes * slots(&slice) {
                return self.damaged(SLICES, "gives a slice another size than the manifest");
            }
            arrays.0.read(piece.values, &mut values)?;
            arrays.1.read(piece.state, &mut state)?;
            slice.restore(&piece.standing, &values, &state)?;
            met(&piece.standing, piece.values.bytes + piece.state.bytes);
            Ok(())
        })?;
        if missing.is_empty() { Ok(()) } else { self.damaged(SLICES, "lacks slices of the manifest") }
    }
}

fn slots(slice: &fastps_core::slice::Slice) -> u64 {
    slice.spec().optimizer.slots().len() as u64
}

/// A file of arrays.
struct Arrays {
    path: PathBuf,
    file: File,
}

impl Arrays {
    fn open(folder: &Path, name: &str) -> Result<Self, Unusable> {
        let path = folder.join(name);
        let file = File::open(&path).map_err(|error| failed("read", &path, &error))?;
        Ok(Self { path, file })
    }

    /// Reads bytes whose number was checked against what is expected.
    fn read(&self, place: Place, into: &mut Vec<u8>) -> Result<(), Unusable> {
        into.resize(place.bytes as usize, 0);
        match self.file.read_exact_at(into, place.offset) {
            Ok(()) if crc32c(into) == place.crc32c => Ok(()),
            Ok(()) => Err(Unusable::Damaged(format!(
                "{} is damaged: the checksum of the {} bytes at {} is wrong",
                self.path.display(),
                place.bytes,
                place.offset
            ))),
            Err(error) if error.kind() == std::io::ErrorKind::UnexpectedEof => {
                Err(Unusable::Damaged(format!("{} is too short", self.path.display())))
            }
            Err(error) => Err(failed("read", &self.path, &error).into()),
        }
    }
}
