//! CRC-32C of byte slices, of data streamed to a file, and of a line of JSON.

use crc_fast::{CrcAlgorithm, Digest};
use std::io::{Result, Write};

const ALGORITHM: CrcAlgorithm = CrcAlgorithm::Crc32Iscsi;

pub(crate) fn crc32c(bytes: &[u8]) -> u32 {
    crc_fast::checksum(ALGORITHM, bytes) as u32
}

/// Appends a line with the checksum of a line of JSON.
pub(crate) fn with_checksum(mut json: Vec<u8>) -> Vec<u8> {
    let crc = crc32c(&json);
    json.extend_from_slice(format!("\ncrc32c {crc:08x}\n").as_bytes());
    json
}

/// The JSON of a text made by [`with_checksum`]. `None`: the text is damaged.
pub(crate) fn without_checksum(text: &[u8]) -> Option<&[u8]> {
    let at = text.iter().position(|byte| *byte == b'\n')?;
    let (json, rest) = text.split_at(at);
    (rest == format!("\ncrc32c {:08x}\n", crc32c(json)).as_bytes()).then_some(json)
}

/// A writer that counts bytes and computes their CRC-32C.
pub(crate) struct ChecksumWriter<W> {
    inner: W,
    digest: Digest,
    pub(crate) bytes: u64,
}

impl<W> ChecksumWriter<W> {
    pub(crate) fn new(inner: W) -> Self {
        Self { inner, digest: Digest::new(ALGORITHM), bytes: 0 }
    }

    pub(crate) fn get_ref(&self) -> &W {
        &self.inner
    }

    /// Returns the checksum and the inner writer.
    pub(crate) fn finish(self) -> (u32, W) {
        (self.digest.finalize() as u32, self.inner)
    }
}

impl<W: Write> Write for ChecksumWriter<W> {
    fn write(&mut self, bytes: &[u8]) -> Result<usize> {
        let written = self.inner.write(bytes)?;
        self.digest.update(&bytes[..written]);
        self.bytes += written as u64;
        Ok(written)
    }

    fn flush(&mut self) -> Result<()> {
        self.inner.flush()
    }
}
