//! Errors of file operations, JSON, and making directory entries durable.

use fastps_core::error::{Error, Kind, Result};
use fastps_core::failpoint::fail;
use serde::Serialize;
use std::fs::File;
use std::io::ErrorKind;
use std::path::Path;

/// An error that names the failed operation and the file. Its kind says whether the user can fix it.
pub(crate) fn failed(what: &str, path: &Path, error: &std::io::Error) -> Error {
    let kind = match error.kind() {
        ErrorKind::StorageFull | ErrorKind::QuotaExceeded => Kind::Unavailable,
        ErrorKind::PermissionDenied
        | ErrorKind::ReadOnlyFilesystem
        | ErrorKind::NotADirectory
        | ErrorKind::InvalidFilename
        | ErrorKind::InvalidInput => Kind::Config,
        _ => Kind::Internal,
    };
    Error::new(kind, format!("cannot {what} {}: {error}", path.display()))
}

/// Encodes a value as JSON.
pub(crate) fn to_json(value: &impl Serialize) -> Result<Vec<u8>> {
    serde_json::to_vec(value).map_err(|error| Error::new(Kind::Internal, error.to_string()))
}

/// Makes renames, creations and removals in a directory durable.
pub(crate) fn sync_directory(path: &Path) -> Result<()> {
    let opened = fail("directory_sync").and_then(|()| File::open(path));
    let synced = opened.and_then(|directory| directory.sync_all());
    synced.map_err(|error| failed("sync", path, &error))
}
