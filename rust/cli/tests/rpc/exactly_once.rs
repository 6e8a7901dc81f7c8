//! Exactly once over bad networks: a proxy cuts connections at any byte in both directions, stalls them and
//! swallows answers; a relay sends every frame twice. The servers must hold exactly the pushes that the
//! clients know as applied.

use crate::certificates::Ca;
use crate::cluster::Cluster;
use crate::proxy::Proxies;
use crate::relay::Relays;
use fastps_client::{Client, ConnectOptions, Transport};
use fastps_core::codec::{Codec, ErrorFeedback};
use fastps_core::dtype::View;
use fastps_core::optim::{Adam, Optimizer, Sgd};
use fastps_core::store::{Store, StoreOptions};
use fastps_core::tensor::TensorSpec;
use fastps_core::verbs::prelude::*;
use fastps_core::verbs::{Fate, Gradient, PushError, PushOptions};
use fastps_server::Role;
use std::sync::{Arc, LazyLock, Mutex};
use std::time::{Duration, Instant};

const PATIENT: Duration = Duration::from_mins(1);
const SLICE: usize = 258_048;
/// One tensor of three slices and a hundred small ones.
static SHAPES: LazyLock<Vec<(Arc<str>, usize)>> = LazyLock::new(|| {
    let small = (0..100).map(|k| (format!("small {k}").into(), [1, 10, 64, 1000, 4097][k % 5]));
    std::iter::once(("big".into(), 2 * SLICE + 1000)).chain(small).collect()
});

fn spec(name: &Arc<str>, n: usize, optimizer: Optimizer) -> TensorSpec {
    TensorSpec::new(name.clone(), [n as u64], optimizer)
}

struct World {
    proxies: Proxies,
    _relays: Option<Relays>,
    cluster: Cluster,
    truth: Arc<Client>,
    clients: Vec<Arc<Client>>,
}

impl World {
    /// Three shards behind proxies, two clients that use the proxies, and one that connects directly.
    fn new(seed: u64) -> Self {
        Self::of(seed, Optimizer::Sgd(Sgd { lr: 1.0, ..Sgd::default() }))
    }

    fn of(seed: u64, optimizer: Optimizer) -> Self {
        Self::build(seed, optimizer, None, |_| None)
    }

    /// As [`World::new`], with TLS and certificates on both sides.
    fn over_tls(seed: u64) -> Self {
        let optimizer = Optimizer::Sgd(Sgd { lr: 1.0, ..Sgd::default() });
        Self::build(seed, optimizer, Some(&Ca::new()), |_| None)
    }

    /// As [`World::new`], with relays behind the proxies that send every frame twice.
    fn duplicating(seed: u64) -> Self {
        let optimizer = Optimizer::Sgd(Sgd { lr: 1.0, ..Sgd::default() });
        Self::build(seed, optimizer, None, |servers| Some(Relays::start(servers)))
    }

    /// As [`World::new`], with proxies also in front of the Unix sockets.
    fn local(seed: u64) -> Self {
        let optimizer = Optimizer::Sgd(Sgd { lr: 1.0, ..Sgd::default() });
        Self::over(Transport::Unix, seed, optimizer, None, |_| None)
    }

    fn build(
        seed: u64,
        optimizer: Optimizer,
        ca: Option<&Ca>,
        relays: impl FnOnce(&[String]) -> Option<Relays>,
    ) -> Self {
        Self::over(Transport::Tcp, seed, optimizer, ca, relays)
    }

    fn over(
        transport: Transport,
        seed: u64,
        optimizer: Optimizer,
        ca: Option<&Ca>,
        relays: impl FnOnce(&[String]) -> Option<Relays>,
    ) -> Self {
        // The tests of this file run concurrently.
        let prefix = format!("hidden-{}-{seed}", std::process::id());
        let socket: &'static str =
            if transport == Transport::Unix { prefix.clone().leak() } else { "fastps" };
        let cluster = Cluster::of(3, |config| {
            config.socket = socket;
            if let Some(ca) = ca {
                (config.tls, config.certificate_role) = (ca.mutual(), Role::Worker);
            }
        });
        let relays = relays(&cluster.addresses());
        let servers = relays.as_ref().map_or_else(|| cluster.addresses(), Relays::addresses);
        let proxies = Proxies::start(&servers, seed);
        if transport == Transport::Unix {
            proxies.before_sockets(&prefix, 3);
        }
        let connect = |addresses: &[String], transport| {
            let tls = ca.map(Ca::client).unwrap_or_default();
            let options = ConnectOptions { timeout: PATIENT, transport, tls, ..ConnectOptions::default() };
            Client::connect(addresses, options).unwrap()
        };
        let truth = connect(&cluster.addresses(), Transport::Tcp);
        for (name, n) in &*SHAPES {
            let spec = spec(name, *n, optimizer);
            truth.register(spec, View::Float32(&vec![0.0; *n]), PATIENT).unwrap();
        }
        let clients = (0..2).map(|_| connect(&proxies.addresses(), transport)).collect();
        Self { proxies, _relays: relays, cluster, truth, clients }
    }

    /// The number of duplicates that the servers recognized.
    fn duplicates(&self) -> u64 {
        (0..3).map(|shard| self.cluster.counter(shard, "duplicates")).sum()
    }

    fn values(&self) -> Vec<Vec<f32>> {
        values_of(&*self.truth)
    }
}

fn values_of(ps: &dyn ParameterServer) -> Vec<Vec<f32>> {
    let mut values: Vec<_> = SHAPES.iter().map(|(_, n)| vec![f32::NAN; *n]).collect();
    let names: Vec<_> = SHAPES.iter().map(|(name, _)| name.clone()).collect();
    let mut sink = |tensor: usize, first: usize, bytes: &[u8]| {
        for (value, bytes) in values[tensor][first..].iter_mut().zip(bytes.chunks_exact(4)) {
            *value = f32::from_le_bytes(bytes.try_into().unwrap());
        }
    };
    ps.pull(&names, PATIENT, &mut sink).unwrap();
    values
}

fn options(codec: Codec, timeout: Duration, feedback: Option<Arc<Mutex<ErrorFeedback>>>) -> PushOptions {
    PushOptions { codec: Some(codec), feedback, timeout, ..PushOptions::default() }
}

fn gradients(value: impl Fn(usize, usize) -> f32) -> Vec<Gradient> {
    let gradient = |(k, (name, n)): (usize, &(Arc<str>, usize))| Gradient {
        name: name.clone(),
        shape: vec![*n as u64],
        values: Arc::new((0..*n).map(|i| value(k, i)).collect::<Vec<f32>>()),
    };
    SHAPES.iter().enumerate().map(gradient).collect()
}

/// The number of changes of each slice of every tensor.
type Ledger = Vec<Vec<u32>>;

fn ledger() -> Ledger {
    SHAPES.iter().map(|(_, n)| vec![0; n.div_ceil(SLICE)]).collect()
}

fn tensor(name: &str) -> usize {
    SHAPES.iter().position(|(n, _)| &**n == name).unwrap()
}

/// Pushes once and counts the applied slices; every doubt must settle to a known outcome.
fn push_and_enter(
    client: &Client,
    options: &PushOptions,
    gradients: &[Gradient],
    ledger: &Mutex<Ledger>,
) -> (u32, u32) {
    match client.push(gradients, options) {
        Ok(_) => {
            ledger.lock().unwrap().iter_mut().flatten().for_each(|n| *n += 1);
            (0, 0)
        }
        Err(PushError::Refused(_)) => (0, 0),
        Err(PushError::Partial(partial)) => {
            let (mut applied, mut fenced) = (0, 0);
            let mut settled = Vec::new();
            for doubt in &partial.in_doubt {
                match doubt.result(PATIENT).unwrap() {
                    Fate::Applied { .. } => {
                        applied += 1;
                        settled.push((doubt.tensor().clone(), doubt.elements()));
                    }
                    Fate::Fenced => fenced += 1,
                    Fate::Unknown => panic!("unknown: {doubt:?}"),
                }
            }
            let mut ledger = ledger.lock().unwrap();
            for (name, _) in &partial.receipts {
                ledger[tensor(name)].iter_mut().for_each(|n| *n += 1);
            }
            let torn = partial.applied.iter().map(|(name, elements, _)| (name.clone(), elements.clone()));
            for (name, elements) in torn.chain(settled) {
                ledger[tensor(&name)][elements.start / SLICE] += 1;
            }
            (applied, fenced)
        }
    }
}

fn assert_exact(world: &World, ledger: &Ledger) {
    for (k, values) in world.values().iter().enumerate() {
        for (i, value) in values.iter().enumerate() {
            assert_eq!(*value, ledger[k][i / SLICE] as f32, "{} [{i}]", SHAPES[k].0);
        }
    }
}

#[test]
fn patient_pushes_are_applied_once_whatever_breaks() {
    applied_once(&World::new(1));
}

#[test]
fn patient_pushes_are_applied_once_over_tls() {
    let world = World::over_tls(11);
    applied_once(&world);
    for client in &world.clients {
        assert!(client.transport().iter().all(|(_, way)| way.starts_with("tcp with TLS: ")));
    }
}

#[test]
fn patient_pushes_are_applied_once_whatever_breaks_on_a_unix_socket() {
    applied_once(&World::local(10));
}

/// Pushes until enough connections have been cut at any byte; `FASTPS_CUTS` sets the number.
fn applied_once(world: &World) {
    let wanted = std::env::var("FASTPS_CUTS").map_or(120, |n| n.parse::<u64>().unwrap());
    let late = PATIENT + Duration::from_millis(500 * wanted);
    let ledger = Mutex::new(ledger());
    let begin = Instant::now();
    world.proxies.set_faulty(true);
    std::thread::scope(|scope| {
        for client in &world.clients {
            scope.spawn(|| {
                let ones = gradients(|_, _| -1.0);
                while world.proxies.cuts() < wanted {
                    assert!(begin.elapsed() < late, "{} cuts only", world.proxies.cuts());
                    let (applied, fenced) =
                        push_and_enter(client, &options(Codec::Float32, PATIENT, None), &ones, &ledger);
                    assert_eq!((applied, fenced), (0, 0), "nothing may be in doubt before its deadline");
                }
            });
        }
    });
    world.proxies.set_faulty(false);
    let ledger = ledger.into_inner().unwrap();
    assert!(ledger.iter().flatten().all(|n| *n == ledger[0][0] && *n > 5), "{ledger:?}");
    assert_exact(world, &ledger);
    let (cuts, pushes) = (world.proxies.cuts(), ledger[0][0]);
    let duplicates: u64 = world.clients.iter().map(|c| counter(c, "duplicates")).sum();
    assert!(cuts >= wanted, "{cuts} cuts in {pushes} pushes");
    assert!(duplicates > 0, "no answer was ever lost");
    println!("{pushes} pushes, {cuts} cuts, {duplicates} duplicates");
}

fn counter(client: &Client, name: &str) -> u64 {
    client.stats(PATIENT).unwrap().client.iter().find(|(n, _)| n == name).unwrap().1
}

#[test]
fn deadlines_leave_doubts_that_settle() {
    let world = World::new(2);
    let ledger = Mutex::new(ledger());
    let fates = Mutex::new((0, 0));
    let begin = Instant::now();
    world.proxies.set_faulty(true);
    std::thread::scope(|scope| {
        for (k, client) in world.clients.iter().enumerate() {
            let (ledger, fates) = (&ledger, &fates);
            scope.spawn(move || {
                let ones = gradients(|_, _| -1.0);
                let mut round = k as u64;
                while begin.elapsed() < Duration::from_secs(10) {
                    round += 1;
                    let timeout = Duration::from_millis(1 + round * 7 % 60);
                    let (applied, fenced) =
                        push_and_enter(client, &options(Codec::Float32, timeout, None), &ones, ledger);
                    let mut fates = fates.lock().unwrap();
                    *fates = (fates.0 + applied, fates.1 + fenced);
                }
            });
        }
    });
    world.proxies.set_faulty(false);
    assert_exact(&world, &ledger.into_inner().unwrap());
    let fates = fates.into_inner().unwrap();
    assert!(fates.0 > 0 && fates.1 > 0, "applied and fenced doubts: {fates:?}");
    println!("doubts: {} applied, {} fenced; {} cuts", fates.0, fates.1, world.proxies.cuts());
}

/// Applied gradients and residuals add up to the sum of all gradients, even when pushes end in doubt.
fn telescopes(world: &World, codec: Codec, timeout: impl Fn(u64) -> Duration + Sync) {
    let begin = Instant::now();
    let sums: Mutex<Vec<Vec<f64>>> = Mutex::new(SHAPES.iter().map(|(_, n)| vec![0.0; *n]).collect());
    world.proxies.set_faulty(true);
    std::thread::scope(|scope| {
        for (k, client) in world.clients.iter().enumerate() {
            let (sums, timeout) = (&sums, &timeout);
            scope.spawn(move || {
                let feedback = Arc::new(Mutex::new(ErrorFeedback::new()));
                let mut pushed = 0_u64;
                while begin.elapsed() < Duration::from_secs(8) {
                    pushed += 1;
                    let value = |t: usize, i: usize| {
                        ((i * 31 + t * 7 + pushed as usize * 13 + k) % 17) as f32 / 8.0 - 1.0
                    };
                    let gradients = gradients(value);
                    // Doubts are awaited here, so that they take no time from the next push's deadline.
                    client.settle(&feedback, PATIENT).unwrap();
                    let result =
                        client.push(&gradients, &options(codec, timeout(pushed), Some(feedback.clone())));
                    if let Err(PushError::Refused(error)) = result {
                        assert!(error.shard.is_some(), "not taken up: {error}");
                    }
                    // Refused and fenced gradients go back to the residual.
                    let mut sums = sums.lock().unwrap();
                    for (sum, gradient) in sums.iter_mut().zip(&gradients) {
                        for (s, g) in sum.iter_mut().zip(gradient.values.view().float32s().unwrap()) {
                            *s += f64::from(*g);
                        }
                    }
                }
                client.settle(&feedback, PATIENT).unwrap();
                let feedback = feedback.lock().unwrap();
                let mut sums = sums.lock().unwrap();
                for (name, residual) in feedback.entries() {
                    for (s, r) in sums[tensor(name)].iter_mut().zip(residual) {
                        *s -= f64::from(*r);
                    }
                }
            });
        }
    });
    world.proxies.set_faulty(false);
    let sums = sums.into_inner().unwrap();
    let mut worst = 0.0_f64;
    for (values, sums) in world.values().iter().zip(&sums) {
        for (value, sum) in values.iter().zip(sums) {
            worst = worst.max((f64::from(*value) + sum).abs());
        }
    }
    println!("off by {worst:e} after {} cuts", world.proxies.cuts());
    assert!(worst < 1e-2, "the telescoping sum is off by {worst}");
}

#[test]
fn one_bit_telescopes_over_faults() {
    telescopes(&World::new(3), Codec::OneBit, |_| PATIENT);
}

#[test]
fn one_bit_telescopes_over_faults_and_deadlines() {
    telescopes(&World::new(4), Codec::OneBit, |round| Duration::from_millis(1 + round * 5 % 40));
}

#[test]
fn float32_with_feedback_telescopes_over_faults_and_deadlines() {
    telescopes(&World::new(5), Codec::Float32, |round| Duration::from_millis(1 + round * 5 % 40));
}

#[test]
fn a_relay_that_duplicates_changes_nothing() {
    const ROUNDS: u32 = 10;
    let world = World::duplicating(8);
    let ledger = Mutex::new(ledger());
    std::thread::scope(|scope| {
        for client in &world.clients {
            scope.spawn(|| {
                let ones = gradients(|_, _| -1.0);
                let feedback = Arc::new(Mutex::new(ErrorFeedback::new()));
                // Equal values lose nothing to either codec.
                for round in 0..ROUNDS {
                    let (codec, feedback) = match round % 2 {
                        0 => (Codec::Float32, None),
                        _ => (Codec::OneBit, Some(feedback.clone())),
                    };
                    let doubts = push_and_enter(client, &options(codec, PATIENT, feedback), &ones, &ledger);
                    assert_eq!(doubts, (0, 0));
                }
            });
        }
    });
    let ledger = ledger.into_inner().unwrap();
    assert!(ledger.iter().flatten().all(|n| *n == 2 * ROUNDS), "{ledger:?}");
    assert_exact(&world, &ledger);
    // A push may return before the second copies of its last frames reach the shards.
    let slices = ledger.iter().flatten().count() as u64;
    let begin = Instant::now();
    while world.duplicates() < u64::from(2 * ROUNDS) * slices && begin.elapsed() < PATIENT {
        std::thread::sleep(Duration::from_millis(1));
    }
    assert_eq!(world.duplicates(), u64::from(2 * ROUNDS) * slices, "each frame came twice");
    assert_exact(&world, &ledger);
    assert!(world.clients.iter().all(|c| counter(c, "duplicates") == 0), "clients saw second answers");
}

#[test]
fn one_bit_telescopes_over_duplicates_faults_and_deadlines() {
    let world = World::duplicating(9);
    telescopes(&world, Codec::OneBit, |round| Duration::from_millis(5 + round * 5 % 80));
    assert!(world.duplicates() > 0);
    println!("{} duplicates", world.duplicates());
}

#[test]
fn adam_over_faults_equals_the_store_bit_for_bit() {
    let adam = Optimizer::Adam(Adam::default());
    let world = World::of(7, adam);
    let store = Store::new(StoreOptions::default()).unwrap();
    for (name, n) in &*SHAPES {
        store.register(spec(name, *n, adam), View::Float32(&vec![0.0; *n]), PATIENT).unwrap();
    }
    world.proxies.set_faulty(true);
    // Both clients keep residuals; their pushes alternate, so that the order is the same on both sides.
    let residuals = || [(); 2].map(|()| Arc::new(Mutex::new(ErrorFeedback::new())));
    let (remote, local) = (residuals(), residuals());
    for round in 0..24 {
        let values = gradients(|k, i| ((i * 31 + k * 7 + round * 1009) as f32).sin());
        let codec = if round % 4 < 2 { Codec::Float32 } else { Codec::OneBit };
        let with = |feedback: &[Arc<Mutex<ErrorFeedback>>; 2]| {
            options(codec, PATIENT, Some(feedback[round % 2].clone()))
        };
        world.clients[round % 2].push(&values, &with(&remote)).unwrap();
        store.push(&values, &with(&local)).unwrap();
    }
    world.proxies.set_faulty(false);
    let bits = |values: Vec<Vec<f32>>| values.into_iter().flatten().map(f32::to_bits).collect::<Vec<_>>();
    assert!(bits(world.values()) == bits(values_of(&store)));
    for (name, _) in &*SHAPES {
        assert_eq!(store.state(name, PATIENT).unwrap(), world.truth.state(name, PATIENT).unwrap(), "{name}");
    }
    assert!(world.proxies.cuts() >= 20, "{} cuts", world.proxies.cuts());
}
