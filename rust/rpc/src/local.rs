//! The Unix socket beside each port, for clients of the same user on the same machine.
//!
//! Its name is the server's incarnation, so a client to which a server has said hello over the network can look whether
//! that very server has a socket here. The folder is the user's own and closed to all others.

use std::fs::{self, DirBuilder, Permissions};
use std::io::{Error, ErrorKind, Result};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, PermissionsExt};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use tokio::net::UnixListener;

/// A server's socket, which goes with it.
#[derive(Debug)]
pub(crate) struct Local {
    pub(crate) listener: UnixListener,
    path: PathBuf,
}

impl Local {
    pub(crate) fn open(server: u64) -> Result<Self> {
        remove_orphans(&folder()?);
        let path = path(server)?;
        let listener = UnixListener::bind(&path)?;
        let local = Self { listener, path };
        fs::set_permissions(&local.path, Permissions::from_mode(0o600))?;
        Ok(local)
    }
}

impl Drop for Local {
    fn drop(&mut self) {
        // Whoever cleaned up before is welcome.
        let _ = fs::remove_file(&self.path);
    }
}

/// Where the server of this incarnation has its socket, if it runs here.
pub(crate) fn path(server: u64) -> Result<PathBuf> {
    Ok(folder()?.join(format!("{server:016x}.sock")))
}

/// The user's folder for sockets, made if need be.
fn folder() -> Result<PathBuf> {
    let user = rustix::process::getuid().as_raw();
    let runtime = std::env::var_os("XDG_RUNTIME_DIR").map(PathBuf::from).filter(|folder| folder.is_dir());
    let folder = match runtime {
        Some(runtime) => runtime.join("fastps"),
        None => std::env::temp_dir().join(format!("fastps-{user}")),
    };
    match DirBuilder::new().mode(0o700).create(&folder) {
        Err(error) if error.kind() != ErrorKind::AlreadyExists => return Err(error),
        _ => {}
    }
    let found = fs::symlink_metadata(&folder)?;
    if !found.is_dir() || found.uid() != user || found.mode() & 0o077 != 0 {
        let message = format!("{} is not a folder of this user alone (mode 0700)", folder.display());
        return Err(Error::new(ErrorKind::PermissionDenied, message));
    }
    Ok(folder)
}

/// Removes sockets that servers left behind which were killed.
fn remove_orphans(folder: &Path) {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    for path in entries.map(|entry| entry.path()).filter(|path| path.extension().is_some_and(|e| e == "sock"))
    {
        if UnixStream::connect(&path).is_err_and(|error| error.kind() == ErrorKind::ConnectionRefused) {
            let _ = fs::remove_file(path);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_socket_is_its_users_alone_and_goes_with_its_server() {
        let server = 0x7e57 << 32 | u64::from(std::process::id());
        let local = Local::open(server).unwrap();
        let path = path(server).unwrap();
        assert_eq!(fs::symlink_metadata(&path).unwrap().mode() & 0o777, 0o600);
        assert_eq!(fs::symlink_metadata(path.parent().unwrap()).unwrap().mode() & 0o777, 0o700);
        assert!(UnixStream::connect(&path).is_ok());
        drop(local);
        assert!(!path.exists());
        // One that was killed leaves a socket behind, which the next one removes.
        drop(std::os::unix::net::UnixListener::bind(&path).unwrap());
        assert!(path.exists());
        drop(Local::open(server + (1 << 40)).unwrap());
        assert!(!path.exists());
    }
}
