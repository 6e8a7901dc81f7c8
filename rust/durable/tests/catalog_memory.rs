//! A catalog is in memory once while it is written, and once while it is read: however long its text is.
#![allow(missing_docs, clippy::unwrap_used)]

use cap::Cap;
use fastps_core::isa::Isa;
use fastps_core::shard::{Shard, ShardConfig};
use fastps_durable::{CoordinatorState, Event, Journal, ListedSpace, Settings};
use std::alloc::System;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

#[global_allocator]
static ALLOCATOR: Cap<System> = Cap::new(System, usize::MAX);

const SPACES: u64 = 128;
const STATE_BYTES: usize = 1 << 16;
/// Bytes of all states; each of their bytes takes two characters in a file.
const ALL: usize = SPACES as usize * STATE_BYTES;

fn open(path: &Path) -> (Shard, Arc<Journal>) {
    let settings = Settings {
        path: path.to_owned(),
        shard: 0,
        shards: 1,
        keep: 2,
        keep_for: Duration::ZERO,
        history: 0,
        accept_loss: false,
    };
    let shard = Shard::new(ShardConfig::new(0, 1 << 30, Isa::get().unwrap()));
    let journal = Journal::open(settings).unwrap();
    journal.recover(&shard).unwrap();
    (shard, journal)
}

fn listed(id: u64) -> ListedSpace {
    ListedSpace {
        name: id.to_string().into(),
        tensors: vec!["w".into()],
        vectors: vec!["g".into()],
        keep_for_ms: 0,
        opener: 1,
        term: 1,
        holder: "c".into(),
        coordinator: 1,
        key: None,
        state: CoordinatorState::default(),
    }
}

#[test]
fn a_catalog_is_in_memory_once() {
    let shm = Path::new("/dev/shm");
    let parent = if shm.is_dir() { shm.to_owned() } else { std::env::temp_dir() };
    let folder = parent.join(format!("fastps-catalog-memory-{}", std::process::id()));
    let _ = std::fs::remove_dir_all(&folder);
    let (shard, journal) = open(&folder);
    for id in 1..=SPACES {
        let state: Arc<[u8]> = vec![id as u8 % 8; STATE_BYTES].into();
        journal.note(&Event::SpaceOpened(id, listed(id)));
        journal.note(&Event::StateStored(id, CoordinatorState::new(&state)));
        journal.sync(journal.position()).unwrap();
    }
    for _ in 0..2 {
        journal.snapshot(&shard).unwrap();
    }
    journal.close();
    drop(journal);
    for _ in 0..2 {
        let before = ALLOCATOR.allocated();
        let (_shard, journal) = open(&folder);
        let kept = ALLOCATOR.allocated() - before;
        assert!(kept < ALL + ALL / 2, "{} MiB", kept >> 20);
        let state = journal.catalog().spaces[&SPACES].state.bytes();
        assert_eq!((state.len(), state[0]), (STATE_BYTES, SPACES as u8 % 8));
        journal.close();
    }
    std::fs::remove_dir_all(&folder).unwrap();
    let most = ALLOCATOR.max_allocated();
    assert!(most < 2 * ALL + (16 << 20), "{} MiB", most >> 20);
}
