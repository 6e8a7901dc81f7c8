//! A registration looks at no other tensor, however many there are. Names that are compared, to find the one
//! that a misspelt name stands for, are copied: the allocated bytes show it.
#![allow(missing_docs, clippy::unwrap_used)]

use cap::Cap;
use fastps_core::dtype::View;
use fastps_core::optim::{Optimizer, Sgd};
use fastps_core::store::{Store, StoreOptions};
use fastps_core::tensor::TensorSpec;
use fastps_core::verbs::prelude::*;
use std::alloc::System;
use std::time::Duration;

#[global_allocator]
static ALLOCATOR: Cap<System> = Cap::new(System, usize::MAX);

#[test]
fn a_registration_costs_the_same_among_many_tensors() {
    let store = Store::new(StoreOptions::default()).unwrap();
    let register = |numbers: std::ops::Range<usize>| {
        let before = ALLOCATOR.total_allocated();
        for k in numbers {
            let spec = TensorSpec::new(format!("{k:05}"), [1], Optimizer::Sgd(Sgd::default()));
            store.register(spec, View::Float32(&[0.0]), Duration::from_mins(1)).unwrap();
        }
        ALLOCATOR.total_allocated() - before
    };
    // No hash table grows in either hundred.
    register(0..1000);
    let few = register(1000..1100);
    register(1100..4000);
    let many = register(4000..4100);
    assert!(many <= 2 * few, "{few} bytes for 100 tensors among 1,000, {many} among 4,000");
}
