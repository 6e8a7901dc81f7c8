//! The header of a safetensors file: its length, then JSON. The values follow in the order of the header.

use crate::files::io::to_json;
use fastps_core::dtype::DType;
use fastps_core::error::Result;
use serde::Serialize;
use sha2::{Digest, Sha256};
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
    metadata: BTreeMap<&'static str, String>,
}

#[derive(Serialize)]
struct Description<'a> {
    #[serde(rename = "__metadata__", skip_serializing_if = "BTreeMap::is_empty")]
    metadata: &'a BTreeMap<&'static str, String>,
    #[serde(flatten)]
    entries: &'a BTreeMap<String, Entry>,
}

impl Layout {
    /// Adds the next tensor and returns its name, with `~` appended if it is taken.
    pub(crate) fn add(&mut self, name: String, shape: Vec<u64>, dtype: DType, elements: usize) -> String {
        let mut name = name;
        while name == "__metadata__" || !self.names.insert(name.clone()) {
            name.push('~');
        }
        let data_offsets = (self.end, self.end + (dtype.size() * elements) as u64);
        self.end = data_offsets.1;
        self.entries.insert(name.clone(), Entry { dtype: code(dtype), shape, data_offsets });
        name
    }

    /// Adds the digests of the tensors, by name, to the metadata.
    pub(crate) fn add_digests(&mut self, digests: &BTreeMap<String, String>) -> Result<()> {
        let json = to_json(digests)?;
        self.metadata.insert("fastps.sha256", String::from_utf8_lossy(&json).into_owned());
        Ok(())
    }

    /// The bytes that precede the values.
    pub(crate) fn header(&self) -> Result<Vec<u8>> {
        let mut json = to_json(&Description { metadata: &self.metadata, entries: &self.entries })?;
        json.resize((8 + json.len()).next_multiple_of(ALIGNMENT_BYTES) - 8, b' ');
        let mut header = (json.len() as u64).to_le_bytes().to_vec();
        header.append(&mut json);
        Ok(header)
    }
}

/// The SHA-256 of a tensor: of its type and shape, such as `F32[2, 3]`, and of its bytes.
pub(crate) struct TensorDigest(Sha256);

impl TensorDigest {
    pub(crate) fn new(shape: &[u64], dtype: DType) -> Self {
        Self(Sha256::new_with_prefix(format!("{}{shape:?}", code(dtype))))
    }

    /// Adds the next bytes.
    pub(crate) fn update(&mut self, bytes: &[u8]) {
        self.0.update(bytes);
    }

    /// The digest in hex.
    pub(crate) fn finish(self) -> String {
        format!("{:x}", self.0.finalize())
    }
}

fn code(dtype: DType) -> &'static str {
    match dtype {
        DType::Float32 => "F32",
        DType::Float64 => "F64",
        DType::BFloat16 => "BF16",
    }
}
