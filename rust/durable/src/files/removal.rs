//! Removing files. Long segments are truncated step by step first, so that freeing their blocks does not
//! delay syncs of other files.

use crate::files::io::failed;
use fastps_core::error::Result;
use rustix::fs::FlockOperation;
use std::fs::{File, OpenOptions};
use std::io::ErrorKind;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::time::Instant;

/// Bytes freed per truncation.
const TRUNCATE_STEP_BYTES: u64 = 8 << 20;
/// The pause after each truncation, as a multiple of the time it took.
const TRUNCATE_PAUSE_FACTOR: u32 = 3;

/// Opens a segment and keeps it from being truncated while it is open. Fails if it is being removed.
pub(crate) fn open_segment(path: &Path) -> std::io::Result<File> {
    let file = File::open(path)?;
    match rustix::fs::flock(&file, FlockOperation::NonBlockingLockShared) {
        Err(rustix::io::Errno::WOULDBLOCK) => Err(std::io::Error::new(
            ErrorKind::ResourceBusy,
            "the segment is being removed, or another program has locked it",
        )),
        // File systems without locks: segments are not truncated there.
        _ => Ok(file),
    }
}

/// Truncates a segment that is about to be removed, unless it is open or has another hard link. File systems
/// that free many blocks at once may delay syncs of other files, such as the log. Snapshots are not
/// truncated: another program may have mapped them.
pub(super) fn shrink(path: &Path) {
    let Ok(file) = OpenOptions::new().write(true).open(path) else { return };
    let Ok(found) = file.metadata() else { return };
    if found.nlink() > 1 || rustix::fs::flock(&file, FlockOperation::NonBlockingLockExclusive).is_err() {
        return;
    }
    let mut left = found.len();
    while left > TRUNCATE_STEP_BYTES {
        left -= TRUNCATE_STEP_BYTES;
        let began = Instant::now();
        if file.set_len(left).is_err() {
            return;
        }
        std::thread::sleep(TRUNCATE_PAUSE_FACTOR * began.elapsed());
    }
}

/// Removes a file or a directory tree. A missing path is not an error.
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
    fn a_removed_segment_stays_readable_where_it_is_open_or_linked() {
        let path = std::env::temp_dir().join(format!("fastps-directory-{}", std::process::id()));
        let _ = std::fs::remove_dir_all(&path);
        let directory = Directory::open(&path).unwrap();
        let bytes: Vec<u8> = (0..3 * TRUNCATE_STEP_BYTES).map(|at| at as u8).collect();
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
        assert_eq!(late.metadata().unwrap().len(), TRUNCATE_STEP_BYTES);
        drop(directory);
        std::fs::remove_dir_all(path).unwrap();
    }

    #[test]
    fn a_segment_being_removed_cannot_be_opened() {
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
