//! Memory is never allocated for a length that a file merely claims.
#![allow(missing_docs, clippy::unwrap_used)]

use cap::Cap;
use fastps_core::isa::Isa;
use fastps_core::shard::{Shard, ShardConfig};
use fastps_durable::{Journal, Settings};
use std::alloc::System;
use std::path::{Path, PathBuf};
use std::time::Duration;

#[global_allocator]
static ALLOCATOR: Cap<System> = Cap::new(System, usize::MAX);

/// Maximum content of a frame, in bytes.
const CLAIMED: u32 = 64 << 20;
const LOG: &str = "log-00000003";
const SLICES: &str = "generation-00000002/slices";

/// The header of a long frame without any content.
fn claim() -> Vec<u8> {
    [b"fpsR", &CLAIMED.to_le_bytes()[..], &[0; 40]].concat()
}

/// Starts with one of a shard's files replaced. Returns whether the start succeeds.
fn start_with(name: &str, bytes: &[u8]) -> bool {
    let shm = Path::new("/dev/shm");
    let parent = if shm.is_dir() { shm.to_owned() } else { std::env::temp_dir() };
    let folder = parent.join(format!("fastps-memory-{}", std::process::id()));
    let _ = std::fs::remove_dir_all(&folder);
    std::fs::create_dir_all(folder.join("generation-00000002")).unwrap();
    for file in ["MANIFEST", "slices", "parameters.safetensors", "state.safetensors"] {
        let file = Path::new("generation-00000002").join(file);
        std::fs::copy(vector(&file), folder.join(&file)).unwrap();
    }
    std::fs::copy(vector(Path::new(LOG)), folder.join(LOG)).unwrap();
    std::fs::write(folder.join(name), bytes).unwrap();
    let settings = Settings {
        path: folder.clone(),
        shard: 1,
        shards: 2,
        keep: 2,
        keep_for: Duration::ZERO,
        history: 0,
        accept_loss: false,
    };
    let shard = Shard::new(ShardConfig::new(1, 1 << 40, Isa::get().unwrap()));
    let recovered = Journal::open(settings).unwrap().recover(&shard).is_ok();
    std::fs::remove_dir_all(&folder).unwrap();
    recovered
}

fn vector(name: &Path) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/vectors/durable-1/shard-1").join(name)
}

#[test]
fn a_claimed_length_allocates_nothing() {
    let (log, slices) = (std::fs::read(vector(Path::new(LOG))).unwrap(), vector(Path::new(SLICES)));
    let slices = std::fs::read(slices).unwrap();
    assert!(start_with(LOG, &log));
    let usual = ALLOCATOR.max_allocated();
    // At the end it is torn; elsewhere it is damage.
    assert!(start_with(LOG, &[log, claim()].concat()));
    assert!(!start_with(LOG, &claim()));
    assert!(!start_with(SLICES, &claim()));
    let end = slices.len() - claim().len();
    assert!(!start_with(SLICES, &[&slices[..end], &claim()].concat()));
    assert!(ALLOCATOR.max_allocated() < usual + CLAIMED as usize / 8);
}
