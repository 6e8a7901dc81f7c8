//! Direct I/O for long appends: whole blocks, from an aligned buffer, past the page cache. Through the page
//! cache the same append costs several times the CPU time.
//!
//! The last block is padded with zeros and rewritten by the next append. The rewritten bytes are the same
//! each time, so bytes that were durable stay intact. Appends through the page cache rewrite blocks, too.

use fastps_core::failpoint::{self, fail};
use memmap2::MmapMut;
use std::fmt;
use std::fs::File;
use std::io::Result;
use std::os::unix::fs::FileExt;
use std::path::Path;

/// Alignment and granularity of direct writes, in the file and in memory.
const BLOCK_BYTES: usize = 4096;
/// Maximum bytes per write: each completed write interrupts a running thread.
const MAX_WRITE_BYTES: usize = if failpoint::ARE_COMPILED { 64 << 10 } else { 4 << 20 };
/// The disk takes a huge page as one segment, and small pages one by one, a few hundred per request.
const HUGE_PAGE_BYTES: usize = 2 << 20;

/// The end of a file that is only appended to.
pub(crate) struct DirectFile {
    file: File,
    length: u64,
    /// Content of the last block if it is not full.
    tail: Vec<u8>,
    memory: Option<AlignedBuffer>,
}

impl DirectFile {
    /// Opens an empty file. `None`: the file system does not report support for direct writes of this block
    /// size.
    pub(crate) fn open(path: &Path) -> Option<Self> {
        // Crash tests crash between two writes, on every file system.
        let any = || failpoint::ARE_COMPILED.then(|| File::options().write(true).open(path).ok()).flatten();
        Some(Self { file: open_direct(path).or_else(any)?, length: 0, tail: Vec::new(), memory: None })
    }

    /// Appends `parts` and pads the last block with zeros. Returns the end of the padding. After an error,
    /// any part of the data may have been written.
    pub(crate) fn append(&mut self, parts: &[&[u8]]) -> Result<u64> {
        let memory = match self.memory.take() {
            Some(memory) => memory,
            None => AlignedBuffer::new()?,
        };
        let memory = self.memory.insert(memory).bytes();
        let (mut at, mut full) = (self.length - self.tail.len() as u64, 0);
        for mut rest in std::iter::once(&self.tail[..]).chain(parts.iter().copied()) {
            while !rest.is_empty() {
                let (now, later) = rest.split_at(rest.len().min(memory.len() - full));
                memory[full..full + now.len()].copy_from_slice(now);
                (full, rest) = (full + now.len(), later);
                if full == memory.len() {
                    write(&self.file, memory, at)?;
                    (at, full) = (at + full as u64, 0);
                }
            }
        }
        let end = full.next_multiple_of(BLOCK_BYTES);
        memory[full..end].fill(0);
        write(&self.file, &memory[..end], at)?;
        for part in parts {
            self.note_appended(part);
        }
        Ok(at + end as u64)
    }

    /// Records bytes that were appended, by this type or through the page cache.
    pub(crate) fn note_appended(&mut self, bytes: &[u8]) {
        self.length += bytes.len() as u64;
        let begun = (self.length % BLOCK_BYTES as u64) as usize;
        match bytes.len().checked_sub(begun) {
            None => self.tail.extend_from_slice(bytes),
            Some(before) => bytes[before..].clone_into(&mut self.tail),
        }
    }

    /// Makes the next direct write fail: it starts in the middle of a block.
    #[cfg(test)]
    pub(crate) fn misalign(&mut self) {
        self.length += 1;
    }

    /// Frees the buffer until it is needed again.
    pub(crate) fn free_buffer(&mut self) {
        self.memory = None;
    }
}

fn write(file: &File, direct: &[u8], at: u64) -> Result<()> {
    fail("log_blocks").and_then(|()| file.write_all_at(direct, at))
}

/// A buffer of huge pages, where the system has some.
struct AlignedBuffer {
    map: MmapMut,
    first: usize,
}

impl AlignedBuffer {
    fn new() -> Result<Self> {
        let map = MmapMut::map_anon(MAX_WRITE_BYTES + HUGE_PAGE_BYTES)?;
        // Only a hint.
        #[cfg(target_os = "linux")]
        let _ = map.advise(memmap2::Advice::HugePage);
        let first = map.as_ptr().align_offset(HUGE_PAGE_BYTES).min(HUGE_PAGE_BYTES);
        Ok(Self { map, first })
    }

    fn bytes(&mut self) -> &mut [u8] {
        &mut self.map[self.first..self.first + MAX_WRITE_BYTES]
    }
}

#[cfg(target_os = "linux")]
fn open_direct(path: &Path) -> Option<File> {
    use rustix::fs::{AtFlags, Mode, OFlags, StatxFlags, open, statx};
    let file = open(path, OFlags::WRONLY | OFlags::DIRECT | OFlags::CLOEXEC, Mode::empty()).ok()?;
    let said = statx(&file, "", AtFlags::EMPTY_PATH, StatxFlags::DIOALIGN).ok()?;
    // Zero: direct writes are not supported, or the kernel is too old to say.
    let fits = |align: u32| align > 0 && BLOCK_BYTES.is_multiple_of(align as usize);
    (fits(said.stx_dio_mem_align) && fits(said.stx_dio_offset_align)).then(|| file.into())
}

#[cfg(not(target_os = "linux"))]
fn open_direct(_path: &Path) -> Option<File> {
    None
}

impl fmt::Debug for DirectFile {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DirectFile").field("length", &self.length).finish_non_exhaustive()
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    /// Works with any file, so that the test runs on every file system.
    fn direct(path: &Path) -> DirectFile {
        let file = || File::options().write(true).open(path).unwrap();
        let file = open_direct(path).unwrap_or_else(file);
        DirectFile { file, length: 0, tail: Vec::new(), memory: None }
    }

    #[test]
    fn direct_and_cached_appends_mix_and_pad_with_zeros() {
        let path = std::env::temp_dir().join(format!("fastps-direct-{}", std::process::id()));
        let other = File::create(&path).unwrap();
        let (mut direct, mut whole) = (direct(&path), Vec::new());
        let lengths = [
            1,
            0,
            BLOCK_BYTES - 2,
            1,
            BLOCK_BYTES,
            3,
            2 * BLOCK_BYTES - 3,
            MAX_WRITE_BYTES,
            5,
            MAX_WRITE_BYTES - 5,
            2 * MAX_WRITE_BYTES + 7,
            100,
            4000,
        ];
        for (k, length) in lengths.into_iter().enumerate() {
            let part: Vec<u8> = (0..length).map(|at| (at % 250 + k + 1) as u8).collect();
            if k % 4 == 3 {
                other.write_all_at(&part, whole.len() as u64).unwrap();
                direct.note_appended(&part);
                whole.extend_from_slice(&part);
                continue;
            }
            let (first, last) = part.split_at(length / 3);
            let end = direct.append(&[first, last]).unwrap();
            whole.extend_from_slice(&part);
            let read = std::fs::read(&path).unwrap();
            assert!(end == whole.len().next_multiple_of(BLOCK_BYTES) as u64 && end <= read.len() as u64);
            assert!(read.starts_with(&whole) && read[whole.len()..].iter().all(|byte| *byte == 0), "{k}");
            if k % 3 == 0 {
                direct.free_buffer();
            }
        }
        std::fs::remove_file(&path).unwrap();
    }
}
