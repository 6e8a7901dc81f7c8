//! Files that a server reads again while it runs.

use rustix::fs::OFlags;
use std::fs::{File, Metadata, OpenOptions};
use std::io::{Error, ErrorKind, Result};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

/// Opens a file for reading, and fails for a FIFO or a device: these could block, or have no end. Symbolic
/// links are followed.
pub(crate) fn open(file: &Path) -> Result<(File, Metadata)> {
    let flags = OFlags::NONBLOCK.bits() as i32;
    let open = OpenOptions::new().read(true).custom_flags(flags).open(file)?;
    let about = open.metadata()?;
    if about.is_file() {
        return Ok((open, about));
    }
    Err(Error::new(ErrorKind::InvalidInput, "it is not a regular file"))
}
