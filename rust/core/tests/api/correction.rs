//! Stale gradients: each slice follows the rule of its correction, under a fixed schedule of arrivals.

use fastps_core::codec::{Codec, ErrorFeedback};
use fastps_core::correction::Correction;
use fastps_core::dtype::View;
use fastps_core::error::Kind;
use fastps_core::optim::{Adam, AdamW, Optimizer, Sgd};
use fastps_core::store::{Store, StoreOptions};
use fastps_core::tensor::{Apply, TensorSpec};
use fastps_core::verbs::prelude::*;
use fastps_core::verbs::{Gradient, PushError, PushOptions, Receipt, SparseValues, Values, Versions};
use serde_json::Value;
use std::sync::{Arc, Mutex};
use std::time::Duration;

const TIMEOUT: Duration = Duration::from_mins(1);
const ROWS: u64 = 3;
const ADAPTIVE: Correction =
    Correction { delay_adaptive: true, max_staleness: None, reject: false, momentum_matching: false };

fn store(apply: Apply, momentum: f64) -> Store {
    let store = Store::new(StoreOptions::default()).unwrap();
    let optimizer = Optimizer::Sgd(Sgd { lr: 1.0, momentum, ..Sgd::default() });
    let spec = TensorSpec { apply, ..TensorSpec::new("w", [ROWS], optimizer) };
    store.register(spec, View::Float32(&[0.0; ROWS as usize]), TIMEOUT).unwrap();
    store
}

fn options(based_on: &Arc<Versions>, correction: Correction) -> PushOptions {
    PushOptions {
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

fn push(client: &dyn ParameterServer, options: &PushOptions) -> Result<Receipt, PushError> {
    client
        .push(&gradient(Arc::new(vec![-1.0_f32; ROWS as usize])), options)
        .map(|mut receipts| receipts.remove(0))
}

fn base(client: &dyn ParameterServer) -> Arc<Versions> {
    Arc::new(client.versions(&["w".into()], TIMEOUT).unwrap())
}

fn values(client: &dyn ParameterServer) -> Vec<f32> {
    let ticket = client.pull_async(vec!["w".into()], TIMEOUT).unwrap();
    ticket.wait(TIMEOUT).unwrap().unwrap().values.remove(0).view().float32s().unwrap().to_vec()
}

#[test]
fn equal_workers_are_untouched_and_a_straggler_counts_less() {
    for apply in [Apply::Exact, Apply::Hogwild] {
        let store = store(apply, 0.0);
        let workers: Vec<_> = (0..3).map(|_| store.another().unwrap()).collect();
        let first: Vec<_> = workers.iter().map(|worker| base(&**worker)).collect();
        let mut bases = first.clone();
        for _ in 0..4 {
            for (worker, base_of) in workers.iter().zip(&mut bases) {
                let receipt = push(&**worker, &options(base_of, ADAPTIVE)).unwrap();
                assert_eq!(receipt.scale, 1.0, "{apply:?}: {receipt:?}");
                *base_of = base(&**worker);
            }
        }
        assert_eq!(values(&store), [12.0; ROWS as usize]);
        // 8 changes by others, 3 workers: the client that only registered does not count.
        let receipt = push(&*workers[0], &options(&first[0], ADAPTIVE)).unwrap();
        assert_eq!((receipt.staleness, receipt.scale), (Some(8), 0.375), "{apply:?}");
        assert_eq!(values(&store), [12.375; ROWS as usize]);
        // The push's own scale is multiplied in, and the stricter of two limits applies.
        let bounded = Correction { max_staleness: Some(2), ..ADAPTIVE };
        let scaled = PushOptions { scale: Some(-2.0), ..options(&first[1], bounded) };
        let receipt = push(&*workers[1], &scaled).unwrap();
        assert_eq!((receipt.staleness, receipt.scale), (Some(9), (-4.0_f64 / 9.0) as f32));
        drop(workers);
    }
}

#[test]
fn what_is_too_stale_is_refused_and_changes_nothing() {
    for apply in [Apply::Exact, Apply::Hogwild] {
        let store = store(apply, 0.0);
        let (slow, fast) = (store.another().unwrap(), store.another().unwrap());
        let strict = Correction { max_staleness: Some(1), reject: true, ..Correction::default() };
        let stale = base(&*slow);
        push(&*fast, &options(&base(&*fast), strict)).unwrap();
        assert_eq!(push(&*slow, &options(&stale, strict)).unwrap().staleness, Some(1));
        push(&*fast, &options(&base(&*fast), strict)).unwrap();
        let before = base(&*slow);
        let Err(PushError::Refused(error)) = push(&*slow, &options(&stale, strict)) else {
            panic!("a stale push was applied");
        };
        assert_eq!((error.kind, error.tensor.as_deref()), (Kind::StalePush, Some("w")));
        assert_eq!(error.got.as_deref(), Some("2 changes"), "{error}");
        assert_eq!((base(&*slow), values(&store)), (before, vec![3.0; ROWS as usize]));
        push(&*slow, &options(&base(&*slow), strict)).unwrap();
        // The residual does not get it back: the next push would carry it as if it were fresh.
        let feedback = Arc::new(Mutex::new(ErrorFeedback::default()));
        push(&*fast, &options(&base(&*fast), strict)).unwrap();
        let encoded = PushOptions {
            codec: Some(Codec::Int8 { seed: None }),
            feedback: Some(feedback.clone()),
            ..options(&stale, strict)
        };
        assert!(
            matches!(push(&*slow, &encoded), Err(PushError::Refused(error)) if error.kind == Kind::StalePush)
        );
        let fresh = PushOptions { based_on: Some(base(&*slow)), ..encoded };
        push(&*slow, &fresh).unwrap();
        assert_eq!(values(&store), [6.0; ROWS as usize], "-1 is exact in 8 bits");
    }
}

#[test]
fn to_refuse_without_a_limit_is_refused() {
    let store = store(Apply::Exact, 0.0);
    let endless = Correction { reject: true, ..ADAPTIVE };
    let Err(PushError::Refused(error)) = push(&store, &options(&base(&store), endless)) else { panic!() };
    assert!(error.kind == Kind::Config && error.expected.as_deref() == Some("max_staleness"), "{error}");
    assert_eq!(values(&store), [0.0; ROWS as usize]);
}

#[test]
fn sparse_gradients_are_corrected_slice_by_slice() {
    let store = store(Apply::Exact, 0.0);
    let (slow, fast) = (store.another().unwrap(), store.another().unwrap());
    let stale = base(&*slow);
    for _ in 0..4 {
        push(&*fast, &options(&base(&*fast), ADAPTIVE)).unwrap();
    }
    let rows = SparseValues { indices: vec![2], values: vec![-8.0_f32] };
    let receipt = slow.push(&gradient(Arc::new(rows)), &options(&stale, ADAPTIVE)).unwrap().remove(0);
    assert_eq!((receipt.staleness, receipt.scale), (Some(4), 0.5));
    assert_eq!(values(&store), [4.0, 4.0, 8.0]);
}

#[test]
fn the_momentum_gives_way_to_asynchrony() {
    let (store, mu) = (store(Apply::Exact, 0.9), 0.9);
    let matching = Correction { momentum_matching: true, ..Correction::default() };
    let workers: Vec<_> = (0..3).map(|_| store.another().unwrap()).collect();
    let mut bases: Vec<_> = workers.iter().map(|worker| base(&**worker)).collect();
    let (mut velocity, mut value) = (0.0_f32, 0.0_f32);
    for round in 0..3 {
        for (k, worker) in workers.iter().enumerate() {
            push(&**worker, &options(&bases[k], matching)).unwrap();
            bases[k] = base(&**worker);
            let age: f64 = mu / (1.0 - mu) - if round == 0 { k } else { 2 } as f64;
            velocity = if round + k == 0 { -1.0 } else { velocity * (age / (1.0 + age)) as f32 - 1.0 };
            value -= velocity;
        }
    }
    // A single worker keeps the optimizer's momentum, 0.9: `age / (1 + age)` rounds to another float32.
    let got = values(&store);
    assert!(got.iter().all(|got| (got - value).abs() < 1e-5), "{got:?} {value}");
    assert!((value - 24.0).abs() > 1.0, "plain momentum would go elsewhere");
}

#[test]
fn the_mean_gradient_gives_way_to_asynchrony() {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/vectors/matched_beta1.json");
    let golden: Value = serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap();
    let gradients: Vec<_> = golden["gradients"].as_array().unwrap().iter().map(floats).collect();
    let turns: Vec<_> = golden["workers"].as_array().unwrap().iter().map(|k| k.as_u64().unwrap()).collect();
    let (initial, mut lowered) = (floats(&golden["initial"]), 0);
    for case in golden["cases"].as_array().unwrap() {
        let optimizer = optimizer_of(case);
        for apply in [Apply::Exact, Apply::Hogwild] {
            let store = Store::new(StoreOptions::default()).unwrap();
            let spec = TensorSpec { apply, ..TensorSpec::new("w", [initial.len() as u64], optimizer) };
            store.register(spec, View::Float32(&initial), TIMEOUT).unwrap();
            let matching = Correction { momentum_matching: true, ..Correction::default() };
            let workers: Vec<_> = (0..3).map(|_| store.another().unwrap()).collect();
            let mut bases: Vec<_> = workers.iter().map(|worker| base(&**worker)).collect();
            for (k, step) in case["steps"].as_array().unwrap().iter().enumerate() {
                let turn = turns[k] as usize;
                let pushed = gradient(Arc::new(gradients[k].clone()));
                let receipts = workers[turn].push(&pushed, &options(&bases[turn], matching)).unwrap();
                assert_eq!(receipts[0].momentum, step["beta1"].as_f64());
                bases[turn] = base(&*workers[turn]);
                let (got, expected) = (values(&store), floats(&step["values"]));
                assert_eq!(bits(&got), bits(&expected), "{optimizer} {apply:?}, step {k}");
                lowered += u32::from(step["beta1"].as_f64() < optimizer.beta1());
            }
        }
    }
    assert!(lowered > 50);
}

fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|x| x.to_bits()).collect()
}

/// The little-endian values of a string of hex digits.
fn floats(hex: &Value) -> Vec<f32> {
    let hex = hex.as_str().unwrap();
    let word = |at: usize| u32::from_str_radix(&hex[at..at + 8], 16).unwrap().swap_bytes();
    (0..hex.len()).step_by(8).map(|at| f32::from_bits(word(at))).collect()
}

/// The optimizer of a golden case.
fn optimizer_of(case: &Value) -> Optimizer {
    let settings = &case["settings"];
    let number = |name: &str, or: f64| settings[name].as_f64().unwrap_or(or);
    let flag = |name: &str| settings[name].as_bool().unwrap_or(false);
    let adam = Adam {
        lr: number("lr", 1e-3),
        beta1: settings["betas"][0].as_f64().unwrap_or(0.9),
        beta2: settings["betas"][1].as_f64().unwrap_or(0.999),
        weight_decay: number("weight_decay", 0.0),
        amsgrad: flag("amsgrad"),
        maximize: flag("maximize"),
        ..Adam::default()
    };
    if case["optimizer"] == "AdamW" { Optimizer::AdamW(AdamW(adam)) } else { Optimizer::Adam(adam) }
}
