//! Failpoints: named places where a test kills the process, or makes a system call fail or take longer. They
//! are compiled in only with the cargo feature `failpoints`. The tests of fastps-cli and the wheel under test
//! enable it; no release does.
//!
//! `FASTPS_FAILPOINT` selects them: `log_written:3` kills the process (SIGKILL) when it reaches `log_written`
//! for the third time, `log_sync:2:EIO` makes the second sync fail with that error (EIO or ENOSPC), and
//! `snapshot_rename:1:500ms` delays that rename and all later ones. Commas separate several failpoints.

#[cfg(feature = "failpoints")]
pub use chosen::{cut, fail, reach};

/// Set if this build has failpoints.
pub const ARE_COMPILED: bool = cfg!(feature = "failpoints");

/// Kills the process here if this failpoint is due.
#[cfg(not(feature = "failpoints"))]
#[inline(always)]
pub const fn reach(_name: &str) {}

/// Precedes a system call: kills the process, or fails or waits as the call might.
#[cfg(not(feature = "failpoints"))]
#[inline(always)]
pub const fn fail(_name: &str) -> std::io::Result<()> {
    Ok(())
}

/// Kills the process as a power cut does: half of the file's unsynced bytes remain.
#[cfg(not(feature = "failpoints"))]
#[inline(always)]
pub const fn cut(_name: &str, _file: &std::fs::File, _durable: u64, _length: u64) {}

#[cfg(feature = "failpoints")]
mod chosen {
    use crate::base::sync::{AtomicU64, Ordering};
    use std::fs::File;
    use std::io;
    use std::sync::OnceLock;
    use std::time::Duration;

    /// What happens at a failpoint.
    enum Event {
        Kill,
        Error(i32),
        Delay(Duration),
    }

    struct Point {
        name: String,
        /// How often the failpoint must still be reached before the event.
        left: AtomicU64,
        event: Event,
    }

    impl Point {
        /// Counts this visit, and returns whether the event is due now. A delay is due from its visit on.
        fn is_due(&self) -> bool {
            let less = |left: u64| left.checked_sub(1);
            match self.left.fetch_update(Ordering::Relaxed, Ordering::Relaxed, less) {
                Ok(left) => left == 1,
                Err(_) => matches!(self.event, Event::Delay(_)),
            }
        }
    }

    /// Parses one entry of the variable; `None` if it is malformed.
    fn parse(text: &str) -> Option<Point> {
        let mut parts = text.split(':');
        let name = parts.next()?.to_owned();
        let count: u64 = parts.next()?.parse().ok()?;
        let event = match parts.next() {
            None => Event::Kill,
            Some("EIO") => Event::Error(5),
            Some("ENOSPC") => Event::Error(28),
            Some(delay) => Event::Delay(Duration::from_millis(delay.strip_suffix("ms")?.parse().ok()?)),
        };
        Some(Point { name, left: AtomicU64::new(count), event })
    }

    /// Counts this visit, and returns the event if it is due now.
    fn due(name: &str) -> Option<&'static Event> {
        static POINTS: OnceLock<Vec<Point>> = OnceLock::new();
        let points = POINTS.get_or_init(|| {
            let chosen = std::env::var("FASTPS_FAILPOINT").unwrap_or_default();
            chosen.split(',').filter_map(parse).collect()
        });
        points
            .iter()
            .filter(|point| point.name == name)
            .find(|point| point.is_due())
            .map(|point| &point.event)
    }

    fn end() -> ! {
        #[cfg(target_os = "linux")]
        let _ = rustix::process::kill_process(rustix::process::getpid(), rustix::process::Signal::KILL);
        std::process::abort()
    }

    /// Kills the process here if this failpoint is due.
    pub fn reach(name: &str) {
        match due(name) {
            None => {}
            Some(Event::Delay(delay)) => std::thread::sleep(*delay),
            Some(Event::Kill | Event::Error(_)) => end(),
        }
    }

    /// Precedes a system call: kills the process, or fails or waits as the call might.
    pub fn fail(name: &str) -> io::Result<()> {
        match due(name) {
            None => Ok(()),
            Some(Event::Error(number)) => Err(io::Error::from_raw_os_error(*number)),
            Some(Event::Delay(delay)) => {
                std::thread::sleep(*delay);
                Ok(())
            }
            Some(Event::Kill) => end(),
        }
    }

    /// Kills the process as a power cut does: half of the file's unsynced bytes remain.
    pub fn cut(name: &str, file: &File, durable: u64, length: u64) {
        if due(name).is_some() {
            let zeros = file.metadata().map_or(0, |file| file.len()).saturating_sub(length);
            let _ = file.set_len(durable + (length - durable) / 2);
            // Bytes that were written over preallocated zeros become zeros again.
            let _ = (zeros > 0).then(|| file.set_len(length + zeros));
            end();
        }
    }
}
