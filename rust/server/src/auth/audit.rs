//! The audit: one JSON line in a file for each event that changes who may do what, or what the servers hold.

use fastps_core::error::{Error, Kind, Result};
use rustix::fs::OFlags;
use serde_json::{Map, Value, json};
use std::fs::{File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use time::OffsetDateTime;
use time::format_description::well_known::Rfc3339;

/// The file of events, if there is one.
#[derive(Debug, Default)]
pub(crate) struct Audit(Option<Mutex<Output>>);

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
        Ok(Arc::new(Self(Some(Mutex::new(output)))))
    }

    /// Writes an event with these fields. Fails if it cannot be written, which is also logged.
    pub(crate) fn record(&self, event: &str, fields: Value) -> Result<()> {
        let Some(output) = &self.0 else { return Ok(()) };
        let mut line = Map::new();
        let now = OffsetDateTime::now_utc();
        line.insert("time".to_owned(), json!(now.format(&Rfc3339).unwrap_or_default()));
        line.insert("event".to_owned(), json!(event));
        if let Value::Object(fields) = fields {
            line.extend(fields.into_iter().filter(|(_, value)| !value.is_null()));
        }
        let mut output = output.lock().unwrap_or_else(PoisonError::into_inner);
        output.write(&format!("{}\n", Value::Object(line)))
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
