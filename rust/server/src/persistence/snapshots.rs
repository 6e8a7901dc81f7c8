//! Takes snapshots without being asked, on a thread per shard: from time to time, when the log is too long,
//! and when it could not be written.

use crate::persistence::Files;
use crate::persistence::trouble::Trouble;
use fastps_core::error::{Error, Kind, Result};
use fastps_core::shard::Shard;
use fastps_durable::{Journal, Summary};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// Interval between checks for a broken log.
const CHECK_INTERVAL: Duration = Duration::from_secs(1);

/// Schedule of automatic snapshots.
#[derive(Clone, Copy, Debug)]
pub(crate) struct When {
    /// Interval between snapshots.
    pub(crate) every: Duration,
    /// Ratio of log size to state size above which a snapshot is taken; 0 disables this.
    pub(crate) after: u64,
}

/// The threads that take automatic snapshots.
#[derive(Debug)]
pub(crate) struct Snapshots(Vec<(Sender<Signal>, JoinHandle<()>)>);

#[derive(Debug)]
enum Signal {
    /// The log has become too long.
    LongLog,
    Stop,
}

impl Snapshots {
    /// Starts a thread for each shard that keeps files.
    pub(crate) fn start(shards: impl IntoIterator<Item = (Arc<Shard>, Files)>, when: When) -> Result<Self> {
        let mut threads = Vec::new();
        for (shard, files) in shards {
            let Some(journal) = files.journal().cloned() else { continue };
            let (signal, signals) = channel();
            let alarm = signal.clone();
            journal.watch(when.after, move || drop(alarm.send(Signal::LongLog)));
            let name = format!("fastps-snapshots-{}", shard.index());
            let turn = Turn::new(shard, files, journal, when.every);
            let thread = std::thread::Builder::new()
                .name(name)
                .spawn(move || turn.run(&signals))
                .map_err(|error| Error::new(Kind::Internal, format!("cannot start a thread: {error}")))?;
            threads.push((signal, thread));
        }
        Ok(Self(threads))
    }

    /// Stops the threads; a snapshot under way is completed.
    pub(crate) fn stop(self) {
        for (signal, _) in &self.0 {
            let _ = signal.send(Signal::Stop);
        }
        for (_, thread) in self.0 {
            let _ = thread.join();
        }
    }
}

/// Schedule of a shard's next snapshots.
struct Turn {
    shard: Arc<Shard>,
    files: Files,
    journal: Arc<Journal>,
    every: Duration,
    due: Instant,
    /// Time to retry a failed snapshot.
    retry: Instant,
    broken: Trouble,
    failed: Trouble,
}

impl Turn {
    fn new(shard: Arc<Shard>, files: Files, journal: Arc<Journal>, every: Duration) -> Self {
        let now = Instant::now();
        let (broken, failed) = (Trouble::default(), Trouble::default());
        Self { shard, files, journal, every, due: now + every, retry: now, broken, failed }
    }

    fn run(mut self, signals: &Receiver<Signal>) {
        // Checks right after the start, so that a server that keeps restarting still advances.
        let mut pause = Duration::ZERO;
        loop {
            match signals.recv_timeout(pause) {
                Ok(Signal::LongLog) | Err(RecvTimeoutError::Timeout) => {}
                Ok(Signal::Stop) | Err(RecvTimeoutError::Disconnected) => return,
            }
            pause = self.look().min(CHECK_INTERVAL).min(self.every);
        }
    }

    /// Takes a snapshot if one is due. Returns the time until the next check.
    fn look(&mut self) -> Duration {
        let broken = self.journal.check();
        self.tell_broken(broken.as_ref().err());
        let now = Instant::now();
        if now < self.retry {
            return CHECK_INTERVAL;
        }
        // A broken log needs its snapshot now: nothing is durable without it.
        if broken.is_ok()
            && let Some(left) = self.files.deferral(now)
        {
            return left;
        }
        if broken.is_err() || now >= self.due {
            if self.take(Files::periodic) {
                self.due = Instant::now() + self.every;
            }
        } else if self.journal.is_overgrown() {
            self.take(Files::shorten);
            // The log may already be too long again.
            return Duration::ZERO;
        }
        CHECK_INTERVAL
    }

    /// Takes a snapshot. Returns whether it succeeded.
    fn take(&mut self, how: impl FnOnce(&Files, &Shard) -> Result<Summary>) -> bool {
        let (taken, shard) = (how(&self.files, &self.shard), self.shard.index());
        let now = Instant::now();
        match taken {
            Ok(_) => {
                if let Some(lasted) = self.failed.over(now) {
                    tracing::info!(shard, "snapshots are written again: they failed {lasted}");
                }
                self.tell_broken(self.journal.check().err().as_ref());
                true
            }
            Err(error) => {
                if let Some(again) = self.failed.met(now) {
                    tracing::error!(shard, %error, "no snapshot{again}");
                }
                self.retry = now + self.failed.pause();
                false
            }
        }
    }

    /// Logs when the log breaks, also if a snapshot has repaired it since, and when it is repaired.
    fn tell_broken(&mut self, broken: Option<&Error>) {
        let (shard, now) = (self.shard.index(), Instant::now());
        let failure = self.journal.take_failure();
        if let Some(error) = broken.or(failure.as_ref())
            && let Some(again) = self.broken.met(now)
        {
            tracing::error!(shard, %error, "nothing is durable{again}");
        }
        if broken.is_none()
            && let Some(lasted) = self.broken.over(now)
        {
            tracing::info!(shard, "changes are durable again: the log was broken {lasted}");
        }
    }
}

/// Takes a snapshot. Returns whether it succeeded.
pub(crate) fn take(shard: &Shard, files: &Files) -> bool {
    let taken = files.snapshot(shard, None);
    if let Err(error) = &taken {
        tracing::error!(shard = shard.index(), %error, "no snapshot");
    }
    taken.is_ok()
}
