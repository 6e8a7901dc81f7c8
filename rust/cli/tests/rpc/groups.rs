//! Groups of workers over connections that break: every step counts once, even if its answer was lost.

use crate::cluster::Cluster;
use crate::proxy::Proxies;
use fastps_client::{Client, ConnectOptions};
use fastps_core::dtype::{DType, View};
use fastps_core::error::Kind;
use fastps_core::mode::{MembershipRequest, Mode};
use fastps_core::optim::{Optimizer, Sgd};
use fastps_core::tensor::{Apply, TensorSpec};
use fastps_core::verbs::prelude::*;
use std::sync::Arc;
use std::time::Duration;

const PATIENT: Duration = Duration::from_secs(30);
const BRIEF: Duration = Duration::from_millis(700);
const GROUP: &str = "default";

fn worker(addresses: &[String], name: &str) -> Arc<Client> {
    let options = ConnectOptions { timeout: PATIENT, ..ConnectOptions::default() };
    let client = Client::connect(addresses, options).unwrap();
    let seat = MembershipRequest { mode: Mode::Bounded { staleness: 5 }, rank: None, name: name.to_owned() };
    client.join(GROUP, &seat, PATIENT).unwrap();
    client
}

#[test]
fn a_step_counts_once_whether_its_answer_arrived_or_was_lost() {
    let cluster = Cluster::of(2, |config| config.lease = Duration::from_mins(10));
    let proxies = Proxies::start(&cluster.addresses(), 33);
    let truth = Client::connect(&cluster.addresses(), ConnectOptions::default()).unwrap();
    let (name, shape, group) = ("w".into(), vec![4], GROUP.into());
    let (dtype, apply, optimizer) = (DType::Float32, Apply::Exact, Optimizer::Sgd(Sgd::default()));
    let spec = TensorSpec { name, shape, dtype, apply, group, optimizer };
    truth.register(spec, View::Float32(&[0.0; 4]), PATIENT).unwrap();
    let broken = worker(&proxies.addresses(), "over connections that break");
    let other = worker(&cluster.addresses(), "the other");
    // The other worker's clock is ahead, so this one is the slowest.
    other.advance(GROUP, false, 5, PATIENT).unwrap();
    let clock_after = |steps| {
        broken.advance(GROUP, false, steps, PATIENT).unwrap();
        other.advance(GROUP, false, 0, PATIENT).unwrap().slowest
    };
    assert_eq!(clock_after(1), 1);
    proxies.set_down(true);
    let untold = broken.advance(GROUP, false, 1, BRIEF).unwrap_err();
    assert!(matches!(untold.kind, Kind::Connection | Kind::Deadline), "{untold:?}");
    proxies.set_down(false);
    assert_eq!(clock_after(0), 2);
    proxies.set_deaf(true);
    assert_eq!(broken.advance(GROUP, false, 1, BRIEF).unwrap_err().kind, Kind::Deadline);
    proxies.set_down(true);
    proxies.set_deaf(false);
    proxies.set_down(false);
    assert_eq!(clock_after(0), 3);
    assert_eq!(clock_after(1), 4);
}
