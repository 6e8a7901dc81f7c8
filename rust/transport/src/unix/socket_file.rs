//! A Unix socket with a path, for `unix:///path`. Its server makes it for this user only and removes it; a
//! socket that a killed server left behind is replaced, one that a process listens on is not.

use fastps_core::error::{Error, Kind, Result};
use std::fs::{self, File, Metadata, Permissions, TryLockError};
use std::io::{self, ErrorKind};
use std::os::unix::fs::{FileTypeExt, MetadataExt, PermissionsExt};
use std::os::unix::net::{SocketAddr, UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::time::Duration;

/// How long another server may lock the folder; anyone who can read it can lock it.
const FOLDER_LOCK_TIMEOUT: Duration = Duration::from_secs(2);
const FOLDER_LOCK_RETRY: Duration = Duration::from_millis(20);

/// A listener at a path. Its file is removed before it stops listening, so no other process can have replaced
/// it by then.
#[derive(Debug)]
pub struct SocketFile {
    pub(super) name: Name,
    pub(super) listener: UnixListener,
}

/// A file that is removed on drop, if it is still the one created.
#[derive(Debug)]
pub(super) struct Name {
    path: PathBuf,
    file: (u64, u64),
}

impl SocketFile {
    /// Makes the socket and listens on it; replaces one that a killed server left behind.
    pub fn bind(path: &Path) -> Result<Self> {
        let shown = path.display();
        let failed = |error: io::Error| {
            Error::new(Kind::Config, format!("cannot listen on the Unix socket {shown}: {error}"))
        };
        check(path)?;
        // Clients must use the same name.
        let path = &std::path::absolute(path).map_err(failed)?;
        check(path)?;
        let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty());
        let folder = File::open(folder.unwrap_or(Path::new("."))).map_err(failed)?;
        // Two servers that start at once do not remove each other's. Closing the folder ends the lock.
        lock(&folder).map_err(failed)?;
        make_way(path, failed)?;
        let listener = UnixListener::bind(path).map_err(failed)?;
        let name =
            Name { path: path.to_owned(), file: identity(&fs::symlink_metadata(path).map_err(failed)?) };
        // A process that connects before this is rejected: see `is_ours`.
        fs::set_permissions(path, Permissions::from_mode(0o600)).map_err(failed)?;
        listener.set_nonblocking(true).map_err(failed)?;
        Ok(Self { name, listener })
    }

    /// Absolute path of the socket.
    pub fn path(&self) -> &Path {
        &self.name.path
    }
}

/// Waits until no other server is making its socket in the folder.
fn lock(folder: &File) -> io::Result<()> {
    let mut waited = Duration::ZERO;
    loop {
        match folder.try_lock() {
            Err(TryLockError::WouldBlock) if waited < FOLDER_LOCK_TIMEOUT => {
                std::thread::sleep(FOLDER_LOCK_RETRY);
                waited += FOLDER_LOCK_RETRY;
            }
            other => {
                return other.map_err(|error| match error {
                    TryLockError::WouldBlock => {
                        io::Error::new(ErrorKind::ResourceBusy, "its folder is locked by another process")
                    }
                    TryLockError::Error(error) => error,
                });
            }
        }
    }
}

/// Fails unless the path is valid for a socket.
pub fn check(path: &Path) -> Result<()> {
    match SocketAddr::from_pathname(path) {
        Ok(address) if address.as_pathname().is_some() => Ok(()),
        _ => Err(Error::new(Kind::Config, "not a path that a Unix socket can have").expected(
            "a path of 1 to 107 bytes",
            format!("{} bytes: {}", path.as_os_str().len(), path.display()),
        )),
    }
}

/// Removes a socket that no process listens on.
fn make_way(path: &Path, failed: impl Fn(io::Error) -> Error) -> Result<()> {
    let refused = |message: &str| {
        Err(Error::new(
            Kind::Config,
            format!("cannot listen on the Unix socket {}: {message}", path.display()),
        ))
    };
    match fs::symlink_metadata(path) {
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(()),
        Err(error) => return Err(failed(error)),
        Ok(file) if !file.file_type().is_socket() => {
            return refused("the file exists and is not a socket");
        }
        Ok(_) => {}
    }
    match UnixStream::connect(path) {
        Err(error) if error.kind() == ErrorKind::ConnectionRefused => fs::remove_file(path).map_err(failed),
        Err(error) => Err(failed(error)),
        Ok(_) => refused("another process listens there"),
    }
}

fn identity(file: &Metadata) -> (u64, u64) {
    (file.dev(), file.ino())
}

impl Drop for Name {
    fn drop(&mut self) {
        if fs::symlink_metadata(&self.path).is_ok_and(|file| identity(&file) == self.file)
            && let Err(error) = fs::remove_file(&self.path)
        {
            tracing::warn!(path = %self.path.display(), %error, "the Unix socket's file stays");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn place(name: &str) -> PathBuf {
        let folder = std::env::temp_dir().join(format!("fastps-{}-{name}", std::process::id()));
        fs::create_dir(&folder).unwrap();
        folder.join("socket")
    }

    fn refusal(path: &Path) -> String {
        let error = SocketFile::bind(path).unwrap_err();
        assert_eq!(error.kind, Kind::Config);
        error.to_string()
    }

    #[test]
    fn a_socket_is_the_users_alone_and_goes_with_its_server() {
        let path = place("mode");
        let socket = SocketFile::bind(&path).unwrap();
        assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
        assert!(refusal(&path).contains("another process listens there"));
        drop(socket);
        assert!(!path.exists());
        fs::remove_dir(path.parent().unwrap()).unwrap();
    }

    #[test]
    fn a_stale_one_is_replaced_and_the_replaced_one_leaves_the_new_one_alone() {
        let path = place("stale");
        drop(UnixListener::bind(&path).unwrap());
        assert!(path.exists());
        let first = SocketFile::bind(&path).unwrap();
        fs::remove_file(&path).unwrap();
        let second = SocketFile::bind(&path).unwrap();
        drop(first);
        assert!(path.exists());
        drop(second);
        fs::remove_dir(path.parent().unwrap()).unwrap();
    }

    #[test]
    fn a_folder_that_somebody_locked_is_not_waited_for_for_ever() {
        let path = place("locked");
        let folder = File::open(path.parent().unwrap()).unwrap();
        folder.lock().unwrap();
        assert!(refusal(&path).contains("locked by another process"));
        drop(folder);
        drop(SocketFile::bind(&path).unwrap());
        fs::remove_dir(path.parent().unwrap()).unwrap();
    }

    #[test]
    fn what_is_no_socket_stays() {
        let path = place("file");
        fs::write(&path, "text").unwrap();
        assert!(refusal(&path).contains("not a socket"));
        assert_eq!(fs::read_to_string(&path).unwrap(), "text");
        fs::remove_dir_all(path.parent().unwrap()).unwrap();
        assert!(refusal(&path).contains("No such file"));
        assert!(refusal(&PathBuf::from(format!("/tmp/{}", "x".repeat(120)))).contains("107 bytes"));
        assert!(refusal(Path::new("")).contains("107 bytes"));
    }
}
