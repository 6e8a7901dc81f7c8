//! A file descriptor in reserve. Where the process has no other left, it is given up for one more connection,
//! which is told the limit and closed: it would otherwise wait for its own timeout.

use fastps_core::error::Error;
use fastps_transport::open_files;
use std::fs::File;
use std::io;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

/// The descriptor; `None` while the connection that has it is open.
#[derive(Debug)]
pub(crate) struct Spare(Mutex<Option<File>>);

impl Spare {
    pub(crate) fn new() -> Self {
        Self(Mutex::new(File::open("/").ok()))
    }

    /// The next connection, and why it must be refused, if it took the descriptor in reserve.
    pub(crate) async fn accept<T>(
        &self,
        accept: impl AsyncFn() -> io::Result<T>,
    ) -> io::Result<(T, Option<Error>)> {
        self.lock(|spare| {
            if spare.is_none() {
                *spare = File::open("/").ok();
            }
        });
        let error = match accept().await {
            Ok(accepted) => return Ok((accepted, None)),
            Err(error) => error,
        };
        let Some(full) = open_files::exhausted(&error) else { return Err(error) };
        if self.lock(Option::take).is_none() {
            return Err(error);
        }
        // The peer may have gone meanwhile.
        match tokio::time::timeout(Duration::ZERO, accept()).await {
            Ok(Ok(accepted)) => Ok((accepted, Some(full))),
            _ => Err(error),
        }
    }

    fn lock<T>(&self, change: impl FnOnce(&mut Option<File>) -> T) -> T {
        change(&mut self.0.lock().unwrap_or_else(PoisonError::into_inner))
    }
}
