//! Finding whole frames among damaged bytes: where the torn end begins, whether it was durable, and which
//! frames follow it.

use crate::files::io::failed;
use crate::frame::{self, Content};
use crate::log::segment::ZEROS_AHEAD_BYTES;
use fastps_core::error::Result;
use std::fs::File;
use std::io::{BufRead, BufReader, Read, Seek, SeekFrom};
use std::path::Path;

/// Bytes read at a time.
const SCAN_BUFFER_BYTES: usize = 64 << 10;

/// Reads the next frame into `content` and returns its size. `None`: no whole frame. `left` is the number of
/// bytes left in the file.
pub(super) fn next(file: &mut impl Read, left: u64, content: &mut Vec<u8>) -> std::io::Result<Option<u64>> {
    if left < frame::HEADER_BYTES as u64 {
        return Ok(None);
    }
    let mut header = [0; frame::HEADER_BYTES];
    file.read_exact(&mut header)?;
    let fits = |header: &frame::Header| header.length as u64 <= left - frame::HEADER_BYTES as u64;
    let Some(header) = frame::Header::read(&header).filter(fits) else { return Ok(None) };
    content.resize(header.length, 0);
    file.read_exact(content)?;
    Ok(header.fits(content).then_some((frame::HEADER_BYTES + header.length) as u64))
}

/// The number of bytes from `at` on that belong to no whole frame. Zeros written ahead and frames that a
/// server is appending do not count.
pub(super) fn torn_bytes(path: &Path, at: u64) -> std::io::Result<u64> {
    let mut file = File::open(path)?;
    let behind = file.metadata()?.len().saturating_sub(at);
    file.seek(SeekFrom::Start(at))?;
    if next(&mut file, behind, &mut Vec::new())?.is_some() {
        return Ok(0);
    }
    file.seek(SeekFrom::Start(at))?;
    let mut file = BufReader::with_capacity(SCAN_BUFFER_BYTES, file.take(behind));
    let (mut read, mut written) = (0, 0);
    loop {
        let part = file.fill_buf()?;
        if part.is_empty() {
            return Ok(if written == 0 && behind > ZEROS_AHEAD_BYTES { behind } else { written });
        }
        if let Some(last) = part.iter().rposition(|byte| *byte != 0) {
            written = read + last as u64 + 1;
        }
        let n = part.len();
        read += n as u64;
        file.consume(n);
    }
}

/// Returns whether bytes after `at` were durable: a later whole frame records it, or ends the segment.
pub(super) fn was_durable(path: &Path, at: u64) -> std::io::Result<bool> {
    let file = File::open(path)?;
    let (mut from, end, mut content) = (at, file.metadata()?.len(), Vec::new());
    let mut file = BufReader::new(file);
    while let Some(mark) = next_mark(&mut file, from, end)? {
        file.seek(SeekFrom::Start(mark))?;
        let Some(size) = next(&mut file, end - mark, &mut content)? else {
            from = mark + 1;
            continue;
        };
        match frame::read(&content) {
            Some(Content::Durable(offset)) if offset > at => return Ok(true),
            Some(Content::End(_)) => return Ok(true),
            _ => from = mark + size,
        }
    }
    Ok(false)
}

/// The number of pushes in whole frames from `at` on, with any damage between them.
pub(crate) fn count_pushes(path: &Path, at: u64) -> Result<u64> {
    let count = || {
        let file = File::open(path)?;
        let (mut from, end, mut content, mut pushes) = (at, file.metadata()?.len(), Vec::new(), 0);
        let mut file = BufReader::new(file);
        while let Some(mark) = next_mark(&mut file, from, end)? {
            file.seek(SeekFrom::Start(mark))?;
            let size = next(&mut file, end - mark, &mut content)?;
            pushes += u64::from(size.is_some() && matches!(frame::read(&content), Some(Content::Push(_))));
            from = mark + size.unwrap_or(1);
        }
        Ok(pushes)
    };
    count().map_err(|error: std::io::Error| failed("read", path, &error))
}

/// The position of the next frame mark.
pub(super) fn next_mark(file: &mut BufReader<File>, from: u64, end: u64) -> std::io::Result<Option<u64>> {
    file.seek(SeekFrom::Start(from))?;
    let mut four = [0; frame::MARK.len()];
    for (at, byte) in (from..end).zip(file.bytes()) {
        four.rotate_left(1);
        four[3] = byte?;
        if four == frame::MARK {
            return Ok(Some(at + 1 - frame::MARK.len() as u64));
        }
    }
    Ok(None)
}
