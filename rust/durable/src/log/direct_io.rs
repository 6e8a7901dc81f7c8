//! Appending past the system's cache: whole blocks, from memory of our own straight to the disk. A page of the cache costs the
//! processor several times as much, for it is found, filled, written and given back.
//!
//! The last block is filled up with zeros, and written again with what comes behind it. So a block may be written again whose first
//! bytes are durable, and were promised; those are the same each time. Who appends through the system's cache does that, too.

use fastps_core::failpoint::{self, fail};
use memmap2::MmapMut;
use std::fmt;
use std::fs::File;
use std::io::Result;
use std::os::unix::fs::FileExt;
use std::path::Path;

/// What is written begins at a multiple of it, in memory and in the file, and is as long as one.
const BLOCK: usize = 4096;
/// So much is written at once, at most: each end of a write stops whoever runs.
const MOST: usize = if failpoint::ARE_COMPILED { 64 << 10 } else { 4 << 20 };
/// A page of this size is one piece for the disk; of small ones it takes some hundred at a time, each on its own.
const HUGE: usize = 2 << 20;

/// The end of a file that only grows.
pub(crate) struct Blocks {
    file: File,
    length: u64,
    /// What the last block has, unless it is full.
    tail: Vec<u8>,
    memory: Option<Memory>,
}

impl Blocks {
    /// Of a file that is empty. `None`: its file system does not say that it takes such blocks.
    pub(crate) fn open(path: &Path) -> Option<Self> {
        // Where crashes are tested, they come between two writes on every file system.
        let any = || failpoint::ARE_COMPILED.then(|| File::options().write(true).open(path).ok()).flatten();
        Some(Self { file: open_direct(path).or_else(any)?, length: 0, tail: Vec::new(), memory: None })
    }

    /// Appends these parts, and zeros up to the end of their last block; tells where those end. What fails may be there in part.
    pub(crate) fn append(&mut self, parts: &[&[u8]]) -> Result<u64> {
        let memory = match self.memory.take() {
            Some(memory) => memory,
            None => Memory::new()?,
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
        let end = full.next_multiple_of(BLOCK);
        memory[full..end].fill(0);
        write(&self.file, &memory[..end], at)?;
        for part in parts {
            self.passed(part);
        }
        Ok(at + end as u64)
    }

    /// These bytes were appended, here or in another way.
    pub(crate) fn passed(&mut self, bytes: &[u8]) {
        self.length += bytes.len() as u64;
        let begun = (self.length % BLOCK as u64) as usize;
        match bytes.len().checked_sub(begun) {
            None => self.tail.extend_from_slice(bytes),
            Some(before) => bytes[before..].clone_into(&mut self.tail),
        }
    }

    /// From here on the file takes none: what is appended begins in the middle of a block.
    #[cfg(test)]
    pub(crate) fn spoil(&mut self) {
        self.length += 1;
    }

    /// Memory is taken again when it is needed.
    pub(crate) fn rest(&mut self) {
        self.memory = None;
    }
}

fn write(file: &File, blocks: &[u8], at: u64) -> Result<()> {
    fail("log_blocks").and_then(|()| file.write_all_at(blocks, at))
}

/// Huge pages, where the system has some.
struct Memory {
    map: MmapMut,
    first: usize,
}

impl Memory {
    fn new() -> Result<Self> {
        let map = MmapMut::map_anon(MOST + HUGE)?;
        // A hint.
        #[cfg(target_os = "linux")]
        let _ = map.advise(memmap2::Advice::HugePage);
        let first = map.as_ptr().align_offset(HUGE).min(HUGE);
        Ok(Self { map, first })
    }

    fn bytes(&mut self) -> &mut [u8] {
        &mut self.map[self.first..self.first + MOST]
    }
}

#[cfg(target_os = "linux")]
fn open_direct(path: &Path) -> Option<File> {
    use rustix::fs::{AtFlags, Mode, OFlags, StatxFlags, open, statx};
    let file = open(path, OFlags::WRONLY | OFlags::DIRECT | OFlags::CLOEXEC, Mode::empty()).ok()?;
    let said = statx(&file, "", AtFlags::EMPTY_PATH, StatxFlags::DIOALIGN).ok()?;
    // Zero: it takes none, or is older than the question.
    let fits = |align: u32| align > 0 && BLOCK.is_multiple_of(align as usize);
    (fits(said.stx_dio_mem_align) && fits(said.stx_dio_offset_align)).then(|| file.into())
}

#[cfg(not(target_os = "linux"))]
fn open_direct(_path: &Path) -> Option<File> {
    None
}

impl fmt::Debug for Blocks {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Blocks").field("length", &self.length).finish_non_exhaustive()
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    /// The same with any file, so that this is tested on every file system.
    fn blocks(path: &Path) -> Blocks {
        let file = || File::options().write(true).open(path).unwrap();
        let file = open_direct(path).unwrap_or_else(file);
        Blocks { file, length: 0, tail: Vec::new(), memory: None }
    }

    #[test]
    fn what_is_appended_in_either_way_lies_there_and_zeros_behind_it() {
        let path = std::env::temp_dir().join(format!("fastps-blocks-{}", std::process::id()));
        let other = File::create(&path).unwrap();
        let (mut blocks, mut whole) = (blocks(&path), Vec::new());
        let lengths =
            [1, 0, BLOCK - 2, 1, BLOCK, 3, 2 * BLOCK - 3, MOST, 5, MOST - 5, 2 * MOST + 7, 100, 4000];
        for (k, length) in lengths.into_iter().enumerate() {
            let part: Vec<u8> = (0..length).map(|at| (at % 250 + k + 1) as u8).collect();
            if k % 4 == 3 {
                other.write_all_at(&part, whole.len() as u64).unwrap();
                blocks.passed(&part);
                whole.extend_from_slice(&part);
                continue;
            }
            let (first, last) = part.split_at(length / 3);
            let end = blocks.append(&[first, last]).unwrap();
            whole.extend_from_slice(&part);
            let read = std::fs::read(&path).unwrap();
            assert!(end == whole.len().next_multiple_of(BLOCK) as u64 && end <= read.len() as u64);
            assert!(read.starts_with(&whole) && read[whole.len()..].iter().all(|byte| *byte == 0), "{k}");
            if k % 3 == 0 {
                blocks.rest();
            }
        }
        std::fs::remove_file(&path).unwrap();
    }
}
