//! Removing files: a long segment is freed in steps, so that no sync waits for all of it.

use crate::files::io::failed;
use fastps_core::error::Result;
use rustix::fs::FlockOperation;
use std::fs::{File, OpenOptions};
use std::io::ErrorKind;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::time::Instant;

/// So much of a file is freed at a time.
const STEP: u64 = 8 << 20;
/// The disk is left to others for so many times what that took.
const PAUSE: u32 = 3;

/// A segment that is not removed part by part while this is open; one that somebody else has locked is an error.
pub(crate) fn open_segment(path: &Path) -> std::io::Result<File> {
    let file = File::open(path)?;
    match rustix::fs::flock(&file, FlockOperation::NonBlockingLockShared) {
        Err(rustix::io::Errno::WOULDBLOCK) => Err(std::io::Error::new(
            ErrorKind::ResourceBusy,
            "it is being removed, or another program has locked it",
        )),
        // A file system without locks: there nothing is shrunk.
        _ => Ok(file),
    }
}

/// Frees most of a segment that is to be removed, unless it is read, or has another name: a system that frees all at once may keep
/// syncs of others waiting meanwhile, as the log's. Not for snapshots, which anybody may have mapped.
pub(super) fn shrink(path: &Path) {
    let Ok(file) = OpenOptions::new().write(true).open(path) else { return };
    let Ok(found) = file.metadata() else { return };
    if found.nlink() > 1 || rustix::fs::flock(&file, FlockOperation::NonBlockingLockExclusive).is_err() {
        return;
    }
    let mut left = found.len();
    while left > STEP {
        left -= STEP;
        let began = Instant::now();
        if file.set_len(left).is_err() {
            return;
        }
        std::thread::sleep(PAUSE * began.elapsed());
    }
}

/// Removes a file or a folder; one that is not there is no error.
pub(crate) fn remove(path: &Path) -> Result<()> {
    let removed = if path.is_dir() { std::fs::remove_dir_all(path) } else { std::fs::remove_file(path) };
    match removed {
        Err(error) if error.kind() != ErrorKind::NotFound => Err(failed("remove", path, &error)),
        _ => Ok(()),
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::files::directory::Directory;
    use std::io::Read;

    #[test]
    fn a_segment_is_removed_and_whoever_has_it_keeps_it() {
        let path = std::env::temp_dir().join(format!("fastps-directory-{}", std::process::id()));
        let _ = std::fs::remove_dir_all(&path);
        let directory = Directory::open(&path).unwrap();
        let bytes: Vec<u8> = (0..3 * STEP).map(|at| at as u8).collect();
        for number in 1..4 {
            std::fs::write(directory.segment(number), &bytes).unwrap();
        }
        let mut kept = open_segment(&directory.segment(1)).unwrap();
        let other = path.join("other");
        std::fs::hard_link(directory.segment(2), &other).unwrap();
        let late = File::open(directory.segment(3)).unwrap();
        for number in 1..4 {
            directory.discard_segment(number).unwrap();
        }
        assert_eq!(directory.segments().unwrap(), [0; 0]);
        let mut read = Vec::new();
        kept.read_to_end(&mut read).unwrap();
        assert!(read == bytes && std::fs::read(other).unwrap() == bytes);
        assert_eq!(late.metadata().unwrap().len(), STEP);
        drop(directory);
        std::fs::remove_dir_all(path).unwrap();
    }

    #[test]
    fn a_segment_that_is_being_removed_is_not_opened() {
        let path = std::env::temp_dir().join(format!("fastps-shrunk-{}", std::process::id()));
        std::fs::write(&path, b"something").unwrap();
        let removing = File::open(&path).unwrap();
        rustix::fs::flock(&removing, FlockOperation::NonBlockingLockExclusive).unwrap();
        assert_eq!(open_segment(&path).unwrap_err().kind(), ErrorKind::ResourceBusy);
        drop(removing);
        open_segment(&path).unwrap();
        std::fs::remove_file(path).unwrap();
    }
}
