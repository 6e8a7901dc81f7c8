//! Files that commands write: new ones, which never overwrite, and the replacement of a file at once.

use fastps_core::error::{Error, Kind, Result};
use rustix::fs::{FlockOperation, flock};
use std::fmt::Display;
use std::fs::{DirBuilder, File, OpenOptions, Permissions};
use std::io::{ErrorKind, Write};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt, PermissionsExt, fchown};
use std::path::{Path, PathBuf};

/// Mode of a file with a secret.
pub(crate) const PRIVATE: u32 = 0o600;
/// Mode of a file that everybody may read.
pub(crate) const PUBLIC: u32 = 0o644;

fn failed(what: &str, path: &Path, error: impl Display) -> Error {
    Error::new(Kind::Config, format!("cannot {what} {}: {error}", path.display()))
}

/// Makes a folder that only its owner can enter; one that exists must be so already.
pub(crate) fn private_folder(folder: &Path) -> Result<()> {
    match DirBuilder::new().mode(0o700).create(folder) {
        Err(error) if error.kind() == ErrorKind::AlreadyExists => {}
        made => return made.map_err(|error| failed("make the folder", folder, error)),
    }
    let about = folder.metadata().map_err(|error| failed("read", folder, error))?;
    if !about.is_dir() {
        return Err(failed("use the folder", folder, "it is a file"));
    }
    if about.mode() & 0o077 != 0 {
        let folder = folder.display();
        let message = format!("others can enter the folder {folder}: run chmod 700 {folder}");
        return Err(
            Error::new(Kind::Config, message).expected("mode 700", format!("{:03o}", about.mode() & 0o777))
        );
    }
    Ok(())
}

/// Writes a new file durably. On an error nothing of it remains.
pub(crate) fn create(path: &Path, mode: u32, text: &str) -> Result<()> {
    let file = OpenOptions::new().write(true).create_new(true).mode(mode).open(path);
    let mut file = file.map_err(|error| match error.kind() {
        ErrorKind::AlreadyExists => exists(path),
        _ => failed("create", path, error),
    })?;
    let written = file.write_all(text.as_bytes()).and_then(|()| file.sync_all());
    written.map_err(|error| {
        let _ = std::fs::remove_file(path);
        failed("write", path, error)
    })
}

/// Fails if one of the files exists.
pub(crate) fn check_are_new<'a>(paths: impl IntoIterator<Item = &'a PathBuf>) -> Result<()> {
    match paths.into_iter().find(|path| path.symlink_metadata().is_ok()) {
        Some(path) => Err(exists(path)),
        None => Ok(()),
    }
}

fn exists(path: &Path) -> Error {
    let path = path.display();
    Error::new(
        Kind::Config,
        format!("{path} exists, and is not overwritten: move it away, or choose another name"),
    )
}

/// Changes a text file, which a reader sees before or after the change and never in between. A file that is
/// new gets mode 600; another keeps its mode and owner. Changes by several processes come one after another.
pub(crate) fn change<T>(path: &Path, change: impl FnOnce(Option<&str>) -> Result<(String, T)>) -> Result<T> {
    // A link remains one.
    let path = path.canonicalize().unwrap_or_else(|_| path.to_owned());
    let folder = match path.parent() {
        Some(folder) if folder != Path::new("") => folder,
        _ => Path::new("."),
    };
    let held = File::open(folder).map_err(|error| failed("open the folder", folder, error))?;
    flock(&held, FlockOperation::LockExclusive).map_err(|error| failed("lock the folder", folder, error))?;
    let before = match std::fs::read_to_string(&path) {
        Ok(text) => Some(text),
        Err(error) if error.kind() == ErrorKind::NotFound => None,
        Err(error) => return Err(failed("read", &path, error)),
    };
    let (text, result) = change(before.as_deref())?;
    let mut name = path.file_name().unwrap_or_default().to_owned();
    name.push(format!(".{}.new", std::process::id()));
    let new = path.with_file_name(name);
    create(&new, PRIVATE, &text)?;
    let moved = adopt(&path, &new)
        .and_then(|()| std::fs::rename(&new, &path))
        .and_then(|()| held.sync_all())
        .map_err(|error| failed("replace", &path, error));
    if moved.is_err() {
        let _ = std::fs::remove_file(&new);
    }
    moved.map(|()| result)
}

/// Gives the new file the mode and the owner of the old one, if there is one.
fn adopt(old: &Path, new: &Path) -> std::io::Result<()> {
    let Ok(old) = old.metadata() else { return Ok(()) };
    let file = File::open(new)?;
    let about = file.metadata()?;
    if (about.uid(), about.gid()) != (old.uid(), old.gid()) {
        fchown(&file, Some(old.uid()), Some(old.gid()))?;
    }
    file.set_permissions(Permissions::from_mode(old.mode() & 0o777))
}
