//! The header of a safetensors file: its length, then JSON, then the values lie in the order of the header.

use serde::Serialize;
use std::collections::{BTreeMap, BTreeSet};

/// Values begin at a multiple of this.
const ALIGNED: usize = 64;

#[derive(Serialize)]
struct Entry {
    dtype: &'static str,
    shape: Vec<u64>,
    data_offsets: (u64, u64),
}

/// Names and sizes of what a file will hold, in its order.
#[derive(Default)]
pub(crate) struct Layout {
    names: BTreeSet<String>,
    entries: BTreeMap<String, Entry>,
    end: u64,
}

impl Layout {
    /// The next values of the file. A name that is taken gets a `~` behind it.
    pub(crate) fn add(&mut self, name: String, shape: Vec<u64>, bytes: u64) {
        let mut name = name;
        while name == "__metadata__" || !self.names.insert(name.clone()) {
            name.push('~');
        }
        let data_offsets = (self.end, self.end + bytes);
        self.end += bytes;
        self.entries.insert(name, Entry { dtype: "F32", shape, data_offsets });
    }

    /// What stands in front of the values.
    pub(crate) fn header(&self) -> serde_json::Result<Vec<u8>> {
        let mut json = serde_json::to_vec(&self.entries)?;
        json.resize((8 + json.len()).next_multiple_of(ALIGNED) - 8, b' ');
        let mut header = (json.len() as u64).to_le_bytes().to_vec();
        header.append(&mut json);
        Ok(header)
    }
}
