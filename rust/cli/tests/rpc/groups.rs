//! Groups of workers over connections that break: every step counts once, even if its answer was lost.

use crate::cluster::Cluster;
use crate::ledger::{gradient, register};
use crate::proxy::Proxies;
use fastps_client::{Client, ConnectOptions};
use fastps_core::error::Kind;
use fastps_core::mode::{MembershipRequest, Mode, Quorum};
use fastps_core::optim::{Optimizer, Sgd};
use fastps_core::verbs::PushOptions;
use fastps_core::verbs::prelude::*;
use std::sync::Arc;
use std::time::Duration;

const PATIENT: Duration = Duration::from_secs(30);
const BRIEF: Duration = Duration::from_millis(700);
const GROUP: &str = "default";

fn worker(addresses: &[String], name: &str) -> Arc<Client> {
    let options = ConnectOptions { timeout: PATIENT, ..ConnectOptions::default() };
    let client = Client::connect(addresses, options).unwrap();
    let seat = MembershipRequest::new(Mode::Bounded { staleness: 5 }, None, name.to_owned());
    client.join(GROUP, &seat, PATIENT).unwrap();
    client
}

#[test]
fn a_client_that_pushes_without_a_place_is_not_bound_by_sync() {
    let cluster = Cluster::of(1, |_| ());
    let [free, other] = [(); 2].map(|()| {
        Client::connect(
            &cluster.addresses(),
            ConnectOptions { timeout: PATIENT, ..ConnectOptions::default() },
        )
        .unwrap()
    });
    register(&*free, "w", 4, Optimizer::Sgd(Sgd::default()));
    let gradient = gradient("w", vec![-1.0; 4]);
    let push = || {
        let options = PushOptions { timeout: PATIENT, ..PushOptions::default() };
        free.push(std::slice::from_ref(&gradient), &options).unwrap()
    };
    push();
    let mode = Mode::Sync(Quorum { workers: 1, ..Quorum::default() });
    let seat = MembershipRequest::new(mode, None, "other");
    let refused = other.join(GROUP, &seat, BRIEF).unwrap_err();
    assert!(
        refused.kind == Kind::Unavailable && refused.to_string().contains("without a place"),
        "{refused}"
    );
    push();
    free.close(PATIENT);
    other.join(GROUP, &seat, PATIENT).unwrap();
}

#[test]
fn a_step_counts_once_whether_its_answer_arrived_or_was_lost() {
    let cluster = Cluster::of(2, |config| config.lease = Duration::from_mins(10));
    let proxies = Proxies::start(&cluster.addresses(), 33);
    let truth = Client::connect(&cluster.addresses(), ConnectOptions::default()).unwrap();
    register(&*truth, "w", 4, Optimizer::Sgd(Sgd::default()));
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
