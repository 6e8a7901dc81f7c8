//! Corrections of stale gradients on servers give the same bits as on the in-process store.

use crate::cluster::Cluster;
use fastps_client::{Client, ConnectOptions};
use fastps_core::codec::{Codec, ErrorFeedback};
use fastps_core::correction::Correction;
use fastps_core::dtype::View;
use fastps_core::error::Kind;
use fastps_core::optim::{Optimizer, Sgd};
use fastps_core::store::{Store, StoreOptions};
use fastps_core::tensor::{Apply, TensorSpec};
use fastps_core::verbs::prelude::*;
use fastps_core::verbs::{Gradient, PushError, PushOptions, SparseValues, Values, Versions};
use std::sync::{Arc, Mutex};
use std::time::Duration;

const TIMEOUT: Duration = Duration::from_mins(1);
const N: usize = 258_048 + 5;

fn options(based_on: &Arc<Versions>, correction: Correction) -> PushOptions {
    PushOptions {
        scale: Some(0.5),
        based_on: Some(based_on.clone()),
        correction: Some(correction),
        timeout: TIMEOUT,
        ..PushOptions::default()
    }
}

fn gradient(values: Arc<dyn Values>) -> [Gradient; 1] {
    let shape = vec![values.view().len() as u64];
    [Gradient { name: "w".into(), shape, values }]
}

/// Runs a schedule of pushes by two workers. Returns the values, and staleness and scale of each receipt.
fn outcome(ps: &dyn ParameterServer) -> (Vec<u32>, Vec<(Option<u64>, f32)>) {
    let optimizer = Optimizer::Sgd(Sgd { lr: 0.3, momentum: 0.9, ..Sgd::default() });
    let spec = TensorSpec::new("w", [N as u64], optimizer);
    let initial: Vec<f32> = (0..N).map(|k| (k as f32).sin()).collect();
    ps.register(spec, View::Float32(&initial), TIMEOUT).unwrap();
    let (slow, fast) = (ps.another().unwrap(), ps.another().unwrap());
    let base = |client: &dyn ParameterServer| Arc::new(client.versions(&["w".into()], TIMEOUT).unwrap());
    let asked =
        Correction { delay_adaptive: true, max_staleness: Some(3), reject: false, momentum_matching: true };
    let mut corrections = Vec::new();
    let mut push = |client: &dyn ParameterServer, based_on: &Arc<Versions>, seed: usize| {
        let values: Vec<f32> = (0..N).map(|k| ((k * seed) as f32).cos()).collect();
        let receipts = client.push(&gradient(Arc::new(values)), &options(based_on, asked)).unwrap();
        corrections.push((receipts[0].staleness, receipts[0].scale));
    };
    let stale = base(&*slow);
    for seed in 1..7 {
        push(&*fast, &base(&*fast), seed);
    }
    push(&*slow, &stale, 8);
    push(&*fast, &base(&*fast), 9);

    // Too stale: each slice refuses it, and it is not kept for a later push.
    let strict = Correction { reject: true, ..asked };
    let feedback = Arc::new(Mutex::new(ErrorFeedback::default()));
    let encoded = PushOptions {
        codec: Some(Codec::Int8 { seed: None }),
        feedback: Some(feedback.clone()),
        ..options(&stale, strict)
    };
    let before = base(&*slow);
    let refused = slow.push(&gradient(Arc::new(vec![1.0_f32; N])), &encoded);
    assert!(
        matches!(&refused, Err(PushError::Refused(error)) if error.kind == Kind::StalePush),
        "{refused:?}"
    );
    assert_eq!(base(&*slow), before);
    let fresh = PushOptions { based_on: Some(before), ..encoded };
    slow.push(&gradient(Arc::new(vec![0.0_f32; N])), &fresh).unwrap();

    let ticket = ps.pull_async(vec!["w".into()], TIMEOUT).unwrap();
    let values: Vec<f32> =
        ticket.wait(TIMEOUT).unwrap().unwrap().values.remove(0).view().float32s().unwrap().to_vec();
    (values.into_iter().map(f32::to_bits).collect(), corrections)
}

/// [`outcome`] with rows.
fn sparse(ps: &dyn ParameterServer) -> Vec<(Option<u64>, f32)> {
    let optimizer = Optimizer::Sgd(Sgd { lr: 1.0, ..Sgd::default() });
    let spec = TensorSpec { apply: Apply::Hogwild, ..TensorSpec::new("w", [N as u64], optimizer) };
    ps.register(spec, View::Float32(&vec![0.0; N]), TIMEOUT).unwrap();
    let (slow, fast) = (ps.another().unwrap(), ps.another().unwrap());
    let base = |client: &dyn ParameterServer| Arc::new(client.versions(&["w".into()], TIMEOUT).unwrap());
    let rows = || Arc::new(SparseValues { indices: vec![1, N as i64 - 1], values: vec![-1.0_f32, -2.0] });
    let asked = Correction { delay_adaptive: true, ..Correction::default() };
    let stale = base(&*slow);
    let mut corrections = Vec::new();
    for (client, based_on) in [(&fast, None), (&fast, None), (&fast, None), (&slow, Some(&stale))] {
        let now = base(&**client);
        let receipts = client.push(&gradient(rows()), &options(based_on.unwrap_or(&now), asked)).unwrap();
        corrections.push((receipts[0].staleness, receipts[0].scale));
    }
    corrections
}

#[test]
fn servers_correct_stale_gradients_as_a_local_store_does() {
    let local = || Store::new(StoreOptions::default()).unwrap();
    let (truth, of_rows) = (outcome(&local()), sparse(&local()));
    assert_eq!(truth.1.last(), Some(&(Some(0), 0.5)));
    assert_eq!(truth.1[6], (Some(6), (0.5 * (2.0 / 6.0_f64)) as f32));
    assert_eq!(of_rows.last(), Some(&(Some(3), (0.5 * (2.0 / 3.0_f64)) as f32)));
    for shards in [1, 2] {
        let connect = |cluster: &Cluster| {
            let options = ConnectOptions { timeout: TIMEOUT, ..ConnectOptions::default() };
            Client::connect(&cluster.addresses(), options).unwrap()
        };
        let clusters = [Cluster::start(shards), Cluster::start(shards)];
        assert!(outcome(&*connect(&clusters[0])) == truth, "{shards} shards");
        assert_eq!(sparse(&*connect(&clusters[1])), of_rows, "{shards} shards");
    }
}
