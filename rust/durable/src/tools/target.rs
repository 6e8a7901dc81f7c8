//! Where tools write: a new directory, renamed when complete.

use crate::files::io::failed;
use crate::files::names::UNFINISHED_SUFFIX;
use fastps_core::error::{Error, Kind, Result};
use std::path::{Path, PathBuf};

/// The path under which `target` is written before the rename. `target` must not exist or must be an empty
/// directory.
pub(crate) fn begin(target: &Path) -> Result<PathBuf> {
    let taken = |path: &Path, what: &str| {
        Err(Error::new(Kind::Config, format!("{} {what}", path.display()))
            .expected("a new directory", path.display()))
    };
    match std::fs::read_dir(target).map(Iterator::count) {
        Ok(0) => {}
        Ok(_) => return taken(target, "is not empty"),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => {}
        Err(error) => return Err(failed("read", target, &error)),
    }
    let Some(name) = target.file_name() else { return taken(target, "is not a directory name") };
    let mut name = name.to_owned();
    name.push(UNFINISHED_SUFFIX);
    let unfinished = target.with_file_name(name);
    if unfinished.exists() {
        return taken(&unfinished, "already exists, perhaps from an interrupted restore: remove it");
    }
    Ok(unfinished)
}

/// The directory that contains `path`.
pub(crate) fn parent(path: &Path) -> &Path {
    path.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."))
}
