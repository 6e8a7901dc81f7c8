//! The files of a snapshot that contain its slices: values, optimizer state, and the list of everything else.

use crate::catalog::Reservation;
use crate::files::output::{FileDigest, Output};
use crate::frame::{self, SliceEntry, VectorsEntry};
use crate::snapshot::layout::layout;
use crate::snapshot::manifest::{SLICES, STATE, VALUES};
use fastps_core::error::{Error, Kind, Result};
use fastps_core::slice::{Image, VectorsImage};
use std::collections::BTreeMap;
use std::path::Path;

pub(super) struct SliceFiles {
    values: Output,
    state: Output,
    list: Output,
    /// The memory of an encoded entry.
    entry: Vec<u8>,
}

impl SliceFiles {
    /// Creates the files, with headers for slices in this order.
    pub(super) fn create(folder: &Path, slices: &[(u64, usize, &Reservation)]) -> Result<Self> {
        let (value_layout, state_layout) = layout(slices);
        let mut values = Output::create(&folder.join(VALUES))?;
        let mut state = Output::create(&folder.join(STATE))?;
        let list = Output::create(&folder.join(SLICES))?;
        values.write(&value_layout.header()?)?;
        state.write(&state_layout.header()?)?;
        Ok(Self { values, state, list, entry: Vec::new() })
    }

    /// Appends the next slice.
    pub(super) fn write(&mut self, slice: u64, image: Image) -> Result<()> {
        let entry = SliceEntry {
            slice,
            values: self.values.write(image.values.as_ref())?,
            state: self.state.write(image.state.as_ref())?,
            standing: image.standing,
        };
        self.list(|to| frame::slice(to, &entry))?;
        image.vectors.map_or(Ok(()), |vectors| self.write_vectors(slice, vectors))
    }

    /// Appends the space of the slice that was written last, and its vectors.
    fn write_vectors(&mut self, slice: u64, image: VectorsImage) -> Result<()> {
        let VectorsImage { space, standing, vectors } = image;
        let entry = VectorsEntry { slice, space, standing };
        self.list(|to| frame::vectors(to, &entry))?;
        vectors.iter().try_for_each(|values| self.list(|to| frame::array(to, values.as_ref())))
    }

    /// Appends a frame to the list.
    fn list(&mut self, encode: impl FnOnce(&mut Vec<u8>) -> bool) -> Result<()> {
        self.entry.clear();
        if !encode(&mut self.entry) {
            return Err(Error::new(Kind::Capacity, "a slice remembers too many clients for one entry"));
        }
        frame::seal(&mut self.entry);
        self.list.write(&self.entry)?;
        Ok(())
    }

    /// Appends zeros for a slice that was freed meanwhile, so that all others stay where the headers say.
    pub(super) fn write_zeros(&mut self, index: usize, reservation: &Reservation) -> Result<()> {
        let spec = &reservation.spec;
        let (dtype, len) = (spec.dtype, spec.slice_range(index).len());
        let zeros = vec![0; dtype.computed().size() * len];
        self.values.write(&zeros[..dtype.size() * len])?;
        for _ in spec.slots() {
            self.state.write(&zeros)?;
        }
        Ok(())
    }

    /// Starts background syncs once `interval` bytes were written since the last one.
    pub(super) fn sync_every(&mut self, interval: u64) -> Result<()> {
        self.values.sync_every(interval)?;
        self.state.sync_every(interval)?;
        self.list.sync_every(interval)
    }

    /// Makes the files durable and returns their digests, by name.
    pub(super) fn finish(self) -> Result<BTreeMap<String, FileDigest>> {
        let files = [(VALUES, self.values), (STATE, self.state), (SLICES, self.list)];
        files.into_iter().map(|(name, file)| Ok((name.to_owned(), file.finish()?))).collect()
    }
}
