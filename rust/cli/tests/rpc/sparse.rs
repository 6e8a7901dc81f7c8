//! Sparse messages over connections that break in the middle: each part is applied exactly once.

use crate::cluster::Cluster;
use crate::proxy::Proxies;
use fastps_client::{Client, ConnectOptions, Transport};
use fastps_core::codec::Codec;
use fastps_core::dtype::View;
use fastps_core::optim::{Optimizer, Sgd};
use fastps_core::tensor::TensorSpec;
use fastps_core::verbs::prelude::*;
use fastps_core::verbs::{Fate, Gradient, PushError, PushOptions, Rows, SparseValues};
use std::ops::Range;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

const PATIENT: Duration = Duration::from_mins(1);
const NAME: &str = "table";
/// Rows straddle the borders of the 24 slices, which are on two shards.
const WIDTH: usize = 100;
const SLICE: usize = 258_048;
const ROWS: usize = 24 * SLICE / WIDTH;
/// Rows of a push: some 50 KB to each shard.
const BATCH: usize = 250;

fn options(timeout: Duration) -> PushOptions {
    let codec = Codec::Float32;
    PushOptions { codec: Some(codec), timeout, ..PushOptions::default() }
}

fn connect(addresses: &[String]) -> Arc<Client> {
    let options = ConnectOptions { timeout: PATIENT, transport: Transport::Tcp, ..ConnectOptions::default() };
    Client::connect(addresses, options).unwrap()
}

/// One client's pushes: unordered rows with repeats, and whole numbers, so that sums are exact.
struct Batch {
    indices: Vec<i64>,
    values: Vec<f32>,
}

impl Batch {
    fn new(client: usize, round: usize) -> Self {
        let row = |i: usize| ((i * i + 7919 * i + 104_729 * round + 31 * client) % ROWS) as i64;
        let indices: Vec<_> = (0..BATCH).map(|i| row(i / 2 * (1 + i % 2))).collect();
        let value = |e: usize| ((e + round) % 5) as f32 - 1.0;
        Self { indices, values: (0..BATCH * WIDTH).map(value).collect() }
    }

    fn gradient(&self) -> Gradient {
        let values = SparseValues { indices: self.indices.clone(), values: self.values.clone() };
        Gradient { name: NAME.into(), shape: vec![BATCH as u64, WIDTH as u64], values: Arc::new(values) }
    }

    /// Applies SGD with a rate of 1 to the elements in the range `applied`.
    fn enter(&self, book: &mut [f32], applied: &Range<usize>) {
        for (row, values) in self.indices.iter().zip(self.values.chunks(WIDTH)) {
            for (element, value) in (*row as usize * WIDTH..).zip(values) {
                if applied.contains(&element) {
                    book[element] -= value;
                }
            }
        }
    }
}

/// Pushes once and records the applied slices. Returns how many slices were in doubt and became applied or
/// fenced.
fn push_and_enter(client: &Client, batch: &Batch, timeout: Duration, book: &Mutex<Vec<f32>>) -> [u32; 2] {
    let mut fates = [0; 2];
    let all = 0..ROWS * WIDTH;
    let applied = match client.push(&[batch.gradient()], &options(timeout)) {
        Ok(_) => vec![all],
        Err(PushError::Refused(_)) => Vec::new(),
        Err(PushError::Partial(partial)) => {
            let mut applied: Vec<_> =
                partial.applied.iter().map(|(_, elements, _)| elements.clone()).collect();
            for doubt in &partial.in_doubt {
                match doubt.result(PATIENT).unwrap() {
                    Fate::Applied { .. } => {
                        fates[0] += 1;
                        applied.push(doubt.elements());
                    }
                    Fate::Fenced => fates[1] += 1,
                    Fate::Unknown => panic!("unknown: {doubt:?}"),
                }
            }
            applied
        }
    };
    let mut book = book.lock().unwrap();
    for elements in &applied {
        batch.enter(&mut book, elements);
    }
    fates
}

fn pulled(client: &Client, indices: &[i64]) -> Vec<f32> {
    let mut values = vec![f32::NAN; indices.len() * WIDTH];
    let rows = Rows { name: NAME.into(), indices: indices.to_vec() };
    let mut sink = |_: usize, first: usize, bytes: &[u8]| {
        for (value, bytes) in values[first..].iter_mut().zip(bytes.as_chunks().0) {
            *value = f32::from_le_bytes(*bytes);
        }
    };
    client.pull_rows(&[rows], PATIENT, &mut sink).unwrap();
    values
}

/// Pushes until enough connections have been cut at any byte of either direction; `FASTPS_CUTS` sets the
/// number. One client has no tight deadline and must end without doubts; the other has deadlines that most
/// pushes miss.
#[test]
fn parts_are_applied_once_wherever_a_message_breaks() {
    let wanted = std::env::var("FASTPS_CUTS").map_or(100, |n| n.parse::<u64>().unwrap());
    let late = PATIENT + Duration::from_millis(500 * wanted);
    let cluster = Cluster::start(2);
    let proxies = Proxies::start(&cluster.addresses(), 21);
    let truth = connect(&cluster.addresses());
    let spec =
        TensorSpec::new(NAME, [ROWS as u64, WIDTH as u64], Optimizer::Sgd(Sgd { lr: 1.0, ..Sgd::default() }));
    truth.register(spec, View::Float32(&vec![0.0; ROWS * WIDTH]), PATIENT).unwrap();
    let clients = [(); 2].map(|()| connect(&proxies.addresses()));
    let book = Mutex::new(vec![0.0_f32; ROWS * WIDTH]);
    let (fates, begin) = (Mutex::new([0; 2]), Instant::now());
    proxies.set_faulty(true);
    std::thread::scope(|scope| {
        for (k, client) in clients.iter().enumerate() {
            let (book, fates, proxies) = (&book, &fates, &proxies);
            scope.spawn(move || {
                let mut round = 0;
                let one_kind = || k == 1 && fates.lock().unwrap().contains(&0);
                while proxies.cuts() < wanted || one_kind() {
                    assert!(begin.elapsed() < late, "{} cuts only", proxies.cuts());
                    round += 1;
                    let batch = Batch::new(k, round);
                    if k == 0 {
                        assert_eq!(push_and_enter(client, &batch, PATIENT, book), [0; 2]);
                        assert!(pulled(client, &batch.indices).iter().all(|value| value.is_finite()));
                    } else {
                        // Longer and longer, since a busy machine answers nothing in time.
                        let timeout = Duration::from_millis(((1 + round * 7 % 60) * (1 + round / 60)) as u64);
                        let settled = push_and_enter(client, &batch, timeout, book);
                        let mut fates = fates.lock().unwrap();
                        *fates = [fates[0] + settled[0], fates[1] + settled[1]];
                    }
                }
            });
        }
    });
    proxies.set_faulty(false);
    let every: Vec<_> = (0..ROWS as i64).collect();
    let (book, fates) = (book.into_inner().unwrap(), fates.into_inner().unwrap());
    for rows in every.chunks(1 << 14) {
        let expected = &book[rows[0] as usize * WIDTH..][..rows.len() * WIDTH];
        let got = pulled(&truth, rows);
        let wrong = got.iter().zip(expected).position(|(got, expected)| got != expected);
        assert_eq!(wrong, None, "an element of the rows from {} on", rows[0]);
    }
    let count = |name: &str| -> u64 {
        let stats = clients.iter().map(|client| client.stats(PATIENT).unwrap().client);
        stats.map(|stats| stats.iter().find(|(n, _)| n == name).unwrap().1).sum()
    };
    let (resent, duplicates) = (count("frames_resent"), count("duplicates"));
    println!("{} cuts, {resent} resent, {duplicates} duplicates, fates {fates:?}", proxies.cuts());
    assert!(
        resent > 0 && duplicates > 0,
        "no message was ever torn: {resent} resent, {duplicates} duplicates"
    );
    assert!(fates[0] > 0 && fates[1] > 0, "applied and fenced doubts: {fates:?}");
}
