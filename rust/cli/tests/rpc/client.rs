//! The native client against real servers: the same numbers, bit for bit, as the in-process store, and every
//! documented error.

use crate::authors::World;
use crate::cluster::Cluster;
use crate::ledger::{SLICE, TENSORS, Tensor, floats, until};
use crate::proxy::Proxies;
use fastps_client::{Client, ConnectOptions};
use fastps_core::codec::{Codec, ErrorFeedback};
use fastps_core::dtype::{Array, View};
use fastps_core::error::Kind;
use fastps_core::optim::{Adadelta, Adagrad, Adam, AdamW, Optimizer, Rmsprop, Sgd};
use fastps_core::store::{Store, StoreOptions};
use fastps_core::tensor::TensorSpec;
use fastps_core::verbs::prelude::*;
use fastps_core::verbs::{
    Fate, Gradient, OptimizerState, Patient, PushError, PushOptions, Pushed, Receipt, Ticket, Versions,
};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

const TIMEOUT: Duration = Duration::from_mins(1);
const BIG: u64 = 2 * 258_048 + 5;

fn spec(name: &str, shape: &[u64], optimizer: Optimizer) -> TensorSpec {
    TensorSpec::new(name, shape.to_vec(), optimizer)
}

fn sgd() -> Optimizer {
    Optimizer::Sgd(Sgd { lr: 1.0, ..Sgd::default() })
}

fn numbers(n: usize, seed: u32) -> Vec<f32> {
    let mut x = seed.wrapping_mul(2_654_435_769) | 1;
    let next = || {
        x ^= x << 13;
        x ^= x >> 17;
        x ^= x << 5;
        (x as f32 / u32::MAX as f32 - 0.5) * 4.0
    };
    std::iter::repeat_with(next).take(n).collect()
}

fn gradient(name: &str, shape: &[u64], values: Vec<f32>) -> Gradient {
    Gradient { name: name.into(), shape: shape.to_vec(), values: Arc::new(values) }
}

fn options(codec: Codec) -> PushOptions {
    PushOptions { codec: Some(codec), timeout: TIMEOUT, ..PushOptions::default() }
}

fn connect(cluster: &Cluster) -> Arc<Client> {
    Client::connect(&cluster.addresses(), ConnectOptions { timeout: TIMEOUT, ..ConnectOptions::default() })
        .unwrap()
}

fn names(shapes: &[(&str, &[u64])]) -> Vec<Arc<str>> {
    shapes.iter().map(|(name, _)| (*name).into()).collect()
}

fn pull(ps: &dyn ParameterServer, shapes: &[(&str, &[u64])]) -> (Vec<Vec<u32>>, Versions) {
    let sizes = shapes.iter().map(|(_, shape)| shape.iter().product::<u64>() as usize);
    let mut values: Vec<Vec<u32>> = sizes.map(|n| vec![0x7FC0_0000; n]).collect();
    let mut sink = |tensor: usize, first: usize, bytes: &[u8]| {
        for (value, bytes) in values[tensor][first..].iter_mut().zip(bytes.chunks_exact(4)) {
            *value = u32::from_le_bytes(bytes.try_into().unwrap());
        }
    };
    let versions = ps.pull(&names(shapes), TIMEOUT, &mut sink).unwrap();
    (values, versions)
}

fn one(ps: &dyn ParameterServer, name: &str, n: u64) -> Vec<f32> {
    pull(ps, &[(name, &[n])]).0.remove(0).into_iter().map(f32::from_bits).collect()
}

fn numbers_of(versions: &Versions) -> Vec<Vec<(u64, u64)>> {
    versions.tensors().iter().map(|(_, slices)| slices.iter().map(|s| (s.version, s.own)).collect()).collect()
}

fn optimizers() -> Vec<Optimizer> {
    vec![
        Optimizer::Sgd(Sgd { lr: 0.1, momentum: 0.9, nesterov: true, ..Sgd::default() }),
        Optimizer::Adagrad(Adagrad::default()),
        Optimizer::Rmsprop(Rmsprop { centered: true, momentum: 0.5, ..Rmsprop::default() }),
        Optimizer::Adadelta(Adadelta::default()),
        Optimizer::Adam(Adam { amsgrad: true, ..Adam::default() }),
        Optimizer::AdamW(AdamW::default()),
    ]
}

const SHAPES: [(&str, &[u64]); 6] = [
    ("scalar", &[]),
    ("seven", &[7]),
    ("matrix", &[64, 65]),
    ("block", &[4097]),
    ("big", &[BIG]),
    ("empty", &[0, 3]),
];

/// Receipts, bits of all values, version numbers and states.
type Seen = (Vec<Receipt>, Vec<Vec<u32>>, Vec<Vec<(u64, u64)>>, Vec<OptimizerState>);

/// Makes the same calls on any implementation and returns everything visible.
fn drive(ps: &dyn ParameterServer, optimizer: Optimizer, codec: Codec) -> Seen {
    for (k, (name, shape)) in SHAPES.iter().enumerate() {
        let n = shape.iter().product::<u64>() as usize;
        ps.register(spec(name, shape, optimizer), View::Float32(&numbers(n, k as u32)), TIMEOUT).unwrap();
    }
    let feedback = (codec == Codec::OneBit).then(|| Arc::new(Mutex::new(ErrorFeedback::new())));
    let mut based_on = None;
    let mut receipts = Vec::new();
    for step in 0..3 {
        let gradients: Vec<_> = SHAPES
            .iter()
            .enumerate()
            .map(|(k, (name, shape))| {
                let n = shape.iter().product::<u64>() as usize;
                gradient(name, shape, numbers(n, 100 * step + k as u32 + 50))
            })
            .collect();
        let mut options = PushOptions { based_on, feedback: feedback.clone(), ..options(codec) };
        (options.lr, options.scale) = if step == 1 { (Some(0.25), Some(0.5)) } else { (None, None) };
        if step == 2 {
            let mut sink = |_: usize, _: usize, _: &[u8]| {};
            receipts.extend(ps.push_pull(&gradients, &options, &mut sink).unwrap().0);
        } else {
            receipts.extend(ps.push(&gradients, &options).unwrap());
        }
        based_on = Some(Arc::new(pull(ps, &SHAPES).1));
    }
    let mut states: Vec<_> = SHAPES.iter().map(|(name, _)| ps.state(name, TIMEOUT).unwrap()).collect();
    states[4].steps[1] = 7;
    ps.load_state("big", &states[4], TIMEOUT).unwrap();
    states.push(ps.state("big", TIMEOUT).unwrap());
    ps.assign(&gradient("block", &[4097], numbers(4097, 5)), TIMEOUT).unwrap();
    let (values, versions) = pull(ps, &SHAPES);
    (receipts, values, numbers_of(&versions), states)
}

#[test]
fn equals_the_store_bit_for_bit() {
    let codecs = [
        Codec::Float32,
        Codec::BFloat16,
        Codec::Int8 { seed: None },
        Codec::Int8 { seed: Some(9) },
        Codec::OneBit,
    ];
    for (k, optimizer) in optimizers().into_iter().enumerate() {
        for (j, codec) in codecs.into_iter().enumerate() {
            let shards = [1, 2, 3, 5][(k + j) % 4];
            let cluster = Cluster::start(shards);
            let client = connect(&cluster);
            let store = Store::new(StoreOptions::default()).unwrap();
            let (remote, local) = (drive(&*client, optimizer, codec), drive(&store, optimizer, codec));
            assert_eq!(remote.0, local.0, "{optimizer:?} {codec:?}");
            assert!(remote.1 == local.1, "values differ: {optimizer:?} {codec:?}");
            assert_eq!(remote.2, local.2);
            assert_eq!(remote.3, local.3);
            assert_eq!(client.names(TIMEOUT).unwrap(), store.names(TIMEOUT).unwrap());
            assert_eq!(client.spec("big", TIMEOUT).unwrap(), store.spec("big", TIMEOUT).unwrap());
        }
    }
}

#[test]
fn calls_that_do_not_wait_keep_their_order() {
    let cluster = Cluster::start(3);
    let client = connect(&cluster);
    client.register(spec("big", &[BIG], sgd()), View::Float32(&vec![0.0; BIG as usize]), TIMEOUT).unwrap();
    let ones: Arc<Vec<f32>> = Arc::new(vec![-1.0; BIG as usize]);
    let mut tickets = Vec::new();
    for step in 1..=100_u32 {
        let gradient = Gradient { name: "big".into(), shape: vec![BIG], values: ones.clone() };
        let push = client.push_async(vec![gradient], options(Codec::Float32)).unwrap();
        if step % 25 == 0 {
            tickets.push((step, push, client.pull_async(vec!["big".into()], TIMEOUT).unwrap()));
        }
    }
    for (step, push, pull) in tickets {
        let receipts = push.wait(TIMEOUT).unwrap().unwrap();
        assert_eq!(receipts[0].version, u64::from(step) + 1);
        let pulled = pull.wait(TIMEOUT).unwrap().unwrap();
        assert!(pulled.values[0] == Array::from(vec![step as f32; BIG as usize]));
        assert!(pull.is_done());
        let (tell, receiver) = std::sync::mpsc::channel();
        push.on_done(Box::new(move || tell.send(()).unwrap()));
        receiver.recv_timeout(TIMEOUT).unwrap();
    }
    assert_eq!(Arc::strong_count(&ones), 1, "the caller's memory is released");
}

#[test]
fn staleness_counts_others_only() {
    let cluster = Cluster::start(2);
    let (a, b) = (connect(&cluster), connect(&cluster));
    a.register(spec("w", &[3], sgd()), View::Float32(&[0.0; 3]), TIMEOUT).unwrap();
    b.register(spec("w", &[3], sgd()), View::Float32(&[9.0; 3]), TIMEOUT).unwrap();
    assert_eq!(one(&*b, "w", 3), [0.0; 3], "an equal registration changes nothing");
    let base = Arc::new(pull(&*a, &[("w", &[3])]).1);
    let push = |ps: &dyn ParameterServer, base: Option<Arc<Versions>>| {
        let options = PushOptions { based_on: base, ..options(Codec::Float32) };
        ps.push(&[gradient("w", &[3], vec![1.0; 3])], &options).unwrap().remove(0)
    };
    for _ in 0..3 {
        push(&*b, None);
    }
    push(&*a, None);
    let receipt = push(&*a, Some(base));
    assert_eq!((receipt.staleness, receipt.version, receipt.duplicate), (Some(3), 6, false));
    assert_eq!(push(&*a, None).staleness, None);
    let other = a.another().unwrap();
    assert_ne!(other.client(), a.client());
    assert_eq!(one(&*other, "w", 3), [-6.0; 3]);
}

#[test]
fn versions_travel_without_values() {
    let cluster = Cluster::start(2);
    let (a, b) = (connect(&cluster), connect(&cluster));
    a.register(spec("w", &[BIG], sgd()), View::Float32(&vec![0.0; BIG as usize]), TIMEOUT).unwrap();
    b.push(&[gradient("w", &[BIG], numbers(BIG as usize, 1))], &options(Codec::Float32)).unwrap();
    let names = [Arc::from("w")];
    let pulled = |client: &Client| {
        let stats = client.stats(TIMEOUT).unwrap().client;
        stats.into_iter().find(|(name, _)| name == "bytes_pulled").unwrap().1
    };
    for client in [&a, &b] {
        let before = pulled(client);
        let versions = client.versions(&names, TIMEOUT).unwrap();
        assert_eq!(pulled(client), before);
        assert_eq!(versions, pull(&**client, &[("w", &[BIG])]).1);
        assert_eq!(pulled(client), before + 4 * BIG);
    }
    let own = |client: &Client| numbers_of(&client.versions(&names, TIMEOUT).unwrap());
    assert_eq!((own(&a), own(&b)), (vec![vec![(2, 1); 3]], vec![vec![(2, 1); 3]]));
    // They can be the base of a push, like those of a pull.
    let based_on = Some(Arc::new(a.versions(&names, TIMEOUT).unwrap()));
    let zero = [gradient("w", &[BIG], vec![0.0; BIG as usize])];
    b.push(&zero, &options(Codec::Float32)).unwrap();
    let receipts = a.push(&zero, &PushOptions { based_on, ..options(Codec::Float32) }).unwrap();
    assert_eq!(receipts[0].staleness, Some(1));
    let missing = a.versions(&[Arc::from("none")], TIMEOUT).unwrap_err();
    assert_eq!((missing.kind, missing.tensor.as_deref()), (Kind::UnknownTensor, Some("none")));
}

#[test]
fn every_refusal_is_typed_and_changes_nothing() {
    let cluster = Cluster::start(2);
    let client = connect(&cluster);
    client.register(spec("w", &[2, 3], sgd()), View::Float32(&[1.0; 6]), TIMEOUT).unwrap();
    let versions = || numbers_of(&client.versions(&["w".into()], TIMEOUT).unwrap());
    let before = versions();
    let refused = |gradients: &[Gradient], options: &PushOptions| match client.push(gradients, options) {
        Err(PushError::Refused(error)) => error,
        other => panic!("{other:?}"),
    };
    let good = || gradient("w", &[2, 3], vec![1.0; 6]);
    let error = refused(&[good(), gradient("absent", &[1], vec![1.0])], &options(Codec::Float32));
    assert_eq!((error.kind, error.tensor.as_deref()), (Kind::UnknownTensor, Some("absent")));
    assert!(cluster.addresses().iter().all(|address| error.message.contains(address)), "{error}");
    let error = refused(&[gradient("w", &[6], vec![1.0; 6])], &options(Codec::Float32));
    assert_eq!(
        (error.kind, error.expected.as_deref(), error.got.as_deref()),
        (Kind::Shape, Some("(2, 3)"), Some("(6,)"))
    );
    let error = refused(&[good()], &options(Codec::OneBit));
    assert_eq!(error.kind, Kind::Config);
    assert_eq!(refused(&[good(), good()], &options(Codec::Float32)).kind, Kind::Config);
    assert_eq!(
        refused(&[good()], &PushOptions { lr: Some(f64::NAN), ..options(Codec::Float32) }).kind,
        Kind::Config
    );
    let bad = || gradient("w", &[2, 3], vec![1.0, 2.0, 3.0, 4.0, f32::NAN, 6.0]);
    let feedback = Arc::new(Mutex::new(ErrorFeedback::new()));
    let with_feedback = PushOptions { feedback: Some(feedback.clone()), ..options(Codec::OneBit) };
    let error = refused(&[bad()], &with_feedback);
    assert_eq!((error.kind, error.tensor.as_deref()), (Kind::NonFinite, Some("w")));
    assert!(error.message.contains("index 4"));
    assert!(feedback.lock().unwrap().entries().all(|(_, residual)| residual.iter().all(|x| *x == 0.0)));
    let error = refused(&[bad()], &PushOptions { check_finite: false, ..options(Codec::Float32) });
    assert_eq!(
        (error.kind, error.tensor.as_deref(), error.shard.is_some()),
        (Kind::NonFinite, Some("w"), true)
    );
    let error = client.register(spec("w", &[6], sgd()), View::Float32(&[0.0; 6]), TIMEOUT).unwrap_err();
    assert_eq!((error.kind, error.tensor.as_deref()), (Kind::Precondition, Some("w")));
    let error = client.register(spec("v", &[6], sgd()), View::Float32(&[0.0; 5]), TIMEOUT).unwrap_err();
    assert_eq!(error.kind, Kind::Shape);
    assert_eq!(client.pull(&["no".into()], TIMEOUT, &mut Patient).unwrap_err().kind, Kind::UnknownTensor);
    let state = OptimizerState { steps: vec![0], slots: vec![("sum", vec![0.0; 6].into())] };
    assert!(client.load_state("w", &state, TIMEOUT).is_err());
    assert_eq!(versions(), before);
    assert_eq!(one(&*client, "w", 6), [1.0; 6]);
}

#[test]
fn a_refused_slice_leaves_the_others_applied() {
    let mut world = World::start(|_| ());
    let spoil = |gradients: &mut [Gradient], number: usize| {
        let own = format!("adam {number} big");
        for gradient in gradients.iter_mut().filter(|g| *g.name == *"big" || *g.name == *own) {
            let mut values = floats(gradient.values.view().to_array());
            values[SLICE] = f32::INFINITY;
            *gradient = crate::ledger::gradient(&gradient.name, values);
        }
    };
    // Unchecked Float32 is sent: the server refuses the slices that are not finite.
    let author = &mut world.authors[0];
    let mut sent = author.next(|_| true);
    spoil(&mut sent.gradients, 0);
    let unchecked = PushOptions { check_finite: false, ..author.options(TIMEOUT) };
    let pushed = author.client.push(&sent.gradients, &unchecked);
    let Err(PushError::Partial(partial)) = &pushed else { panic!("{pushed:?}") };
    assert_eq!(partial.error.kind, Kind::NonFinite);
    assert_eq!(partial.receipts.len(), sent.gradients.len() - 2);
    assert_eq!((partial.refused.len(), partial.applied.len(), partial.in_doubt.len()), (2, 4, 0));
    assert!(partial.refused.iter().all(|(_, elements, _)| *elements == (SLICE..2 * SLICE)));
    author.enter(&world.ledger, &sent, &pushed);
    world.ledger.check(&*world.truth);
    // The client checks slices as it encodes them, and refuses what the server would refuse.
    let author = &mut world.authors[1];
    let mut sent = author.next(|_| true);
    spoil(&mut sent.gradients, 1);
    let unchecked = PushOptions { check_finite: false, ..author.options(TIMEOUT) };
    let pushed = author.client.push(&sent.gradients, &unchecked);
    let Err(PushError::Partial(partial)) = &pushed else { panic!("{pushed:?}") };
    assert_eq!((partial.error.kind, partial.error.shard.is_some()), (Kind::NonFinite, true));
    assert!(partial.error.message.contains("index 0"), "{}", partial.error);
    assert_eq!((partial.refused.len(), partial.in_doubt.len()), (2, 0));
    assert!(partial.refused.iter().all(|(_, elements, _)| *elements == (SLICE..2 * SLICE)));
    author.enter(&world.ledger, &sent, &pushed);
    world.ledger.check(&*world.truth);
    // With the check, nothing changes anywhere.
    let mut sent = author.next(|_| true);
    spoil(&mut sent.gradients, 1);
    let Err(PushError::Refused(error)) = author.client.push(&sent.gradients, &author.options(TIMEOUT)) else {
        panic!()
    };
    assert_eq!((error.kind, error.shard), (Kind::NonFinite, None));
    world.ledger.check(&*world.truth);
    world.go_on();
}

#[test]
fn removed_tensors_are_unknown_and_may_come_back() {
    let cluster = Cluster::start(2);
    let (a, b) = (connect(&cluster), connect(&cluster));
    a.register(spec("w", &[3], sgd()), View::Float32(&[1.0; 3]), TIMEOUT).unwrap();
    assert_eq!(one(&*b, "w", 3), [1.0; 3]);
    a.unregister("w", TIMEOUT).unwrap();
    assert!(a.names(TIMEOUT).unwrap().is_empty());
    assert_eq!(a.spec("w", TIMEOUT).unwrap_err().kind, Kind::UnknownTensor);
    assert_eq!(b.pull(&["w".into()], TIMEOUT, &mut Patient).unwrap_err().kind, Kind::UnknownTensor);
    a.register(spec("w", &[4], sgd()), View::Float32(&[2.0; 4]), TIMEOUT).unwrap();
    assert_eq!(one(&*b, "w", 4), [2.0; 4]);
}

#[test]
fn what_does_not_fit_is_refused_and_leaves_room() {
    let cluster = Cluster::of(2, |config| {
        (config.memory_limit, config.room_for_workers) = (Some(28 << 20), 0);
    });
    let client = connect(&cluster);
    let values = vec![0.0; 8 * BIG as usize];
    let error =
        client.register(spec("huge", &[8 * BIG], sgd()), View::Float32(&values), TIMEOUT).unwrap_err();
    assert_eq!(
        (error.kind, error.tensor.as_deref(), error.shard.is_some()),
        (Kind::Capacity, Some("huge"), true)
    );
    client.register(spec("fits", &[258_048], sgd()), View::Float32(&vec![1.0; 258_048]), TIMEOUT).unwrap();
    assert_eq!(client.names(TIMEOUT).unwrap().len(), 1);
}

#[test]
fn many_threads_share_a_client_and_register_at_once() {
    let cluster = Cluster::start(3);
    let clients = [connect(&cluster), connect(&cluster)];
    std::thread::scope(|scope| {
        for k in 0..4 {
            let client = &clients[k % 2];
            scope.spawn(move || {
                client
                    .register(spec("w", &[BIG], sgd()), View::Float32(&vec![0.0; BIG as usize]), TIMEOUT)
                    .unwrap();
                for _ in 0..10 {
                    let ones = gradient("w", &[BIG], vec![-1.0; BIG as usize]);
                    assert!(
                        !client.push(&[ones], &options(Codec::Int8 { seed: Some(1) })).unwrap()[0].duplicate
                    );
                }
            });
        }
    });
    assert!(one(&*clients[0], "w", BIG).iter().all(|x| *x == 40.0));
    let stats = clients[0].stats(TIMEOUT).unwrap();
    assert_eq!(stats.shards.len(), 3);
    let count = |name: &str| stats.client.iter().find(|(n, _)| n == name).unwrap().1;
    assert_eq!((count("pushes"), count("in_doubt"), count("reconnects")), (20, 0, 0));
    assert!(count("bytes_saved") > 2 * count("bytes_pushed"));
}

#[test]
fn nobody_there_is_an_error_that_names_every_address() {
    let addresses = vec!["127.0.0.1:1".to_owned(), "127.0.0.1:2".to_owned()];
    let begin = Instant::now();
    let options = ConnectOptions { timeout: Duration::from_millis(400), ..ConnectOptions::default() };
    let error = Client::connect(&addresses, options).unwrap_err();
    assert!(begin.elapsed() < Duration::from_secs(20));
    assert_eq!(error.kind, Kind::Connection);
    assert!(addresses.iter().all(|address| error.message.contains(address)), "{error}");
    for wrong in [&[][..], &["127.0.0.1".to_owned()]] {
        assert_eq!(Client::connect(wrong, ConnectOptions::default()).unwrap_err().kind, Kind::Config);
    }
}

#[test]
fn one_address_is_enough() {
    let cluster = Cluster::start(3);
    let client = Client::connect(&cluster.addresses()[1..2], ConnectOptions::default()).unwrap();
    assert_eq!(client.addresses(), cluster.addresses());
}

#[test]
fn a_server_that_goes_away_ends_calls_at_their_deadline() {
    let mut world = World::start(|_| ());
    world.go_on();
    drop(world.cluster.take());
    let begin = Instant::now();
    for author in &mut world.authors {
        let short = author.options(Duration::from_millis(300));
        let [first, second] = [(); 2].map(|()| author.next(|_| true).gradients);
        assert!(author.client.push(&first, &short).is_err());
        let ticket = author.client.push_async(second, short);
        // With error feedback, a push waits for slices in doubt before it returns.
        if let Ok(ticket) = ticket {
            let (tell, receiver) = std::sync::mpsc::channel();
            ticket.on_done(Box::new(move || tell.send(()).unwrap()));
            receiver.recv_timeout(TIMEOUT).unwrap();
            assert!(ticket.wait(Duration::ZERO).unwrap().is_err());
        }
        for tensor in TENSORS.iter().filter(|tensor| tensor.is_big()) {
            let names = [tensor.name.clone()];
            let error = author.client.pull(&names, Duration::from_millis(100), &mut Patient).unwrap_err();
            assert!(matches!(error.kind, Kind::Connection | Kind::Deadline), "{error}");
            assert_eq!(error.tensor.as_deref(), Some(&*tensor.name));
            assert!(error.shard.is_some_and(|shard| shard < 3));
        }
        assert!(author.client.stats(Duration::from_millis(300)).is_err());
    }
    assert!(begin.elapsed() < Duration::from_secs(10));
}

#[test]
fn a_late_answer_does_not_hide_what_was_the_matter_before() {
    let mut world = World::start(|_| ());
    world.go_on();
    let client = world.authors[0].client.clone();
    world.proxies.set_down(true);
    let asking = std::thread::spawn(move || client.stats(Duration::from_secs(6)).unwrap_err());
    std::thread::sleep(Duration::from_secs(3));
    world.proxies.set_deaf(true);
    world.proxies.set_down(false);
    let error = asking.join().unwrap();
    assert_eq!(error.kind, Kind::Deadline, "{error}");
    assert!(error.message.contains("; the attempt before: no connection to 127.0.0.1:"), "{error}");
    world.proxies.set_deaf(false);
    world.reconnect();
    world.go_on();
}

#[test]
fn closing_wakes_whoever_waits() {
    let mut world = World::start(|_| ());
    drop(world.cluster.take());
    let names: Vec<_> = TENSORS.iter().map(|tensor| tensor.name.clone()).collect();
    for author in &mut world.authors {
        let client = &author.client;
        let pull = client.pull_async(names.clone(), Duration::from_mins(1)).unwrap();
        std::thread::scope(|scope| {
            let waiting = scope.spawn(|| pull.wait(Duration::from_mins(1)).unwrap().unwrap_err());
            assert!(pull.wait(Duration::from_millis(50)).is_none());
            client.close(TIMEOUT);
            let error = waiting.join().unwrap();
            assert!(error.message.contains("closed"), "{error}");
        });
        assert!(client.names(TIMEOUT).unwrap_err().message.contains("closed"));
        assert!(client.push(&[], &options(Codec::Float32)).is_err());
    }
}

/// Every slice of the push is in doubt, and its outcome is unknown.
fn assert_unknown(push: &dyn Ticket<Pushed>, slices: usize) {
    let Err(PushError::Partial(partial)) = push.wait(TIMEOUT).unwrap() else { panic!("it cannot be known") };
    assert_eq!((partial.in_doubt.len(), partial.receipts.len(), partial.refused.len()), (slices, 0, 0));
    assert_eq!(partial.error.kind, Kind::UnknownOutcome);
    for doubt in &partial.in_doubt {
        assert_eq!(doubt.result(TIMEOUT).unwrap(), Fate::Unknown);
    }
    let places = |name: &str| {
        let doubts = partial.in_doubt.iter().filter(|doubt| &**doubt.tensor() == name);
        let mut places: Vec<_> = doubts.map(|doubt| (doubt.elements(), doubt.shard())).collect();
        places.sort_unstable_by_key(|(elements, _)| elements.start);
        places
    };
    let big = places("big");
    assert!(big.iter().map(|(elements, _)| elements.clone()).eq(TENSORS[Tensor::named("big")].slices()));
    let mut shards: Vec<_> = big.iter().map(|(_, shard)| *shard).collect();
    shards.sort_unstable();
    assert_eq!(shards, [0, 1, 2]);
}

#[test]
fn a_lost_lease_makes_the_unanswered_unknown_and_the_rest_go_on() {
    let mut world = World::start(|config| config.lease = Duration::from_secs(6));
    let pushes = world.unanswered(|_| true, TIMEOUT);
    world.proxies.set_down(true);
    // The client that reads the shards directly stays or reconnects, so the number of ended sessions does not
    // tell whose they were.
    let sessions = |shard: usize| world.cluster().counter(shard, "sessions");
    until("both sessions end everywhere", || (0..3).all(|shard| sessions(shard) == 1));
    let mut waits = Vec::new();
    for author in &mut world.authors {
        let sent = author.next(|_| true);
        let push = author.client.push_async(sent.gradients.clone(), author.options(TIMEOUT)).unwrap();
        waits.push((sent, push));
    }
    world.reconnect();
    for (author, ((sent, push), (next, wait))) in world.authors.iter_mut().zip(pushes.iter().zip(&waits)) {
        assert_unknown(&**push, sent.values.len());
        let pushed = wait.wait(TIMEOUT).unwrap();
        for (gradient, receipt) in next.gradients.iter().zip(pushed.as_ref().unwrap()) {
            let counted = TENSORS[Tensor::named(&gradient.name)].owner.is_none();
            assert!(if counted { (4..=5).contains(&receipt.version) } else { receipt.version == 3 });
            assert!(!receipt.duplicate);
        }
        author.enter(&world.ledger, next, &pushed);
    }
    world.ledger.check(&*world.truth);
    world.go_on();
}

#[test]
fn a_server_that_was_started_again_is_noticed() {
    let mut world = World::start(|_| ());
    let pushes = world.unanswered(|_| true, TIMEOUT);
    world.proxies.set_down(true);
    let addresses = world.cluster().addresses();
    drop(world.cluster.take());
    world.cluster = Some(Cluster::of(3, |config| config.listen = addresses));
    world.reconnect();
    for (author, (sent, push)) in world.authors.iter().zip(&pushes) {
        assert_unknown(&**push, sent.values.len());
        for tensor in TENSORS.iter().filter(|tensor| tensor.is_pushed_by(author.number)) {
            let names = [tensor.name.clone()];
            let error = author.client.pull(&names, TIMEOUT, &mut Patient).unwrap_err();
            assert_eq!(error.kind, Kind::Fenced, "{error}");
        }
        let spec = spec("new", &[1], sgd());
        let error = author.client.register(spec, View::Float32(&[0.0]), TIMEOUT).unwrap_err();
        assert_eq!(error.kind, Kind::Fenced, "{error}");
    }
    // New clients register again and start with a new ledger.
    world.begin_again();
    world.go_on();
}

#[test]
fn a_doubt_settles_when_the_connection_is_back() {
    let mut world = World::start(|_| ());
    let first = world.unanswered(|tensor| !tensor.is_big(), TIMEOUT);
    // Longer than everything takes to arrive.
    let timeout = Duration::from_secs(12);
    let second = world.unanswered(|_| true, timeout);
    let begin = Instant::now();
    let ended: Vec<_> = second.iter().map(|(_, push)| push.wait(TIMEOUT).unwrap()).collect();
    assert!(begin.elapsed() < timeout + Duration::from_secs(20), "a push ends at its deadline");
    let begin = Instant::now();
    for (pushed, (sent, _)) in ended.iter().zip(&second) {
        let Err(PushError::Partial(partial)) = pushed else { panic!("{pushed:?}") };
        assert_eq!((partial.in_doubt.len(), partial.error.kind), (sent.values.len(), Kind::Deadline));
        let doubt = &partial.in_doubt[0];
        assert_eq!(doubt.result(Duration::from_millis(20)).unwrap_err().kind, Kind::Deadline);
    }
    assert!(begin.elapsed() < Duration::from_secs(20));
    world.reconnect();
    for (pushed, (_, push)) in ended.iter().zip(&first) {
        let Err(PushError::Partial(partial)) = pushed else { panic!("{pushed:?}") };
        for doubt in &partial.in_doubt {
            let tensor = &TENSORS[Tensor::named(doubt.tensor())];
            let Fate::Applied { version } = doubt.result(TIMEOUT).unwrap() else { panic!("{doubt:?}") };
            let earlier = u64::from(!tensor.is_big());
            let range = if tensor.owner.is_none() {
                2 + earlier..=3 + 2 * earlier
            } else {
                2 + earlier..=2 + earlier
            };
            assert!(range.contains(&version), "{doubt:?}: version {version}");
        }
        let receipts = push.wait(TIMEOUT).unwrap().unwrap();
        assert!(receipts.iter().all(|receipt| receipt.duplicate));
    }
    world.ledger.check(&*world.truth);
    world.go_on();
}

/// The answer of one slice is lost and the push sent again; the other slice answers.
#[test]
fn a_receipt_tells_how_many_slices_had_the_push_before() {
    let cluster = Cluster::start(2);
    let direct = connect(&cluster);
    let [first, second] = [0, 1].map(|shard| cluster.addresses()[shard].clone());
    let proxy = Proxies::start(&[second], 1);
    let addresses = [vec![first], proxy.addresses()].concat();
    let options_of = ConnectOptions { timeout: TIMEOUT, ..ConnectOptions::default() };
    let client = Client::connect(&addresses, options_of).unwrap();
    let n = 2 * SLICE as u64;
    client.register(spec("w", &[n], sgd()), View::Float32(&numbers(n as usize, 1)), TIMEOUT).unwrap();
    assert_eq!([0, 1].map(|shard| cluster.counter(shard, "slices")), [1, 1]);
    let push =
        || client.push_async(vec![gradient("w", &[n], numbers(n as usize, 2))], options(Codec::Float32));
    let receipt = push().unwrap().wait(TIMEOUT).unwrap().unwrap().remove(0);
    assert_eq!((receipt.duplicate, receipt.duplicates), (false, 0));
    proxy.set_deaf(true);
    let lost = push().unwrap();
    until("both slices have it", || {
        let versions = direct.versions(&["w".into()], TIMEOUT).unwrap();
        versions.tensor("w").unwrap().iter().all(|slice| slice.version == receipt.version + 1)
    });
    proxy.set_down(true);
    proxy.set_deaf(false);
    proxy.set_down(false);
    let receipt = lost.wait(TIMEOUT).unwrap().unwrap().remove(0);
    assert_eq!((receipt.duplicate, receipt.duplicates), (true, 1));
}

#[test]
fn payloads_may_carry_checksums() {
    let cluster = Cluster::start(2);
    let checked = ConnectOptions { timeout: TIMEOUT, checksums: Some(true), ..ConnectOptions::default() };
    let client = Client::connect(&cluster.addresses(), checked).unwrap();
    client.register(spec("w", &[BIG], sgd()), View::Float32(&numbers(BIG as usize, 1)), TIMEOUT).unwrap();
    for codec in [Codec::Float32, Codec::Int8 { seed: None }] {
        client.push(&[gradient("w", &[BIG], numbers(BIG as usize, 2))], &options(codec)).unwrap();
    }
}

#[test]
fn slices_are_spread_over_the_shards_by_load() {
    let cluster = Cluster::start(3);
    let client = connect(&cluster);
    client.register(spec("big", &[BIG], sgd()), View::Float32(&numbers(BIG as usize, 1)), TIMEOUT).unwrap();
    assert_eq!([0, 1, 2].map(|shard| cluster.counter(shard, "slices")), [1, 1, 1]);
    let sizes = [0, 1, 2].map(|shard| cluster.counter(shard, "memory_slices"));
    client.register(spec("small", &[10], sgd()), View::Float32(&numbers(10, 2)), TIMEOUT).unwrap();
    let least = (0..3).min_by_key(|shard| sizes[*shard]).unwrap();
    assert_eq!(cluster.counter(least, "slices"), 2, "the next slice goes where there is most room");
    client.unregister("big", TIMEOUT).unwrap();
    client.unregister("small", TIMEOUT).unwrap();
    assert_eq!([0, 1, 2].map(|shard| cluster.counter(shard, "memory_slices")), [0, 0, 0]);
}
