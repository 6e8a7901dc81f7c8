//! Frames: how one thing lies in a log or in a list of slices. A mark, a length, a checksum, and what they are about.

mod content;
mod decode;
mod encode;
mod origin;

pub(crate) use content::{Content, Piece};
pub(crate) use decode::read;
pub(crate) use encode::{durable, end, event, fence, push, segment, slice};
pub(crate) use origin::{Author, Origin, random};

use crate::files::checksum::crc32c;
use fastps_core::error::{Error, Kind, Result};

/// Begins every frame.
pub(crate) const MARK: [u8; 4] = *b"fpsR";
/// Mark, length and checksum.
pub(crate) const HEADER: usize = 12;
/// Longest content of a frame.
pub(crate) const MAX_CONTENT: usize = 64 << 20;
/// The format that this version writes.
pub(crate) const FORMAT: u32 = 2;
/// The oldest that it reads. Files of format 1 do not tell which server wrote them.
pub(crate) const OLDEST: u32 = 1;

/// Fails where this version does not read a file's format; `name` is for people.
pub(crate) fn check_format(format: u32, name: &str) -> Result<()> {
    if (OLDEST..=FORMAT).contains(&format) {
        return Ok(());
    }
    Err(Error::new(Kind::Config, format!("{name} is of another version"))
        .expected(format!("format {OLDEST} to {FORMAT}"), format))
}

/// Appends a frame with the content that `write` appends; its checksum is for [`seal`]. False: it is too long, and nothing was
/// appended.
fn frame(to: &mut Vec<u8>, write: impl FnOnce(&mut Vec<u8>)) -> bool {
    let start = to.len();
    to.extend_from_slice(&[0; HEADER]);
    write(to);
    let length = to.len() - start - HEADER;
    if length > MAX_CONTENT {
        to.truncate(start);
        return false;
    }
    let length = (length as u32).to_le_bytes();
    to[start..start + 4].copy_from_slice(&MARK);
    to[start + 4..start + 8].copy_from_slice(&length);
    true
}

/// Puts in the checksums of frames that lie one after the other: not where a frame is made, since that holds up a slice.
pub(crate) fn seal(mut frames: &mut [u8]) {
    while let Some((header, rest)) = frames.split_first_chunk_mut::<HEADER>() {
        let length = [header[4], header[5], header[6], header[7]];
        let Some((content, rest)) = rest.split_at_mut_checked(u32::from_le_bytes(length) as usize) else {
            return;
        };
        header[8..].copy_from_slice(&sum(length, content).to_le_bytes());
        frames = rest;
    }
}

/// The length is part of what is summed; its own place in the frame is before the sum.
fn sum(length: [u8; 4], content: &[u8]) -> u32 {
    crc32c(content) ^ crc32c(&length)
}

/// The first frame of `bytes`: its content, and the bytes behind it. `None`: there is no whole frame.
pub(crate) fn split(bytes: &[u8]) -> Option<(&[u8], &[u8])> {
    let (header, content, rest) = divide(bytes)?;
    header.fits(content).then_some((content, rest))
}

/// The same of bytes whose checksums were compared already.
pub(crate) fn split_whole(bytes: &[u8]) -> Option<(&[u8], &[u8])> {
    divide(bytes).map(|(_, content, rest)| (content, rest))
}

/// How many bytes of whole frames there are, before anything else.
pub(crate) fn whole(bytes: &[u8]) -> usize {
    let mut rest = bytes;
    while let Some((_, behind)) = split(rest) {
        rest = behind;
    }
    bytes.len() - rest.len()
}

fn divide(bytes: &[u8]) -> Option<(Header, &[u8], &[u8])> {
    let (header, rest) = bytes.split_first_chunk::<HEADER>()?;
    let header = Header::read(header)?;
    let (content, rest) = rest.split_at_checked(header.length)?;
    Some((header, content, rest))
}

/// The beginning of a frame.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Header {
    pub(crate) length: usize,
    crc: u32,
}

impl Header {
    /// `None`: no frame begins like this.
    pub(crate) fn read(bytes: &[u8; HEADER]) -> Option<Self> {
        decode::Reader(bytes).header()
    }

    pub(crate) fn fits(self, content: &[u8]) -> bool {
        content.len() == self.length && sum((self.length as u32).to_le_bytes(), content) == self.crc
    }
}
