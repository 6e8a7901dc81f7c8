//! What a shard's server keeps on disk (`fastps_durable`), as the other files here need it: changes are noted, and answers wait
//! until what they say is durable.

use crate::config::ServerConfig;
use crate::node::Node;
use fastps_core::error::{Error, Kind, Result};
use fastps_core::shard::Shard;
use fastps_durable::{Catalog, Cut, Event, Journal, Settings, Summary, shard_folder};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};
use tokio::sync::oneshot;

/// The shortest time between two snapshots that may be asked for.
const SOONEST: Duration = Duration::from_millis(100);
/// How soon a snapshot is tried again after it failed, or to close a hole in the log.
const AGAIN: Duration = Duration::from_secs(1);

/// Called right behind the moment of a cut.
pub(crate) type Begun<'a> = dyn Fn() -> Result<()> + 'a;

/// A shard's files, if it has any.
#[derive(Clone, Debug, Default)]
pub(crate) struct Files(Option<Arc<Journal>>);

impl Files {
    /// Takes the shard's folder, if the server was told of a directory.
    pub(crate) fn open(config: &ServerConfig, shard: u32, shards: usize) -> Result<Self> {
        let Some(path) = &config.data_dir else { return Ok(Self(None)) };
        if config.snapshot_every < SOONEST {
            return Err(Error::new(Kind::Config, "snapshots would follow each other too soon")
                .expected(format!("at least {SOONEST:?}"), format!("{:?}", config.snapshot_every)));
        }
        if config.keep == 0 {
            return Err(Error::new(Kind::Config, "a server needs its last snapshot")
                .expected("at least 1 snapshot that is kept", config.keep));
        }
        if config.sink.is_some() {
            return Err(Error::new(Kind::Config, "with a data directory, records have no other sink"));
        }
        let settings = Settings {
            path: shard_folder(path, shard),
            shard,
            shards: shards as u32,
            keep: config.keep,
            keep_for: config.keep_for,
            accept_loss: config.accept_loss,
        };
        Journal::open(settings).map(|journal| Self(Some(journal))).map_err(|error| error.shard(shard))
    }

    pub(crate) fn journal(&self) -> Option<&Arc<Journal>> {
        self.0.as_ref()
    }

    /// How far the recovery is, for people.
    pub(crate) fn progress(&self) -> String {
        match self.0.as_ref().map(|journal| journal.progress()) {
            None | Some((_, 0)) => "it has not begun to read".to_owned(),
            Some((done, total)) => format!("{} % of {}", done * 100 / total, size(total)),
        }
    }

    /// Makes an empty shard what it was; what else there was.
    pub(crate) fn recover(&self, shard: &Shard) -> Result<Catalog> {
        let Some(journal) = &self.0 else { return Ok(Catalog::default()) };
        let begin = Instant::now();
        let report = journal.recover(shard).map_err(|error| error.shard(shard.index()))?;
        for note in &report.notes {
            tracing::warn!(shard = shard.index(), "{note}");
        }
        tracing::info!(shard = shard.index(), ms = begin.elapsed().as_millis() as u64, "recovered: {report}");
        Ok(journal.catalog())
    }

    /// Writes a snapshot now: of a cut, if one is given, with what is to be called when it has begun.
    pub(crate) fn snapshot(&self, shard: &Shard, cut: Option<(Cut, &Begun<'_>)>) -> Result<Summary> {
        let Some(journal) = &self.0 else {
            return Err(Error::new(Kind::Config, "this server keeps no snapshots")
                .expected("a server with --data-dir", "one without"));
        };
        let begin = Instant::now();
        let summary = match cut {
            None => journal.snapshot(shard)?,
            Some((cut, begun)) => journal.snapshot_of_cut(shard, cut, begun)?,
        };
        let shard = shard.index();
        let ms = begin.elapsed().as_millis() as u64;
        tracing::info!(shard, ms, bytes = summary.bytes, "snapshot {}", summary.generation);
        Ok(summary)
    }

    /// Notes a change.
    pub(crate) fn note(&self, event: impl FnOnce() -> Event) {
        if let Some(journal) = &self.0 {
            journal.note(&event());
        }
    }

    /// The position behind all that was noted so far.
    pub(crate) fn position(&self) -> u64 {
        self.0.as_ref().map_or(0, |journal| journal.position())
    }

    /// Fails where nothing can be made durable.
    pub(crate) fn check(&self) -> Result<()> {
        match &self.0 {
            Some(journal) => journal.check(),
            None => Err(Error::new(Kind::Config, "this server keeps no log")
                .expected("a server with --data-dir, or ack=\"applied\"", "ack=\"logged\"")),
        }
    }

    /// Waits until all that was noted so far is durable, if it can be.
    pub(crate) async fn durable(&self) {
        if let Some(journal) = self.0.as_ref().filter(|journal| journal.check().is_ok()) {
            let (told, heard) = oneshot::channel();
            journal.when_durable(journal.position(), move || tell(told));
            let _ = heard.await;
        }
    }

    /// Waits while too much waits to be written: whoever goes on adds one message.
    pub(crate) async fn room(&self) {
        while let Some(journal) = self.0.as_ref().filter(|journal| journal.is_full()) {
            let (told, heard) = oneshot::channel();
            journal.when_room(move || tell(told));
            let _ = heard.await;
        }
    }
}

/// Bytes for people.
pub(crate) fn size(bytes: u64) -> String {
    let mut size = bytes as f64;
    for unit in ["B", "KiB", "MiB", "GiB"] {
        if size < 1024.0 {
            return if unit == "B" { format!("{bytes} B") } else { format!("{size:.1} {unit}") };
        }
        size /= 1024.0;
    }
    format!("{size:.1} TiB")
}

/// Whoever waited may have left.
fn tell(told: oneshot::Sender<()>) {
    let _ = told.send(());
}

/// Takes snapshots from time to time.
#[derive(Debug)]
pub(crate) struct Snapshots {
    stop: Sender<()>,
    thread: JoinHandle<()>,
}

impl Snapshots {
    /// Begins, if there is anything to keep.
    pub(crate) fn start(nodes: Vec<Arc<Node>>, every: Duration) -> Result<Option<Self>> {
        if nodes.iter().all(|node| node.files.journal().is_none()) {
            return Ok(None);
        }
        let (stop, stopped) = channel();
        let thread = std::thread::Builder::new()
            .name("fastps-snapshots".to_owned())
            .spawn(move || run(&nodes, every, &stopped))
            .map_err(|error| Error::new(Kind::Internal, format!("cannot start a thread: {error}")))?;
        Ok(Some(Self { stop, thread }))
    }

    /// Ends; one that is under way is completed.
    pub(crate) fn stop(self) {
        let _ = self.stop.send(());
        let _ = self.thread.join();
    }
}

fn run(nodes: &[Arc<Node>], every: Duration, stopped: &Receiver<()>) {
    let mut due: Vec<_> = nodes.iter().map(|_| Instant::now() + every).collect();
    while let Err(RecvTimeoutError::Timeout) = stopped.recv_timeout(AGAIN.min(every)) {
        for (node, due) in nodes.iter().zip(&mut due) {
            let Some(journal) = node.files.journal() else { continue };
            let broken = journal.check();
            if let Err(error) = &broken {
                tracing::error!(shard = node.index(), %error, "nothing is durable");
            }
            if broken.is_ok() && Instant::now() < *due {
                continue;
            }
            *due = Instant::now() + if take(node) { every } else { AGAIN };
        }
    }
}

/// Takes a snapshot; tells whether there is one.
pub(crate) fn take(node: &Node) -> bool {
    let taken = node.files.snapshot(&node.shard, None);
    if let Err(error) = &taken {
        tracing::error!(shard = node.index(), %error, "no snapshot");
    }
    taken.is_ok()
}
