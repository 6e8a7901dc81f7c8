//! Failpoints: named places where a test ends the process at once, or has a call of the system fail. Compiled
//! in by the cargo feature `failpoints` alone, which the tests of fastps-cli turn on and no release has.
//!
//! `FASTPS_FAILPOINT` says what happens: `log_written:3` kills the process (SIGKILL) the third time that it
//! comes to `log_written`, and `log_sync:2:EIO` makes the second sync fail with that error (EIO or ENOSPC).
//! Several are separated by commas.

#[cfg(feature = "failpoints")]
pub use chosen::{cut, fail, reach};

/// Whether this build has any.
pub const ARE_COMPILED: bool = cfg!(feature = "failpoints");

/// Ends the process here, if a test says so.
#[cfg(not(feature = "failpoints"))]
#[inline(always)]
pub const fn reach(_name: &str) {}

/// Instead of a call of the system: ends the process, or fails as the call might.
#[cfg(not(feature = "failpoints"))]
#[inline(always)]
pub const fn fail(_name: &str) -> std::io::Result<()> {
    Ok(())
}

/// Ends the process as a power cut does: of a file's bytes that were not synced, half are there.
#[cfg(not(feature = "failpoints"))]
#[inline(always)]
pub const fn cut(_name: &str, _file: &std::fs::File, _durable: u64, _length: u64) {}

#[cfg(feature = "failpoints")]
mod chosen {
    use crate::base::sync::{AtomicU64, Ordering};
    use std::fs::File;
    use std::io;
    use std::sync::OnceLock;

    /// What happens at a place.
    enum Event {
        Kill,
        Error(i32),
    }

    struct Point {
        name: String,
        /// How often it must be reached until then.
        left: AtomicU64,
        event: Event,
    }

    /// One entry of the variable; what cannot be read is none.
    fn parse(text: &str) -> Option<Point> {
        let mut parts = text.split(':');
        let name = parts.next()?.to_owned();
        let count: u64 = parts.next()?.parse().ok()?;
        let event = match parts.next() {
            None => Event::Kill,
            Some("EIO") => Event::Error(5),
            Some("ENOSPC") => Event::Error(28),
            Some(_) => return None,
        };
        Some(Point { name, left: AtomicU64::new(count), event })
    }

    /// Whether it happens now, and what.
    fn due(name: &str) -> Option<&'static Event> {
        static POINTS: OnceLock<Vec<Point>> = OnceLock::new();
        let points = POINTS.get_or_init(|| {
            let chosen = std::env::var("FASTPS_FAILPOINT").unwrap_or_default();
            chosen.split(',').filter_map(parse).collect()
        });
        let due = |point: &&Point| point.name == name && point.left.fetch_sub(1, Ordering::Relaxed) == 1;
        points.iter().find(due).map(|point| &point.event)
    }

    fn end() -> ! {
        #[cfg(target_os = "linux")]
        let _ = rustix::process::kill_process(rustix::process::getpid(), rustix::process::Signal::KILL);
        std::process::abort()
    }

    /// Ends the process here, if a test says so.
    pub fn reach(name: &str) {
        if due(name).is_some() {
            end();
        }
    }

    /// Instead of a call of the system: ends the process, or fails as the call might.
    pub fn fail(name: &str) -> io::Result<()> {
        match due(name) {
            None => Ok(()),
            Some(Event::Error(number)) => Err(io::Error::from_raw_os_error(*number)),
            Some(Event::Kill) => end(),
        }
    }

    /// Ends the process as a power cut does: of a file's bytes that were not synced, half are there.
    pub fn cut(name: &str, file: &File, durable: u64, length: u64) {
        if due(name).is_some() {
            let zeros = file.metadata().map_or(0, |file| file.len()).saturating_sub(length);
            let _ = file.set_len(durable + (length - durable) / 2);
            // What was written over zeros leaves zeros.
            let _ = (zeros > 0).then(|| file.set_len(length + zeros));
            end();
        }
    }
}
