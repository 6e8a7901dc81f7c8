//! The tensors of every fault test, of 3 slices or small, pushed by two clients with different codecs, and a
//! ledger of the acknowledged pushes.
//!
//! Both clients push to the counter tensors (SGD, a push of -1 adds 1), and each to its own Adam tensors, in
//! which content and order affect every bit. All values of a slice are equal, so 1-bit encodes them exactly,
//! and the next push shows to the last bit what was refused or fenced.

use fastps_core::dtype::{Array, View};
use fastps_core::optim::{Adam, Optimizer, Sgd};
use fastps_core::store::{Store, StoreOptions};
use fastps_core::tensor::TensorSpec;
use fastps_core::verbs::prelude::*;
use fastps_core::verbs::{Gradient, PushOptions};
use std::collections::HashMap;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, LazyLock, Mutex};
use std::time::{Duration, Instant};

/// The deadline for answers that must come.
pub(crate) const PATIENT: Duration = Duration::from_mins(1);
pub(crate) const SLICE: usize = 258_048;
const BIG: usize = 2 * SLICE + 5;
const SMALL: usize = 10;

#[derive(Debug)]
pub(crate) struct Tensor {
    pub(crate) name: Arc<str>,
    pub(crate) elements: usize,
    /// The only client that pushes to it; `None` for a counter, to which both push.
    pub(crate) owner: Option<usize>,
}

/// A slice: the index of its tensor in [`TENSORS`], and its index in the tensor.
pub(crate) type Part = (usize, usize);

pub(crate) static TENSORS: LazyLock<Vec<Tensor>> = LazyLock::new(|| {
    let tensor = |name: String, elements, owner| Tensor { name: name.into(), elements, owner };
    let mut tensors = vec![tensor("big".into(), BIG, None)];
    tensors.extend((0..100).map(|k| tensor(format!("small {k}"), SMALL, None)));
    for owner in 0..2 {
        tensors.push(tensor(format!("adam {owner} big"), BIG, Some(owner)));
        tensors.extend((0..10).map(|k| tensor(format!("adam {owner} small {k}"), SMALL, Some(owner))));
    }
    tensors
});

impl Tensor {
    pub(crate) fn named(name: &str) -> usize {
        TENSORS.iter().position(|tensor| &*tensor.name == name).unwrap()
    }

    pub(crate) fn is_pushed_by(&self, client: usize) -> bool {
        self.owner.is_none_or(|owner| owner == client)
    }

    pub(crate) fn is_big(&self) -> bool {
        self.elements == BIG
    }

    pub(crate) fn slices(&self) -> impl Iterator<Item = Range<usize>> {
        (0..self.elements).step_by(SLICE).map(|first| first..self.elements.min(first + SLICE))
    }

    fn optimizer(&self) -> Optimizer {
        match self.owner {
            None => Optimizer::Sgd(Sgd { lr: 1.0, ..Sgd::default() }),
            Some(_) => Optimizer::Adam(Adam::default()),
        }
    }

    /// The value that a client pushes in this round.
    pub(crate) fn gradient(&self, round: usize) -> f32 {
        match self.owner {
            None => -1.0,
            Some(_) => -1.0 - ((7 * round + self.name.len()) % 5) as f32,
        }
    }
}

pub(crate) fn register(ps: &dyn ParameterServer, name: &str, elements: usize, optimizer: Optimizer) {
    let spec = TensorSpec::new(name, [elements as u64], optimizer);
    ps.register(spec, View::Float32(&vec![0.0; elements]), PATIENT).unwrap();
}

pub(crate) fn gradient(name: &str, values: Vec<f32>) -> Gradient {
    Gradient { name: name.into(), shape: vec![values.len() as u64], values: Arc::new(values) }
}

/// Expected state of the servers.
#[derive(Debug)]
pub(crate) struct Ledger {
    counted: Mutex<HashMap<Part, f32>>,
    /// In this store each slice of an Adam tensor is its own tensor, so that it can be pushed separately.
    mirror: Store,
}

fn mirrored((tensor, slice): Part) -> String {
    format!("{} [{slice}]", TENSORS[tensor].name)
}

impl Ledger {
    pub(crate) fn new() -> Self {
        let mirror = Store::new(StoreOptions::default()).unwrap();
        for (k, tensor) in TENSORS.iter().enumerate().filter(|(_, tensor)| tensor.owner.is_some()) {
            for (slice, elements) in tensor.slices().enumerate() {
                register(&mirror, &mirrored((k, slice)), elements.len(), tensor.optimizer());
            }
        }
        Self { counted: Mutex::new(HashMap::new()), mirror }
    }

    /// Registers all tensors.
    pub(crate) fn register(ps: &dyn ParameterServer) {
        for tensor in &*TENSORS {
            register(ps, &tensor.name, tensor.elements, tensor.optimizer());
        }
    }

    /// Records that a push of this value to this slice was applied.
    pub(crate) fn enter(&self, part: Part, value: f32) {
        let tensor = &TENSORS[part.0];
        if tensor.owner.is_none() {
            *self.counted.lock().unwrap().entry(part).or_default() -= value;
            return;
        }
        let elements = tensor.slices().nth(part.1).unwrap().len();
        let options = PushOptions { codec: None, timeout: PATIENT, ..PushOptions::default() };
        self.mirror.push(&[gradient(&mirrored(part), vec![value; elements])], &options).unwrap();
    }

    /// The first difference between the ledger and the servers: counts, and Adam's values and state, bit for
    /// bit.
    pub(crate) fn difference(&self, ps: &dyn ParameterServer) -> Option<String> {
        let names: Vec<_> = TENSORS.iter().map(|tensor| tensor.name.clone()).collect();
        let pulled = pull(ps, names);
        for (k, tensor) in TENSORS.iter().enumerate() {
            for (slice, elements) in tensor.slices().enumerate() {
                let got = &pulled[k][elements.clone()];
                let expected = if tensor.owner.is_none() {
                    let count = self.counted.lock().unwrap().get(&(k, slice)).copied().unwrap_or_default();
                    vec![count; elements.len()]
                } else {
                    pull(&self.mirror, vec![mirrored((k, slice)).into()]).remove(0)
                };
                let differs = |(a, b): (&f32, &f32)| a.to_bits() != b.to_bits();
                if let Some(i) = got.iter().zip(&expected).position(differs) {
                    let (name, got, expected) = (&tensor.name, got[i], expected[i]);
                    return Some(format!("slice {slice} of {name}, element {i}: {got}, not {expected}"));
                }
            }
        }
        None
    }

    pub(crate) fn check(&self, ps: &dyn ParameterServer) {
        assert_eq!(self.difference(ps), None);
        for (k, tensor) in TENSORS.iter().enumerate().filter(|(_, tensor)| tensor.owner.is_some()) {
            let state = ps.state(&tensor.name, PATIENT).unwrap();
            for (slice, elements) in tensor.slices().enumerate() {
                let expected = self.mirror.state(&mirrored((k, slice)), PATIENT).unwrap();
                assert_eq!(
                    state.steps[slice], expected.steps[0],
                    "steps of slice {slice} of {}",
                    tensor.name
                );
                for ((name, got), (_, expected)) in state.slots.iter().zip(&expected.slots) {
                    let got = got.view().get(elements.clone());
                    assert!(got == expected.view(), "{name} of slice {slice} of {}", tensor.name);
                }
            }
        }
    }
}

pub(crate) fn pull(ps: &dyn ParameterServer, names: Vec<Arc<str>>) -> Vec<Vec<f32>> {
    let pulled = ps.pull_async(names, PATIENT).unwrap().wait(2 * PATIENT).unwrap().unwrap();
    pulled.values.into_iter().map(floats).collect()
}

pub(crate) fn floats(values: Array) -> Vec<f32> {
    values.view().float32s().unwrap().to_vec()
}

/// Waits for a condition, up to a deadline.
pub(crate) fn until(what: &str, condition: impl Fn() -> bool) {
    let begin = Instant::now();
    while !condition() {
        assert!(begin.elapsed() < PATIENT, "it does not come: {what}");
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// Sets the flag on drop, so that a failing test does not wait for threads that wait for the flag.
pub(crate) struct AtTheEnd<'a>(pub(crate) &'a AtomicBool);

impl Drop for AtTheEnd<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Release);
    }
}
