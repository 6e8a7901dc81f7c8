//! The audit: one JSON line in a file for each event that changes who may do what, or what the servers hold.

use crate::auth::rate::Limiter;
use fastps_core::error::{Error, Kind, Result};
use fastps_core::text::printable;
use rustix::fs::OFlags;
use serde_json::{Map, Value, json};
use std::collections::HashMap;
use std::fs::{File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;
use time::OffsetDateTime;
use time::format_description::well_known::Rfc3339;

/// Events of a principal's workers that are listed at once, and then each second.
const WORKER_BURST: u32 = 1000;
const WORKER_EVENTS_PER_SECOND: u32 = 1;

/// The file of events, if there is one.
#[derive(Debug, Default)]
pub(crate) struct Audit {
    output: Option<Mutex<Output>>,
    /// What limits the events of workers, by the name of their principal.
    workers: Mutex<HashMap<Option<Arc<str>>, Limited>>,
}

/// The events of one principal's workers.
#[derive(Debug)]
struct Limited {
    rate: Limiter,
    /// Number of events that no line stands for yet.
    suppressed: u64,
}

impl Default for Limited {
    fn default() -> Self {
        Self { rate: Limiter::new(WORKER_BURST, WORKER_EVENTS_PER_SECOND), suppressed: 0 }
    }
}

impl Limited {
    /// The number of events suppressed before, if a line may be written now.
    fn take(&mut self, now: Instant) -> Option<u64> {
        self.rate.take(now).ok().map(|()| std::mem::take(&mut self.suppressed))
    }
}

#[derive(Debug)]
struct Output {
    path: PathBuf,
    /// `None` after a failure; the next event opens it again.
    file: Option<File>,
    /// Set while events cannot be written; it was logged.
    failing: bool,
}

impl Audit {
    /// Opens the file, to which only its owner has access, for appending.
    pub(crate) fn open(path: Option<&Path>) -> Result<Arc<Self>> {
        let Some(path) = path else { return Ok(Arc::default()) };
        let file = append(path).map_err(|error| {
            Error::new(Kind::Config, format!("cannot write the audit to {}: {error}", path.display()))
        })?;
        let output = Output { path: path.to_owned(), file: Some(file), failing: false };
        Ok(Arc::new(Self { output: Some(Mutex::new(output)), workers: Mutex::default() }))
    }

    /// Writes an event with these fields. Fails if it cannot be written, which is also logged.
    pub(crate) fn record(&self, event: &str, fields: Value) -> Result<()> {
        let Some(output) = &self.output else { return Ok(()) };
        let mut line = Map::new();
        let now = OffsetDateTime::now_utc();
        line.insert("time".to_owned(), json!(now.format(&Rfc3339).unwrap_or_default()));
        line.insert("event".to_owned(), json!(event));
        if let Value::Object(fields) = fields {
            line.extend(fields.into_iter().filter(|(_, value)| !value.is_null()));
        }
        let mut output = output.lock().unwrap_or_else(PoisonError::into_inner);
        output.write(&format!("{}\n", printable(&Value::Object(line).to_string())))
    }

    /// Writes an event that workers of this principal cause at will. A loop of them must not fill the disk:
    /// above a rate they are counted, and one line has their number.
    pub(crate) fn record_often(
        &self,
        principal: Option<&Arc<str>>,
        event: &str,
        fields: impl FnOnce() -> Value,
    ) -> Result<()> {
        if self.output.is_none() {
            return Ok(());
        }
        let mut workers = self.workers.lock().unwrap_or_else(PoisonError::into_inner);
        let limited = workers.entry(principal.cloned()).or_default();
        let Some(suppressed) = limited.take(Instant::now()) else {
            limited.suppressed += 1;
            return Ok(());
        };
        drop(workers);
        if let Err(error) = self.record_suppressed(principal, suppressed) {
            let mut workers = self.workers.lock().unwrap_or_else(PoisonError::into_inner);
            workers.entry(principal.cloned()).or_default().suppressed += suppressed + 1;
            return Err(error);
        }
        self.record(event, fields())
    }

    fn record_suppressed(&self, principal: Option<&Arc<str>>, count: u64) -> Result<()> {
        if count == 0 {
            return Ok(());
        }
        self.record("suppressed", json!({"principal": principal, "count": count}))
    }

    /// Writes the lines of events that were suppressed and are not followed by others; before the end, also
    /// those that exceed the rate.
    pub(crate) fn summarize(&self, ends: bool) {
        let mut workers = self.workers.lock().unwrap_or_else(PoisonError::into_inner);
        let waiting = workers.iter_mut().filter(|(_, limited)| limited.suppressed > 0);
        for (principal, limited) in waiting {
            let all = ends.then(|| std::mem::take(&mut limited.suppressed));
            if let Some(count) = all.or_else(|| limited.take(Instant::now())) {
                // It was logged if it cannot be written.
                let _ = self.record_suppressed(principal.as_ref(), count);
            }
        }
    }
}

impl Output {
    fn write(&mut self, line: &str) -> Result<()> {
        let written = self.open().and_then(|file| file.write_all(line.as_bytes()));
        match written {
            Ok(()) => {
                if std::mem::take(&mut self.failing) {
                    tracing::info!(file = %self.path.display(), "the audit is written again");
                }
                Ok(())
            }
            Err(error) => {
                self.file = None;
                if !std::mem::replace(&mut self.failing, true) {
                    tracing::error!(file = %self.path.display(), %error, "the audit cannot be written: calls of admins are refused");
                }
                Err(Error::new(Kind::Unavailable, format!("the audit cannot be written: {error}")))
            }
        }
    }

    /// The file, opened again after a failure and when another took its name, as logrotate does.
    fn open(&mut self) -> io::Result<&mut File> {
        let id = |about: std::fs::Metadata| (about.dev(), about.ino());
        let same = |file: &File| {
            let (named, open) = (self.path.metadata().map(id), file.metadata().map(id));
            matches!((named, open), (Ok(named), Ok(open)) if named == open)
        };
        match self.file.take().filter(same) {
            Some(file) => Ok(self.file.insert(file)),
            None => Ok(self.file.insert(append(&self.path)?)),
        }
    }
}

/// A FIFO whose reader is gone must not block the shard.
fn append(path: &Path) -> io::Result<File> {
    let flags = OFlags::NONBLOCK.bits() as i32;
    OpenOptions::new().append(true).create(true).mode(0o600).custom_flags(flags).open(path)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_loop_of_worker_events_is_some_lines_and_a_count() {
        let path = std::env::temp_dir().join(format!("fastps-audit-loop-{}", std::process::id()));
        let audit = Audit::open(Some(&path)).unwrap();
        let (alice, bob): (Arc<str>, Arc<str>) = ("alice".into(), "bob".into());
        let events = u64::from(WORKER_BURST) + 500;
        for number in 0..events {
            audit.record_often(Some(&alice), "register", || json!({"number": number})).unwrap();
        }
        audit.record_often(Some(&bob), "register", || json!({"principal": "bob"})).unwrap();
        let deadline = Instant::now() + std::time::Duration::from_mins(1);
        let lines = loop {
            audit.summarize(false);
            let text = std::fs::read_to_string(&path).unwrap();
            let lines: Vec<Value> = text.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
            if lines.last().is_some_and(|last| last["event"] == "suppressed") {
                break lines;
            }
            assert!(Instant::now() < deadline);
            std::thread::sleep(std::time::Duration::from_millis(10));
        };
        std::fs::remove_file(&path).unwrap();
        audit.summarize(true);
        // Each event has a line or is counted; another principal's are listed.
        let counted: u64 = lines.iter().filter_map(|line| line["count"].as_u64()).sum();
        let listed = lines.iter().filter(|line| line.get("number").is_some()).count() as u64;
        assert_eq!(listed + counted, events);
        assert!((400..=500).contains(&counted), "{counted}");
        assert_eq!(lines.iter().filter(|line| line["principal"] == "bob").count(), 1);
        assert!(lines.iter().all(|line| line["event"] != "suppressed" || line["principal"] == "alice"));
    }

    #[test]
    fn a_count_that_cannot_be_written_is_kept() {
        let folder = std::env::temp_dir().join(format!("fastps-audit-kept-{}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        let path = folder.join("audit");
        let (audit, alice): (_, Arc<str>) = (Audit::open(Some(&path)).unwrap(), "alice".into());
        let record = || audit.record_often(Some(&alice), "register", || json!({}));
        let mut events = 0;
        while audit.workers.lock().unwrap().get(&Some(alice.clone())).is_none_or(|one| one.suppressed < 5) {
            record().unwrap();
            events += 1;
        }
        let listed = std::fs::read_to_string(&path).unwrap().lines().count();
        std::fs::remove_dir_all(&folder).unwrap();
        let deadline = Instant::now() + std::time::Duration::from_mins(1);
        // The first that the rate allows again fails; those before it are counted.
        while record().is_ok() {
            events += 1;
            assert!(Instant::now() < deadline);
            std::thread::sleep(std::time::Duration::from_millis(10));
        }
        std::fs::create_dir_all(&folder).unwrap();
        audit.summarize(true);
        let line: Value = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
        assert_eq!(line["count"], json!(events + 1 - listed));
        std::fs::remove_dir_all(&folder).unwrap();
    }

    #[test]
    fn each_event_is_a_line_wherever_the_file_is() {
        let folder = std::env::temp_dir().join(format!("fastps-audit-{}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        let (path, moved) = (folder.join("audit"), folder.join("audit.1"));
        let audit = Audit::open(Some(&path)).unwrap();
        audit.record("start", json!({"shards": 2, "principal": null})).unwrap();
        std::fs::rename(&path, &moved).unwrap();
        audit.record("drop", json!({"tensor": "a\nb"})).unwrap();
        let read = |path: &Path| -> Value { serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap() };
        let first = read(&moved);
        assert_eq!(
            (&first["event"], &first["shards"], first.get("principal")),
            (&json!("start"), &json!(2), None)
        );
        assert!(OffsetDateTime::parse(first["time"].as_str().unwrap(), &Rfc3339).is_ok());
        assert_eq!(read(&path)["tensor"], "a\nb");
        assert_eq!(path.metadata().unwrap().mode() & 0o777, 0o600);
        // Where it cannot be written, the event fails, until it can.
        std::fs::remove_dir_all(&folder).unwrap();
        assert_eq!(audit.record("hold", json!({})).unwrap_err().kind, Kind::Unavailable);
        assert!(Audit::open(Some(&path)).is_err());
        std::fs::create_dir_all(&folder).unwrap();
        audit.record("hold", json!({})).unwrap();
        assert_eq!(read(&path)["event"], "hold");
        // A FIFO without a reader is refused at once.
        std::fs::remove_file(&path).unwrap();
        let mode = rustix::fs::Mode::from_raw_mode(0o600);
        rustix::fs::mknodat(rustix::fs::CWD, &path, rustix::fs::FileType::Fifo, mode, 0).unwrap();
        assert_eq!(audit.record("hold", json!({})).unwrap_err().kind, Kind::Unavailable);
        std::fs::remove_dir_all(&folder).unwrap();
        Audit::default().record("start", json!({})).unwrap();
    }
}
