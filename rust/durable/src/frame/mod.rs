//! Frames: the records of log segments and of a snapshot's list of slices. A frame is a mark, a length, a
//! checksum and a content; `README.md` describes the bytes.

mod content;
mod decode;
mod encode;
mod origin;

pub(crate) use content::{Content, Mark, RanProgram, SliceEntry, VectorsEntry};
pub(crate) use decode::read;
pub(crate) use encode::{
    array, durable, end, event, fence, mark, program, push, segment, slice, space_closed, space_opened, time,
    vectors,
};
pub(crate) use origin::{Author, Origin, random_id};

use crate::files::checksum::crc32c;
use fastps_core::error::{Error, Kind, Result};

/// The first bytes of every frame.
pub(crate) const MARK: [u8; 4] = *b"fpsR";
/// Bytes of the mark, the length and the checksum.
pub(crate) const HEADER_BYTES: usize = 12;
/// Maximum content of a frame, in bytes.
pub(crate) const MAX_CONTENT_BYTES: usize = 64 << 20;
/// The file format that this version writes.
pub(crate) const FORMAT: u32 = 2;
/// The oldest format that this version reads. Files of format 1 do not name the server that wrote them.
pub(crate) const OLDEST_FORMAT: u32 = 1;

/// Fails if this version cannot read a file's format. `name` appears in the error.
pub(crate) fn check_format(format: u32, name: &str) -> Result<()> {
    if (OLDEST_FORMAT..=FORMAT).contains(&format) {
        return Ok(());
    }
    Err(Error::new(Kind::Config, format!("{name} has an unsupported format"))
        .expected(format!("format {OLDEST_FORMAT} to {FORMAT}"), format))
}

/// Appends a frame whose content `write` appends; [`seal`] adds the checksum. Returns false, with nothing
/// appended, if the content is too long.
fn frame(to: &mut Vec<u8>, write: impl FnOnce(&mut Vec<u8>)) -> bool {
    let start = to.len();
    to.extend_from_slice(&[0; HEADER_BYTES]);
    write(to);
    let length = to.len() - start - HEADER_BYTES;
    if length > MAX_CONTENT_BYTES {
        to.truncate(start);
        return false;
    }
    let length = (length as u32).to_le_bytes();
    to[start..start + 4].copy_from_slice(&MARK);
    to[start + 4..start + 8].copy_from_slice(&length);
    true
}

/// Fills in the checksums of consecutive frames. The writing thread does this, since slices are locked while
/// frames are encoded.
pub(crate) fn seal(mut frames: &mut [u8]) {
    while let Some((header, rest)) = frames.split_first_chunk_mut::<HEADER_BYTES>() {
        let length = [header[4], header[5], header[6], header[7]];
        let Some((content, rest)) = rest.split_at_mut_checked(u32::from_le_bytes(length) as usize) else {
            return;
        };
        header[8..].copy_from_slice(&sum(length, content).to_le_bytes());
        frames = rest;
    }
}

/// The checksum also covers the length, which precedes it in the frame.
fn sum(length: [u8; 4], content: &[u8]) -> u32 {
    crc32c(content) ^ crc32c(&length)
}

/// Splits off the first frame: returns its content and the bytes after it. `None`: `bytes` does not start
/// with a whole frame.
pub(crate) fn split(bytes: &[u8]) -> Option<(&[u8], &[u8])> {
    let (header, content, rest) = divide(bytes)?;
    header.fits(content).then_some((content, rest))
}

/// Like [`split`], for bytes whose checksums were verified before.
pub(crate) fn split_whole(bytes: &[u8]) -> Option<(&[u8], &[u8])> {
    divide(bytes).map(|(_, content, rest)| (content, rest))
}

/// The length of the whole frames at the start of `bytes`.
pub(crate) fn whole(bytes: &[u8]) -> usize {
    let mut rest = bytes;
    while let Some((_, behind)) = split(rest) {
        rest = behind;
    }
    bytes.len() - rest.len()
}

fn divide(bytes: &[u8]) -> Option<(Header, &[u8], &[u8])> {
    let (header, rest) = bytes.split_first_chunk::<HEADER_BYTES>()?;
    let header = Header::read(header)?;
    let (content, rest) = rest.split_at_checked(header.length)?;
    Some((header, content, rest))
}

/// The header of a frame.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Header {
    pub(crate) length: usize,
    crc: u32,
}

impl Header {
    /// `None`: not the header of a frame.
    pub(crate) fn read(bytes: &[u8; HEADER_BYTES]) -> Option<Self> {
        decode::Decoder(bytes).header()
    }

    pub(crate) fn fits(self, content: &[u8]) -> bool {
        content.len() == self.length && sum((self.length as u32).to_le_bytes(), content) == self.crc
    }
}
