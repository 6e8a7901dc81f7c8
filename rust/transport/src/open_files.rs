//! Raises the limit of open files, since every connection is one and the usual limit of 1,024 is too low. If
//! the limit is reached all the same, the error names it.

use fastps_core::error::{Error, Kind};
use rustix::io::Errno;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use std::io;

/// Limit on open files that a process requests.
const WANTED_OPEN_FILES: u64 = 1 << 16;

/// Raises the soft limit of this process, if the hard one is higher.
pub fn raise() {
    let limit = getrlimit(Resource::Nofile);
    let most = limit.maximum.map_or(WANTED_OPEN_FILES, |maximum| maximum.min(WANTED_OPEN_FILES));
    if limit.current.is_some_and(|current| current < most)
        && let Err(error) = setrlimit(Resource::Nofile, Rlimit { current: Some(most), ..limit })
    {
        tracing::warn!(%error, "the limit of open files could not be raised");
    }
}

/// The limit of open files that made a system call fail, as an error, if one did.
pub fn exhausted(error: &io::Error) -> Option<Error> {
    let full = |message: &str, limit: String| Error::new(Kind::Capacity, message).expected(limit, "one more");
    match Errno::from_io_error(error)? {
        Errno::MFILE => {
            let limit = getrlimit(Resource::Nofile).current.map_or("unlimited".to_owned(), |n| n.to_string());
            let limit = format!("at most {limit} (ulimit -n)");
            Some(full("too many open files in this process for another connection", limit))
        }
        Errno::NFILE => Some(full(
            "too many open files in this system for another connection",
            "at most fs.file-max".to_owned(),
        )),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_limit_is_named() {
        let now = getrlimit(Resource::Nofile).current.unwrap().to_string();
        let error = exhausted(&Errno::MFILE.into()).unwrap();
        assert_eq!(error.kind, Kind::Capacity);
        assert!(error.to_string().contains(&now) && error.to_string().contains("ulimit -n"), "{error}");
        assert!(exhausted(&Errno::NFILE.into()).unwrap().to_string().contains("fs.file-max"));
        assert!(exhausted(&Errno::CONNREFUSED.into()).is_none());
        assert!(exhausted(&io::Error::other("it")).is_none());
    }
}
