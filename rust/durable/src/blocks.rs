//! Appending past the system's cache: whole blocks, from memory of our own straight to the disk. A page of the cache costs the
//! processor several times as much, for it is found, filled, written and given back.

use bytemuck::{Pod, Zeroable};
use std::fmt;
use std::fs::File;
use std::io::Result;
use std::os::unix::fs::FileExt;
use std::path::Path;

/// What is written begins at a multiple of it, in memory and in the file, and is as long as one.
const BLOCK: usize = 4096;
/// Blocks that are written at once, at most.
const MOST: usize = (2 << 20) / BLOCK;

#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C, align(4096))]
struct Block([u8; BLOCK]);

/// The end of a file that only grows.
pub(crate) struct Blocks {
    file: File,
    length: u64,
    /// What the last block has, unless it is full.
    tail: Vec<u8>,
    memory: Vec<Block>,
}

impl Blocks {
    /// Of a file that is empty. `None`: its file system does not say that it takes such blocks.
    pub(crate) fn open(path: &Path) -> Option<Self> {
        let file = open_direct(path)?;
        Some(Self { file, length: 0, tail: Vec::new(), memory: Vec::new() })
    }

    /// Appends these parts, and zeros up to the end of their last block; tells where those end.
    pub(crate) fn append(&mut self, parts: &[&[u8]]) -> Result<u64> {
        let begin = self.length - self.tail.len() as u64;
        let all: usize = self.tail.len() + parts.iter().map(|part| part.len()).sum::<usize>();
        let blocks = all.div_ceil(BLOCK).min(MOST);
        if self.memory.len() < blocks {
            self.memory.resize(blocks, Zeroable::zeroed());
        }
        let memory: &mut [u8] = bytemuck::cast_slice_mut(&mut self.memory);
        let (mut at, mut full) = (begin, 0);
        for mut rest in std::iter::once(&self.tail[..]).chain(parts.iter().copied()) {
            while !rest.is_empty() {
                let (now, later) = rest.split_at(rest.len().min(memory.len() - full));
                memory[full..full + now.len()].copy_from_slice(now);
                (full, rest) = (full + now.len(), later);
                if full == memory.len() {
                    self.file.write_all_at(memory, at)?;
                    (at, full) = (at + full as u64, 0);
                }
            }
        }
        let end = full.next_multiple_of(BLOCK);
        memory[full..end].fill(0);
        self.file.write_all_at(&memory[..end], at)?;
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

    /// Memory is taken again when it is needed.
    pub(crate) fn rest(&mut self) {
        self.memory = Vec::new();
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
        Blocks {
            file: open_direct(path).unwrap_or_else(file),
            length: 0,
            tail: Vec::new(),
            memory: Vec::new(),
        }
    }

    #[test]
    fn what_is_appended_in_either_way_lies_there_and_zeros_behind_it() {
        let path = std::env::temp_dir().join(format!("fastps-blocks-{}", std::process::id()));
        let other = File::create(&path).unwrap();
        let (mut blocks, mut whole) = (blocks(&path), Vec::new());
        let most = MOST * BLOCK;
        let lengths =
            [1, 0, BLOCK - 2, 1, BLOCK, 3, 2 * BLOCK - 3, most, 5, most - 5, 2 * most + 7, 100, 4000];
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
