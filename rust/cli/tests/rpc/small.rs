//! Small tensors, whose slices share messages, over connections that break in the middle: each part is applied
//! exactly once, whatever the fate of the others.

use crate::cluster::Cluster;
use crate::proxy::Proxies;
use fastps_client::{Client, ConnectOptions, Transport};
use fastps_core::codec::Codec;
use fastps_core::dtype::{Array, View};
use fastps_core::optim::{Optimizer, Sgd};
use fastps_core::tensor::TensorSpec;
use fastps_core::verbs::prelude::*;
use fastps_core::verbs::{Fate, Gradient, PushError, PushOptions};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

const PATIENT: Duration = Duration::from_mins(1);
/// Small tensors: some 60 KB of a push to each of two shards.
const TENSORS: usize = 120;

fn len(k: usize) -> usize {
    1 + 17 * k % 500
}

fn name(k: usize) -> Arc<str> {
    format!("w{k}").into()
}

fn options(timeout: Duration) -> PushOptions {
    PushOptions { codec: Some(Codec::Float32), timeout, ..PushOptions::default() }
}

fn connect(addresses: &[String]) -> Arc<Client> {
    let options = ConnectOptions { timeout: PATIENT, transport: Transport::Tcp, ..ConnectOptions::default() };
    Client::connect(addresses, options).unwrap()
}

/// Whole numbers, so that sums are exact.
fn value(client: usize, round: usize, k: usize) -> f32 {
    ((round + k + 31 * client) % 5) as f32 - 1.0
}

fn gradients(client: usize, round: usize) -> Vec<Gradient> {
    let gradient = |k| {
        let values = Array::Float32(vec![value(client, round, k); len(k)]);
        Gradient { name: name(k), shape: vec![len(k) as u64], values: Arc::new(values) }
    };
    (0..TENSORS).map(gradient).collect()
}

/// Pushes once and records which tensors were changed. Returns how many were in doubt and became applied or fenced.
fn push_and_enter(
    client: &Client,
    (number, round): (usize, usize),
    timeout: Duration,
    book: &Mutex<Vec<f32>>,
) -> [u32; 2] {
    let mut fates = [0; 2];
    let applied: Vec<_> = match client.push(&gradients(number, round), &options(timeout)) {
        Ok(_) => (0..TENSORS).map(name).collect(),
        Err(PushError::Refused(_)) => Vec::new(),
        Err(PushError::Partial(partial)) => {
            assert!(partial.applied.is_empty(), "a tensor of one slice is torn");
            let mut applied: Vec<_> = partial.receipts.iter().map(|(name, _)| name.clone()).collect();
            for doubt in &partial.in_doubt {
                match doubt.result(PATIENT).unwrap() {
                    Fate::Applied { .. } => {
                        fates[0] += 1;
                        applied.push(doubt.tensor().clone());
                    }
                    Fate::Fenced => fates[1] += 1,
                    Fate::Unknown => panic!("unknown: {doubt:?}"),
                }
            }
            applied
        }
    };
    let mut book = book.lock().unwrap();
    for k in (0..TENSORS).filter(|k| applied.contains(&name(*k))) {
        book[k] -= value(number, round, k);
    }
    fates
}

/// The value of each tensor, whose elements are equal.
fn pulled(client: &Client) -> Vec<f32> {
    let mut values: Vec<_> = (0..TENSORS).map(|k| vec![f32::NAN; len(k)]).collect();
    let mut sink = |tensor: usize, first: usize, bytes: &[u8]| {
        for (value, bytes) in values[tensor][first..].iter_mut().zip(bytes.as_chunks().0) {
            *value = f32::from_le_bytes(*bytes);
        }
    };
    client.pull(&(0..TENSORS).map(name).collect::<Vec<_>>(), PATIENT, &mut sink).unwrap();
    let equal = |values: Vec<f32>| {
        assert!(values.iter().all(|value| *value == values[0]), "half a push: {values:?}");
        values[0]
    };
    values.into_iter().map(equal).collect()
}

/// As for sparse messages: one client has no tight deadline and must end without doubts; the other has deadlines
/// that most pushes miss.
#[test]
fn small_tensors_are_changed_once_wherever_a_message_breaks() {
    let wanted = std::env::var("FASTPS_CUTS").map_or(100, |n| n.parse::<u64>().unwrap());
    let late = PATIENT + Duration::from_millis(500 * wanted);
    let cluster = Cluster::start(2);
    let proxies = Proxies::start(&cluster.addresses(), 22);
    let truth = connect(&cluster.addresses());
    for k in 0..TENSORS {
        let spec =
            TensorSpec::new(name(k), [len(k) as u64], Optimizer::Sgd(Sgd { lr: 1.0, ..Sgd::default() }));
        truth.register(spec, View::Float32(&vec![0.0; len(k)]), PATIENT).unwrap();
    }
    let clients = [(); 2].map(|()| connect(&proxies.addresses()));
    let book = Mutex::new(vec![0.0_f32; TENSORS]);
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
                    if k == 0 {
                        assert_eq!(push_and_enter(client, (k, round), PATIENT, book), [0; 2]);
                        pulled(client);
                    } else {
                        // Longer and longer, since a busy machine answers nothing in time.
                        let timeout = Duration::from_millis(((1 + round * 7 % 60) * (1 + round / 60)) as u64);
                        let settled = push_and_enter(client, (k, round), timeout, book);
                        let mut fates = fates.lock().unwrap();
                        *fates = [fates[0] + settled[0], fates[1] + settled[1]];
                    }
                }
            });
        }
    });
    proxies.set_faulty(false);
    let (book, fates) = (book.into_inner().unwrap(), fates.into_inner().unwrap());
    assert_eq!(pulled(&truth), book);
    let count = |name: &str| -> u64 {
        let stats = clients.iter().map(|client| client.stats(PATIENT).unwrap().client);
        stats.map(|stats| stats.iter().find(|(n, _)| n == name).unwrap().1).sum()
    };
    let (sent, resent, duplicates) = (count("frames_sent"), count("frames_resent"), count("duplicates"));
    let pushes = count("pushes");
    println!("{} cuts, {sent} frames, {resent} resent, {duplicates} duplicates, {fates:?}", proxies.cuts());
    assert!(
        resent > 0 && duplicates > 0,
        "no message was ever torn: {resent} resent, {duplicates} duplicates"
    );
    assert!(fates[0] > 0 && fates[1] > 0, "applied and fenced doubts: {fates:?}");
    let questions = u64::from(fates[0] + fates[1]) * 4;
    assert!(sent < pushes * TENSORS as u64 / 4 + questions + resent, "{sent} frames of {pushes} pushes");
}
