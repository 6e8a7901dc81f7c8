//! The header of a safetensors file: its length, then JSON. The values follow in the order of the header.

use crate::files::io::to_json;
use fastps_core::dtype::DType;
use fastps_core::error::Result;
use serde::Serialize;
use std::collections::{BTreeMap, BTreeSet};

/// Alignment of the values in the file.
const ALIGNMENT_BYTES: usize = 64;

#[derive(Serialize)]
struct Entry {
    dtype: &'static str,
    shape: Vec<u64>,
    data_offsets: (u64, u64),
}

/// Names and sizes of the tensors in a file, in order.
#[derive(Default)]
pub(crate) struct Layout {
    names: BTreeSet<String>,
    entries: BTreeMap<String, Entry>,
    end: u64,
}

impl Layout {
    /// Adds the next tensor, of so many elements. A name that is taken gets `~` appended.
    pub(crate) fn add(&mut self, name: String, shape: Vec<u64>, dtype: DType, elements: usize) {
        let mut name = name;
        while name == "__metadata__" || !self.names.insert(name.clone()) {
            name.push('~');
        }
        let data_offsets = (self.end, self.end + (dtype.size() * elements) as u64);
        self.end = data_offsets.1;
        let dtype = match dtype {
            DType::Float32 => "F32",
            DType::Float64 => "F64",
        };
        self.entries.insert(name, Entry { dtype, shape, data_offsets });
    }

    /// The bytes that precede the values.
    pub(crate) fn header(&self) -> Result<Vec<u8>> {
        let mut json = to_json(&self.entries)?;
        json.resize((8 + json.len()).next_multiple_of(ALIGNMENT_BYTES) - 8, b' ');
        let mut header = (json.len() as u64).to_le_bytes().to_vec();
        header.append(&mut json);
        Ok(header)
    }
}
