//! Reading a sealed segment before it is copied.

use crate::files::checksum::ChecksumWriter;
use crate::files::directory::Directory;
use crate::files::io::failed;
use crate::files::removal::open_segment;
use crate::log::read::{SegmentEnd, read};
use crate::tools::copy::past::Sealed;
use fastps_core::error::{Error, Result};
use std::fs::File;
use std::io::{ErrorKind, Read, Seek, SeekFrom};
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::time::UNIX_EPOCH;

impl Sealed {
    /// Opens a segment of a shard's directory that is written no more, and reads it to its end. It stays readable
    /// if a server removes it. `None`: it was removed. Fails if it is damaged.
    pub fn open(directory: &Path, number: u64) -> Result<Option<(Self, File, PathBuf)>> {
        let path = Directory::unlocked(directory).segment(number);
        let mut file = match open_segment(&path) {
            Ok(file) => file,
            Err(error) if matches!(error.kind(), ErrorKind::NotFound | ErrorKind::ResourceBusy) => {
                return Ok(None);
            }
            Err(error) => return Err(failed("read", &path, &error)),
        };
        let fail = |error| failed("read", &path, &error);
        let found = file.metadata().map_err(fail)?;
        let (_, end) =
            match read(&path, number, None, |_, _| Ok(ControlFlow::Continue(()))).map_err(Error::from) {
                Err(_) if !path.exists() => return Ok(None),
                ended => ended?,
            };
        let (next, bytes) = match end {
            SegmentEnd::Continued(next) => (next, found.len()),
            SegmentEnd::Open { whole, .. } => (0, whole),
            SegmentEnd::Ahead => (0, 0),
        };
        let mut summed = ChecksumWriter::new(std::io::sink());
        std::io::copy(&mut (&file).take(bytes), &mut summed).map_err(fail)?;
        file.seek(SeekFrom::Start(0)).map_err(fail)?;
        let time = found.modified().ok().and_then(|time| time.duration_since(UNIX_EPOCH).ok());
        let time = time.map_or(0, |time| time.as_millis() as u64);
        Ok(Some((Self { number, next, bytes, crc32c: summed.finish().0, time }, file, path)))
    }
}
