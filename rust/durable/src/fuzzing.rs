//! Entry points of the fuzz targets in `fuzz/` and of the replay of their corpus: the readers of files, given
//! arbitrary bytes.
//!
//! Each runs twice: on the unchanged bytes, and with all checksums corrected, so that the code behind them is
//! reached. An entry point panics if a reader panics or accepts invalid bytes.

use crate::files::checksum::crc32c;
use crate::files::directory::Directory;
use crate::files::output::FileDigest;
use crate::frame::{self, Content, HEADER_BYTES, MARK, RanProgram};
use crate::recovery::{self, Progress, Settings};
use crate::snapshot::generation::Generation;
use crate::snapshot::manifest::{MANIFEST, Manifest, SLICES, STATE, VALUES};
use crate::tools::copy::{self, Described, Fetched, Latest};
use fastps_core::isa::Isa;
use fastps_core::record::ProgramRecord;
use fastps_core::shard::{Shard, ShardConfig};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// Memory limit of the shard.
const SHARD_MEMORY_BYTES: u64 = 16 << 20;

/// A file of a snapshot in `tests/vectors`.
macro_rules! vector {
    ($name:literal) => {
        include_bytes!(concat!("../../../tests/vectors/durable-1/shard-1/generation-00000002/", $name))
    };
}

/// A directory that is removed on drop.
struct FuzzFolder(PathBuf);

impl FuzzFolder {
    fn new() -> std::io::Result<Self> {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        let shm = Path::new("/dev/shm");
        let parent = if shm.is_dir() { shm.to_owned() } else { std::env::temp_dir() };
        let (process, next) = (std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed));
        let path = parent.join(format!("fastps-fuzz-{process}-{next}"));
        std::fs::create_dir_all(path.join("generation-00000002"))?;
        Ok(Self(path))
    }

    fn put(&self, name: &str, bytes: &[u8]) -> std::io::Result<()> {
        std::fs::write(self.0.join("generation-00000002").join(name), bytes)
    }
}

impl Drop for FuzzFolder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

fn shard() -> Option<Shard> {
    Some(Shard::new(ShardConfig::new(1, SHARD_MEMORY_BYTES, Isa::get().ok()?)))
}

/// Corrects the checksums of frames as far as the lengths make sense.
fn repair(bytes: &mut [u8]) {
    let mut rest = bytes;
    while let Some((header, behind)) = rest.split_at_mut_checked(HEADER_BYTES) {
        let length = [header[4], header[5], header[6], header[7]];
        let Some((content, after)) = behind.split_at_mut_checked(u32::from_le_bytes(length) as usize) else {
            return;
        };
        let sum = crc32c(content) ^ crc32c(&length);
        header[..4].copy_from_slice(&MARK);
        header[8..].copy_from_slice(&sum.to_le_bytes());
        rest = after;
    }
}

/// Runs `each` on the unchanged bytes, and repaired.
fn both(bytes: &[u8], repair: impl FnOnce(&mut Vec<u8>), each: impl Fn(&[u8]) -> Option<()>) {
    each(bytes);
    let mut repaired = bytes.to_vec();
    repair(&mut repaired);
    each(&repaired);
}

/// The content of one frame: a decoded content must encode to something that decodes to the same.
pub fn frame(content: &[u8]) {
    let Some(said) = frame::read(content) else { return };
    let mut written = Vec::new();
    let again = match &said {
        Content::Push(record) => frame::push(&mut written, record),
        Content::Slice(entry) => frame::slice(&mut written, entry),
        Content::Fence(slice, identity) => {
            frame::fence(&mut written, *slice, *identity);
            true
        }
        Content::Event(event) => frame::event(&mut written, event),
        Content::Vectors(entry) => frame::vectors(&mut written, entry),
        Content::SpaceOpened(slice, space) => frame::space_opened(&mut written, *slice, space),
        Content::Program(RanProgram { slice, version, command, program, sum }) => {
            let (slice, version, command, sum) = (*slice, *version, *command, *sum);
            frame::program(&mut written, &ProgramRecord { slice, version, command, program, sum })
        }
        _ => return,
    };
    if !again {
        return;
    }
    frame::seal(&mut written);
    let second = frame::split(&written);
    let second = second.and_then(|(second, _)| frame::read(second)).map(|second| format!("{second:?}"));
    assert_eq!(second, Some(format!("{said:?}")), "what was read is written otherwise");
}

/// The first segment of a log, read as a start does.
pub fn log(bytes: &[u8]) {
    both(bytes, |bytes| repair(bytes), start);
}

fn start(log: &[u8]) -> Option<()> {
    let folder = FuzzFolder::new().ok()?;
    std::fs::remove_dir(folder.0.join("generation-00000002")).ok()?;
    std::fs::write(folder.0.join("log-00000001"), log).ok()?;
    let settings = Settings {
        path: folder.0.clone(),
        shard: 1,
        shards: 2,
        keep: 2,
        keep_for: Duration::ZERO,
        history: 0,
        accept_loss: log.len() % 2 == 1,
    };
    let directory = Directory::open(&settings.path).ok()?;
    let shard = shard()?;
    let found = recovery::recover(&directory, &settings, &shard, &Progress::default()).ok()?;
    for (id, ..) in found.catalog.slices() {
        let slice = shard.slice(fastps_core::tensor::SliceId(id));
        assert!(slice.is_ok(), "the catalog names a missing slice");
    }
    assert!(shard.meter().used() <= SHARD_MEMORY_BYTES);
    Some(())
}

/// Corrects the checksum of a manifest.
fn sign(text: &mut Vec<u8>) {
    text.truncate(text.iter().position(|byte| *byte == b'\n').unwrap_or(text.len()));
    let crc = crc32c(text);
    text.extend_from_slice(format!("\ncrc32c {crc:08x}\n").as_bytes());
}

/// The manifest of a snapshot whose other files are intact.
pub fn manifest(bytes: &[u8]) {
    both(bytes, sign, |bytes| load(bytes, vector!("slices")));
}

/// The `latest` file of a bucket, and the manifest of a copy whose other files are intact.
pub fn copy(bytes: &[u8]) {
    if let Ok(latest) = Latest::parse(bytes, "latest") {
        let again = latest.text().and_then(|text| Latest::parse(&text, "latest"));
        assert_eq!(again.ok(), Some(latest), "what was read is written otherwise");
    }
    both(bytes, sign, |manifest| fetch(manifest.to_vec()));
}

fn fetch(manifest: Vec<u8>) -> Option<()> {
    let described = Described::parse(manifest, "manifest").ok()?;
    let _ = (described.bytes(), described.slices(), described.written(), described.cut());
    let folder = FuzzFolder::new().ok()?;
    let target = folder.0.join("fetched");
    let mut fetched = Fetched::begin(&target).ok()?;
    let path = fetched.folder(&described).ok()?;
    for part in described.parts() {
        let bytes: &[u8] = match part.name {
            SLICES => vector!("slices"),
            VALUES => vector!("parameters.safetensors"),
            _ => vector!("state.safetensors"),
        };
        std::fs::write(path.join(part.name), bytes).ok()?;
    }
    let name = copy::new_folder(described.number()).ok()?;
    let latest = described.latest(&name);
    assert_eq!(latest.text().and_then(|text| Latest::parse(&text, "latest")).ok(), Some(latest));
    fetched.complete(&described, &name).ok()?;
    fetched.finish().ok()?;
    assert!(target.is_dir(), "what was fetched has no name");
    Some(())
}

/// The list of slices of a snapshot whose other files are intact.
pub fn slices(bytes: &[u8]) {
    let loads = |bytes: &[u8]| {
        let mut manifest = Manifest::parse(vector!("MANIFEST"))?;
        let written = FileDigest { bytes: bytes.len() as u64, crc32c: crc32c(bytes) };
        manifest.files.insert(SLICES.to_owned(), written);
        load(&manifest.text().ok()?, bytes)
    };
    both(bytes, |bytes| repair(bytes), loads);
}

fn load(manifest: &[u8], slices: &[u8]) -> Option<()> {
    let folder = FuzzFolder::new().ok()?;
    folder.put(MANIFEST, manifest).ok()?;
    folder.put(SLICES, slices).ok()?;
    folder.put(VALUES, vector!("parameters.safetensors")).ok()?;
    folder.put(STATE, vector!("state.safetensors")).ok()?;
    let generation = Generation::open(&folder.0, 2).ok()?;
    let _ = (generation.summary(), generation.verify());
    let shard = shard()?;
    let mut met = 0;
    let loaded = generation.load(&shard, |_, _| met += 1);
    assert!(loaded.is_err() || met == generation.summary().slices);
    assert!(shard.meter().used() <= SHARD_MEMORY_BYTES);
    Some(())
}

#[cfg(test)]
#[allow(clippy::unwrap_used, clippy::panic)]
mod tests {
    use super::*;

    /// Runs a target on every input of its corpus.
    fn replay(name: &str, target: fn(&[u8])) {
        let corpus = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fuzz/corpus").join(name);
        let mut inputs = 0;
        for entry in std::fs::read_dir(corpus).unwrap() {
            target(&std::fs::read(entry.unwrap().path()).unwrap());
            inputs += 1;
        }
        assert!(inputs > 0, "{name}");
    }

    #[test]
    fn the_corpus_is_read_without_a_panic() {
        replay("copy", copy);
        replay("frame", frame);
        replay("log", log);
        replay("manifest", manifest);
        replay("slices", slices);
    }
}
