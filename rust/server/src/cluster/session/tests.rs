//! Tests of sessions.

use super::*;
use crate::auth::budget::Budgets;
use crate::auth::principal::{Limits, Principal};
use crate::auth::role::Role;
use crate::auth::scope::Scope;
use crate::cluster::ended::ENDED_BYTES;

const LEASE: Duration = Duration::from_secs(10);
const PERIOD: Duration = Duration::from_secs(1);

/// Evidence of a caller without a name.
fn shows(secret: Option<&SecretHash>) -> Proof<'_> {
    Proof { secret, principal: None }
}

fn hello(sessions: &Sessions, client: u64, name: &str, renew: bool, now: Instant) -> Result<Greeted> {
    let secret = SecretHash::of(b"its own");
    sessions.hello(
        &Greeting { client, secret, principal: None, budget: None, name, renew, ack: Ack::Applied },
        now,
    )
}

#[test]
fn a_session_lives_as_long_as_signs_of_life_come() {
    let (sessions, start) = (Sessions::new(LEASE, Meter::new(2 * SESSION_BYTES)), Instant::now());
    hello(&sessions, 1, "a", false, start).unwrap();
    hello(&sessions, 1, "a", true, start).unwrap();
    for second in 1..30 {
        let now = start + PERIOD * second;
        sessions.touch(1, now).unwrap();
        assert!(sessions.sweep(now, PERIOD).is_empty());
    }
    let mut ended = Vec::new();
    for second in 30..=40 {
        ended.extend(sessions.sweep(start + PERIOD * second, PERIOD));
    }
    let ended: Vec<_> = ended.iter().map(|over| (over.client, over.number, over.name.as_str())).collect();
    assert_eq!(ended, [(1, 1, "a")]);
    assert_eq!(sessions.touch(1, start).unwrap_err().kind, Kind::Lease);
    assert_eq!(sessions.counts(), [0, 1, 0, 0]);
}

#[test]
fn an_ended_incarnation_never_comes_back() {
    let meter = Meter::new(2 * SESSION_BYTES + ENDED_BYTES);
    let (sessions, start) = (Sessions::new(LEASE, meter), Instant::now());
    assert_eq!(hello(&sessions, 1, "", true, start).unwrap_err().kind, Kind::Lease);
    hello(&sessions, 1, "", false, start).unwrap();
    (0..=11).for_each(|s| drop(sessions.sweep(start + PERIOD * s, PERIOD)));
    let refused = hello(&sessions, 1, "", false, start).unwrap_err();
    assert!(refused.kind == Kind::Lease && refused.message.contains("longer --lease-ms"), "{refused}");
    hello(&sessions, 2, "", false, start).unwrap();
    hello(&sessions, 3, "", false, start).unwrap();
    let full = hello(&sessions, 4, "", false, start).unwrap_err();
    assert!(full.kind == Kind::Capacity && full.retry_after_ms.is_some(), "{full}");
    hello(&sessions, 3, "", true, start).unwrap();
}

#[test]
fn a_client_that_pushes_gradients_is_known_for_a_lease() {
    let (sessions, start) = (Sessions::new(LEASE, Meter::new(9 * SESSION_BYTES)), Instant::now());
    for (client, name) in [(1, "a"), (2, "b"), (3, "c")] {
        hello(&sessions, client, name, false, start).unwrap();
    }
    let pusher = |client, now| sessions.free_pusher(7, client, now);
    assert_eq!(pusher(1, start), None);
    (0..3).for_each(|_| sessions.note_gradient(1, 7));
    assert_eq!((pusher(1, start), pusher(2, start)), (None, Some("a".to_owned())));
    sessions.note_gradient(2, 7);
    sessions.note_gradient(2, 7);
    assert_eq!((pusher(1, start), pusher(2, start)), (Some("b".to_owned()), Some("a".to_owned())));
    sessions.forget_gradients(2, 7);
    assert_eq!((pusher(1, start), pusher(3, start)), (None, Some("a".to_owned())));
    assert_eq!((pusher(3, start + LEASE + PERIOD), sessions.free_pusher(8, 3, start)), (None, None));
    sessions.sweep(start + LEASE + PERIOD, PERIOD);
    assert!(sessions.table().pushers.is_empty());
}

#[test]
fn a_server_that_slept_ends_no_session() {
    let (sessions, start) = (Sessions::new(LEASE, Meter::new(2 * SESSION_BYTES)), Instant::now());
    sessions.sweep(start, PERIOD);
    hello(&sessions, 1, "", false, start).unwrap();
    assert!(sessions.sweep(start + Duration::from_secs(1000), PERIOD).is_empty());
}

#[test]
fn an_idle_session_gives_way_where_the_table_is_full() {
    let start = Instant::now();
    let sessions = Sessions { most: 3, ..Sessions::new(LEASE, Meter::new(9 * SESSION_BYTES)) };
    let hello = |client, renew, now| hello(&sessions, client, "", renew, now);
    (1..=3).for_each(|client| assert!(hello(client, false, start).unwrap().changed));
    let later = start + LEASE / 2 + PERIOD;
    assert!(sessions.idle(start + PERIOD).is_empty());
    sessions.touch(2, later).unwrap();
    assert_eq!(hello(4, false, later).unwrap_err().kind, Kind::Capacity);
    let mut idle = sessions.idle(later);
    idle.sort_unstable();
    idle.dedup();
    assert_eq!(idle, [1, 3]);
    assert!(sessions.give_way(2, later).is_none(), "its lease was renewed");
    assert_eq!(sessions.give_way(3, later).unwrap().number, 3);
    assert!(sessions.idle(later).is_empty(), "there is room");
    hello(4, false, later).unwrap();
    assert_eq!(hello(3, true, later).unwrap_err().kind, Kind::Lease);
    assert_eq!(sessions.counts(), [3, 0, 1, 0]);
    assert!(sessions.give_way(3, later).is_none());
    sessions.give_way(1, later).unwrap();
    // Gradients that a slice may have forgotten cannot be applied again.
    assert_eq!(hello(3, false, later).unwrap_err().kind, Kind::Lease);
    hello(5, false, later).unwrap();
}

#[test]
fn the_order_of_sessions_does_not_grow_without_them() {
    let sessions = Sessions::new(LEASE, Meter::new(2 * SESSION_BYTES + 100 * ENDED_BYTES));
    let mut now = Instant::now();
    for client in 1..100 {
        hello(&sessions, client, "", false, now).unwrap();
        (0..12).for_each(|_| {
            now += PERIOD;
            sessions.sweep(now, PERIOD);
        });
    }
    assert!(sessions.table().order.len() <= MAX_IDLE_CANDIDATES + 2);
}

#[test]
fn only_a_client_itself_closes_its_session() {
    let (sessions, start) = (Sessions::new(LEASE, Meter::new(2 * SESSION_BYTES)), Instant::now());
    hello(&sessions, 1, "a", false, start).unwrap();
    let (own, other) = (SecretHash::of(b"its own"), SecretHash::of(b"another"));
    assert_eq!(sessions.close(1, shows(Some(&other))).unwrap_err().kind, Kind::Denied);
    assert_eq!(sessions.close(2, shows(Some(&own))).unwrap_err().kind, Kind::Lease);
    assert_eq!(sessions.close(1, shows(Some(&own))).unwrap().name, "a");
    assert_eq!(sessions.counts(), [0, 0, 0, 1]);
    assert_eq!(hello(&sessions, 1, "a", false, start).unwrap_err().kind, Kind::Lease);
    assert_eq!(sessions.close(1, shows(Some(&own))).unwrap_err().kind, Kind::Lease);
}

#[test]
fn bad_hellos_are_refused() {
    let sessions = Sessions::new(LEASE, Meter::new(2 * SESSION_BYTES));
    assert_eq!(hello(&sessions, 0, "", false, Instant::now()).unwrap_err().kind, Kind::Config);
    assert_eq!(hello(&sessions, 1, &"x".repeat(257), false, Instant::now()).unwrap_err().kind, Kind::Config);
}

#[test]
fn who_has_no_secret_renews_and_learns_nothing() {
    let (sessions, start) = (Sessions::new(LEASE, Meter::new(2 * SESSION_BYTES)), Instant::now());
    let number = hello(&sessions, 1, "a", false, start).unwrap().number;
    let (own, other) = (SecretHash::of(b"its own"), SecretHash::of(b"another"));
    let late = start + LEASE / 2;
    for shown in [None, Some(&other)] {
        assert_eq!(sessions.check(1, shows(shown)).unwrap_err().kind, Kind::Denied);
        assert_eq!(sessions.admit(1, shows(shown), late).unwrap_err().kind, Kind::Denied);
    }
    for renew in [false, true] {
        let stranger = Greeting {
            client: 1,
            secret: other,
            principal: None,
            budget: None,
            name: "b",
            renew,
            ack: Ack::Logged,
        };
        assert_eq!(sessions.hello(&stranger, late).unwrap_err().kind, Kind::Denied);
    }
    let listed = &sessions.list(late, 9, None)[0];
    assert_eq!((listed.session, listed.name.as_str()), (number, "a"));
    assert_eq!(listed.idle, LEASE / 2);
    // The client itself, also where the answer to its Hello got lost.
    assert_eq!(sessions.admit(1, shows(Some(&own)), late).unwrap(), Ack::Applied);
    assert_eq!(hello(&sessions, 1, "a", false, late).unwrap().number, number);
}

#[test]
fn a_restored_session_is_its_clients_alone() {
    let (sessions, start) = (Sessions::new(LEASE, Meter::new(2 * SESSION_BYTES)), Instant::now());
    let (own, other) = (SecretHash::of(b"its own"), SecretHash::of(b"another"));
    // The second was begun by a server that knew of no secrets.
    let mut catalog = Catalog::default();
    catalog.sessions.extend([1, 2]);
    catalog.secrets.insert(1, own);
    sessions.restore(&catalog, Ack::Logged, start).unwrap();
    assert_eq!(sessions.check(2, shows(None)).unwrap_err().kind, Kind::Denied);
    assert_eq!(sessions.check(2, shows(Some(&own))).unwrap_err().kind, Kind::Unavailable);
    for (client, changed) in [(1, false), (2, true)] {
        assert_eq!(hello(&sessions, client, "", true, start).unwrap().changed, changed);
        assert_eq!(sessions.check(client, shows(Some(&other))).unwrap_err().kind, Kind::Denied);
        sessions.check(client, shows(Some(&own))).unwrap();
    }
}

#[test]
fn a_session_belongs_to_the_principal_that_opened_it() {
    let (sessions, start) = (Sessions::new(LEASE, Meter::new(3 * SESSION_BYTES)), Instant::now());
    let (secret, alice, bob): (_, Arc<str>, Arc<str>) =
        (SecretHash::of(b"its own"), "alice".into(), "bob".into());
    let hello = |client, principal| {
        sessions.hello(
            &Greeting { client, secret, principal, budget: None, name: "", renew: false, ack: Ack::Applied },
            start,
        )
    };
    hello(1, Some(&alice)).unwrap();
    let proof = |principal| Proof { secret: Some(&secret), principal };
    assert_eq!(sessions.admit(1, proof(Some(&bob)), start).unwrap_err().kind, Kind::Denied);
    assert_eq!(hello(1, Some(&bob)).unwrap_err().kind, Kind::Denied);
    assert_eq!(sessions.close(1, proof(Some(&bob))).unwrap_err().kind, Kind::Denied);
    let same: Arc<str> = "alice".into();
    sessions.admit(1, proof(Some(&same)), start).unwrap();
    // A local client of a server that also takes certificates.
    sessions.admit(1, proof(None), start).unwrap();
    assert_eq!(
        (sessions.list(start, 9, Some(&alice)).len(), sessions.list(start, 9, Some(&bob)).len()),
        (1, 0)
    );
    // One that was restored belongs to the first principal that shows its secret in a Hello.
    let mut catalog = Catalog::default();
    catalog.sessions.extend([2]);
    catalog.secrets.insert(2, secret);
    sessions.restore(&catalog, Ack::Logged, start).unwrap();
    hello(2, Some(&bob)).unwrap();
    assert_eq!(sessions.admit(2, proof(Some(&alice)), start).unwrap_err().kind, Kind::Denied);
}

#[test]
fn a_principal_has_a_share_of_the_sessions_and_of_the_rows() {
    let start = Instant::now();
    let sessions = Sessions { most: 4 * PARTS, ..Sessions::new(LEASE, Meter::new(99 * SESSION_BYTES)) };
    let principals = ["greedy", "alice", "bob"].map(Arc::<str>::from);
    let hello = |client, owner: Option<usize>| {
        let (secret, principal) = (SecretHash::of(b"its own"), owner.map(|k| &principals[k]));
        let greeting =
            Greeting { client, secret, principal, budget: None, name: "", renew: false, ack: Ack::Applied };
        sessions.hello(&greeting, start)
    };
    let report = |client, steps| {
        sessions.keep_report(client, WorkerReport { steps, ..WorkerReport::default() });
    };
    for client in 1..=4 {
        hello(client, Some(0)).unwrap();
        report(client, 1000 * client);
    }
    let error = hello(5, Some(0)).unwrap_err();
    assert_eq!((error.kind, error.expected.as_deref()), (Kind::Capacity, Some("at most 4")));
    assert!(error.message.contains("principal") && error.retry_after_ms.is_some(), "{error}");
    for (client, owner) in [(6, Some(1)), (7, Some(1)), (8, Some(2)), (9, None)] {
        hello(client, owner).unwrap();
        report(client, client);
    }
    let steps = |states: Vec<WorkerState>| -> Vec<u64> {
        states.iter().map(|state| state.report.as_ref().unwrap().steps).collect()
    };
    assert_eq!(steps(sessions.workers(start)), [4000, 9, 8, 7, 3000, 6, 2000, 1000]);
    assert_eq!(steps(sessions.list(start, 5, None)), [4000, 9, 8, 7, 3000]);
    // A session that ends makes room.
    let secret = SecretHash::of(b"its own");
    let proof = Proof { secret: Some(&secret), principal: Some(&principals[0]) };
    sessions.close(1, proof).unwrap();
    hello(10, Some(0)).unwrap();
    hello(11, Some(0)).unwrap_err();
    // Restored ones count once their principal is known.
    let mut catalog = Catalog::default();
    catalog.sessions.extend([12, 13]);
    sessions.restore(&catalog, Ack::Logged, start).unwrap();
    hello(12, Some(0)).unwrap();
    sessions.close(2, proof).unwrap();
    hello(14, Some(0)).unwrap_err();
}

#[test]
fn a_restored_session_is_renewed_though_its_principal_has_no_memory_left() {
    let (sessions, start) = (Sessions::new(LEASE, Meter::new(3 * SESSION_BYTES)), Instant::now());
    let limits = Limits { memory: Some(SESSION_BYTES), ..Limits::default() };
    let alice = Principal { limits, ..Principal::new("alice", Role::Worker, Scope::Everything) };
    let (budget, secret) = (Budgets::default().of(&alice), SecretHash::of(b"its own"));
    let hello = |client, renew| {
        let (principal, budget) = (alice.name.as_ref(), budget.as_ref());
        sessions
            .hello(&Greeting { client, secret, principal, budget, name: "", renew, ack: Ack::Applied }, start)
    };
    let mut catalog = Catalog::default();
    catalog.sessions.extend([1, 2]);
    catalog.secrets.extend([(1, secret), (2, secret)]);
    sessions.restore(&catalog, Ack::Logged, start).unwrap();
    for client in [1, 2] {
        hello(client, true).unwrap();
    }
    assert_eq!(hello(3, false).unwrap_err().kind, Kind::Capacity);
    assert_eq!(sessions.list(start, 9, alice.name.as_ref()).len(), 2);
}

#[test]
fn a_worker_that_is_named_gets_no_session() {
    let names = ["gpu-7".to_owned(), "gpu-9".to_owned()];
    let sessions = Sessions::new(LEASE, Meter::new(2 * SESSION_BYTES)).refusing(&names);
    let start = Instant::now();
    for (renew, name) in [(false, "gpu-7"), (true, "gpu-7"), (false, "gpu-9")] {
        let refused = hello(&sessions, 1, name, renew, start).unwrap_err();
        assert_eq!(refused.kind, Kind::Denied);
        assert!(
            refused.to_string().contains(name) && refused.message.contains("--refuse-worker"),
            "{refused}"
        );
    }
    hello(&sessions, 1, "gpu-8", false, start).unwrap();
    // A session does not change its name to a refused one.
    assert_eq!(hello(&sessions, 1, "gpu-9", true, start).unwrap_err().kind, Kind::Denied);
    assert_eq!(sessions.counts(), [1, 0, 0, 0]);
}
