//! Encoded pushes of several slices: the first are sent, and may be answered, while the last are being
//! encoded.

use crate::cluster::Cluster;
use crate::ledger::until;
use fastps_client::{Client, ConnectOptions};
use fastps_core::codec::{Codec, ErrorFeedback};
use fastps_core::dtype::View;
use fastps_core::optim::{Optimizer, Sgd};
use fastps_core::tensor::TensorSpec;
use fastps_core::verbs::prelude::*;
use fastps_core::verbs::{Gradient, PushError, PushOptions, Values};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

const TIMEOUT: Duration = Duration::from_mins(1);
const SLICE: usize = 258_048;
const LENGTH: usize = 2 * SLICE + 5;

/// Values that run a closure when they are read for the n-th time.
struct Watched {
    looks: AtomicUsize,
    nth: usize,
    work: Box<dyn Fn() + Send + Sync>,
}

impl Values for Watched {
    fn view(&self) -> View<'_> {
        static VALUES: [f32; LENGTH] = {
            let mut values = [-0.5; LENGTH];
            values[LENGTH - 1] = 2.0;
            values
        };
        if self.looks.fetch_add(1, Ordering::SeqCst) + 1 == self.nth {
            (self.work)();
        }
        View::Float32(&VALUES)
    }
}

fn connect(cluster: &Cluster) -> Arc<Client> {
    let client = Client::connect(
        &cluster.addresses(),
        ConnectOptions { timeout: TIMEOUT, ..ConnectOptions::default() },
    );
    client.unwrap()
}

/// A tensor of three slices, and the number of times a push reads its values, the last time to encode the
/// last slice.
fn register(client: &Client, options: &PushOptions) -> usize {
    let spec = TensorSpec::new("w", [LENGTH as u64], Optimizer::Sgd(Sgd { lr: 1.0, ..Sgd::default() }));
    client.register(spec, View::Float32(&vec![0.0; LENGTH]), TIMEOUT).unwrap();
    let watched = watched(0, || ());
    client.push(&[gradient(&watched)], options).unwrap();
    watched.looks.load(Ordering::SeqCst)
}

fn watched(nth: usize, work: impl Fn() + Send + Sync + 'static) -> Arc<Watched> {
    Arc::new(Watched { looks: AtomicUsize::new(0), nth, work: Box::new(work) })
}

fn gradient(values: &Arc<Watched>) -> Gradient {
    Gradient { name: "w".into(), shape: vec![LENGTH as u64], values: values.clone() }
}

fn options(codec: Codec) -> PushOptions {
    PushOptions { codec: Some(codec), timeout: TIMEOUT, ..PushOptions::default() }
}

/// The versions of the tensor's slices.
fn versions(client: &Client) -> Vec<u64> {
    let versions = client.versions(&["w".into()], TIMEOUT).unwrap();
    versions.tensors()[0].1.iter().map(|slice| slice.version).collect()
}

#[test]
fn the_first_slices_are_applied_while_the_last_is_encoded() {
    let cluster = Cluster::start(1);
    let (client, other) = (connect(&cluster), connect(&cluster));
    let options = options(Codec::Int8 { seed: None });
    let last = register(&client, &options);
    let work = move || {
        until("the first slices", || versions(&other)[..2] == [3, 3]);
        assert_eq!(versions(&other)[2], 2);
    };
    // A blocking push, an asynchronous one, and one that also pulls values.
    client.push(&[gradient(&watched(last, work))], &options).unwrap();
    assert_eq!(versions(&client), [3, 3, 3]);
    let ticket = client.push_async(vec![gradient(&watched(0, || ()))], options.clone()).unwrap();
    ticket.wait(TIMEOUT).unwrap().unwrap();
    let mut values = vec![0.0; LENGTH];
    let mut sink = |_: usize, first: usize, bytes: &[u8]| {
        for (value, bytes) in values[first..].iter_mut().zip(bytes.chunks_exact(4)) {
            *value = f32::from_le_bytes(bytes.try_into().unwrap());
        }
    };
    client.push_pull(&[gradient(&watched(0, || ()))], &options, &mut sink).unwrap();
    assert_eq!(versions(&client), [5, 5, 5]);
    assert!(values[..LENGTH - 1].iter().all(|value| *value == 2.0) && values[LENGTH - 1] == -8.0);
}

#[test]
fn slices_that_are_refused_meanwhile_go_back_to_the_residual() {
    let cluster = Cluster::start(1);
    let (client, other) = (connect(&cluster), connect(&cluster));
    let feedback = Arc::new(Mutex::new(ErrorFeedback::new()));
    let options = PushOptions { feedback: Some(feedback.clone()), ..options(Codec::OneBit) };
    let last = register(&client, &options);
    let before = feedback.lock().unwrap().entries().next().unwrap().1.to_vec();
    let begun = Arc::new(Mutex::new(false));
    let flag = begun.clone();
    let work = move || {
        until("the first slices", || versions(&other)[..2] == [3, 3]);
        other.unregister("w", TIMEOUT).unwrap();
        *flag.lock().unwrap() = true;
    };
    let error = client.push(&[gradient(&watched(last, work))], &options).unwrap_err();
    assert!(*begun.lock().unwrap());
    assert!(matches!(error, PushError::Partial(_)), "{error:?}");
    let feedback = feedback.lock().unwrap();
    let residual = feedback.entries().next().unwrap().1;
    // The last slice has the whole gradient added to what was there before.
    let gradient = [-0.5, -0.5, -0.5, -0.5, 2.0];
    for ((now, before), gradient) in residual[2 * SLICE..].iter().zip(&before[2 * SLICE..]).zip(gradient) {
        assert!((now - before - gradient).abs() < 1e-5, "{now} {before} {gradient}");
    }
}
