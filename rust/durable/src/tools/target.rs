//! Where a tool writes: a new directory, which gets its name when it is complete.

use crate::files::io::failed;
use crate::files::names::UNFINISHED;
use fastps_core::error::{Error, Kind, Result};
use std::path::{Path, PathBuf};

/// Where the target is written before it has its name. The target must be new, or an empty folder.
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
    let Some(name) = target.file_name() else { return taken(target, "is no name for a directory") };
    let mut name = name.to_owned();
    name.push(UNFINISHED);
    let unfinished = target.with_file_name(name);
    if unfinished.exists() {
        return taken(&unfinished, "is there, perhaps of a restore that was ended: remove it");
    }
    Ok(unfinished)
}

/// The folder that a path lies in.
pub(crate) fn parent(path: &Path) -> &Path {
    path.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."))
}
