//! Runs, with a digest of each version in `tests/vectors/live.json`: every optimizer with every
//! codec in every mode, over all problems. The Python tests repeat them in WebAssembly, so that both builds
//! are compared without being built in one place. `make live` writes the file.

use crate::run::Run;
use crate::settings::{CODECS, LENGTH, MODES, Settings, defaults, optimizers};
use serde_json::{Value, json};
use sha2::{Digest, Sha256};
use std::fmt::Write;

const FILE: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/vectors/live.json");
/// Most events of a version: a diverged run makes none.
const EVENTS: u32 = 200;
/// Versions of each run.
const UPDATES: u32 = 40;

/// The settings of the k-th run.
fn settings(k: usize) -> [f64; LENGTH] {
    let mut numbers = defaults();
    let (optimizers, codecs, modes) = (optimizers().len(), CODECS.len(), MODES.len());
    let mut set = |index: usize, value: f64| numbers[index] = value;
    set(0, (k % 10) as f64);
    set(1, 0.5 + 0.125 * (k % 7) as f64);
    set(2, -1.0 + 0.25 * (k % 5) as f64);
    set(3, 2.0 + (k % 6) as f64);
    set(4, (k % 3) as f64);
    set(6, 1.0 + (k % 4) as f64);
    set(8, 0.125 * (k % 2) as f64);
    set(9, (k / (optimizers * codecs) % modes) as f64);
    set(10, 1.0 + (k % 3) as f64);
    set(11, 1.0 + (k % 2) as f64);
    set(15, (k % 2) as f64);
    set(17, if k.is_multiple_of(4) { 3.0 } else { -1.0 });
    set(20, (k % 3 / 2) as f64);
    set(21, (k / optimizers % codecs) as f64);
    // Settings that the product refuses, in one of ten runs.
    set(22, if k % 10 == 3 { 0.0 } else { 1.0 });
    set(23, k as f64);
    set(25, 20.0);
    set(28, (k % optimizers) as f64);
    set(29, f64::NAN);
    numbers
}

/// The digest of all versions of a run.
fn digest(numbers: &[f64]) -> String {
    let mut run = Run::new(Settings::read(numbers).unwrap()).unwrap();
    let mut hash = Sha256::new();
    for updates in 1..=UPDATES {
        run.advance(f64::INFINITY, f64::from(updates), EVENTS);
        for value in run.values() {
            hash.update(f64::from(*value).to_le_bytes());
        }
        hash.update(run.now.to_le_bytes());
    }
    hash.finalize().iter().fold(String::new(), |mut text, byte| {
        write!(text, "{byte:02x}").unwrap();
        text
    })
}

#[test]
fn every_version_is_that_of_the_vectors() {
    let count = optimizers().len() * CODECS.len() * MODES.len();
    let lines: Vec<String> = (0..count)
        .map(|k| {
            let numbers = settings(k);
            let shown: Vec<Value> = numbers.iter().map(|x| json!(x)).collect();
            json!({"settings": shown, "digest": digest(&numbers)}).to_string()
        })
        .collect();
    let text = format!("[\n{}\n]\n", lines.join(",\n"));
    if std::env::var_os("FASTPS_WRITE_VECTORS").is_some() {
        std::fs::write(FILE, &text).unwrap();
    }
    let stored = std::fs::read_to_string(FILE).unwrap();
    for (k, (now, then)) in text.lines().zip(stored.lines()).enumerate() {
        assert_eq!(now, then, "run {k} has changed; if that is meant, run `make live`");
    }
    assert_eq!(text.len(), stored.len());
}
