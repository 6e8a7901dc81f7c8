//! The server through the generated client, where leases, held pushes, stalls and the end of a server count;
//! tests/grpc has what a call or a frame gives at once.

use crate::certificates::{Ca, channel};
use crate::ledger::{PATIENT, Tensor, until};
use crate::stubs::{
    CLIENT, Peer, Piece, SLICE, Shard, Share, World, bytes, config, header, initial, on_shard, pieces_of,
    push, spec, spec_of, start_with, timed, within,
};
use fastps_core::error::Kind;
use fastps_core::frame::{Action, Push};
use fastps_core::policy::{Admission, Held, Policy};
use fastps_core::slice::Slice;
use fastps_core::tensor::SliceId;
use fastps_proto::v1 as pb;
use fastps_server::{Role, Server, ServerConfig};
use fastps_transport::convert::{self, Answer, Read, Route};
use fastps_transport::tls::TlsFiles;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn a_registration_is_waited_for_and_taken_over() {
    const LATE: &str = "adam 1 big";
    let reservation_lease = Duration::from_secs(5);
    let config = ServerConfig { reservation_lease, ..config() };
    let mut world = World::start_without(config, Some(LATE)).await;
    let late = Tensor::named(LATE);
    let spec = spec_of(late);
    let used = async |peer: &mut Peer| {
        let mut used = Vec::new();
        for shard in &mut peer.shards {
            used.push(shard.counter("memory_slices").await);
        }
        used
    };
    let [first, second] = &mut world.peers[..] else { panic!() };
    let before = used(first).await;
    let place = first.shards[0].register(&spec).await.unwrap();
    let pieces = pieces_of(late, &place);
    assert_eq!(pieces.len(), 3);
    for shard in 0..3 {
        let share = on_shard(&place, shard).unwrap();
        first.shards[shard].reserve_part(&spec, &share).await.unwrap();
        first.shards[shard].reserve_part(&spec, &share).await.unwrap();
        assert_eq!(first.shards[shard].seal(place.reservation).await.unwrap_err().kind, Kind::Precondition);
    }
    assert_eq!(first.shards[0].commit(place.reservation).await.unwrap_err().kind, Kind::Precondition);
    for piece in &pieces {
        let early = first.refusal(*piece, first.push(*piece, 1, -1.0)).await;
        assert_eq!((early.kind, early.tensor.as_deref()), (Kind::UnknownTensor, Some(LATE)));
    }
    assert!(second.shards[0].register(&spec).await.unwrap().under_way);
    let other = crate::stubs::spec(LATE, 4);
    assert_eq!(second.shards[0].register(&other).await.unwrap_err().kind, Kind::Precondition);

    tokio::time::sleep(2 * reservation_lease).await;
    assert_eq!(used(first).await, before);
    for shard in &mut first.shards {
        assert_eq!(shard.counter("reservations_expired").await, 1);
    }
    let again = second.shards[0].register(&spec).await.unwrap();
    assert!(!again.under_way && again.reservation != place.reservation);
    for piece in &pieces {
        let values = vec![7.0; piece.elements];
        let frame = initial(first.route(*piece), piece.slice, place.reservation, &values);
        assert_eq!(first.refusal(*piece, frame).await.kind, Kind::UnknownTensor);
    }
    for shard in &mut first.shards {
        assert_eq!(shard.seal(place.reservation).await.unwrap_err().kind, Kind::Lease);
    }
    assert_eq!(first.shards[0].commit(place.reservation).await.unwrap_err().kind, Kind::Lease);

    second.fill(&spec, &again, 0.0).await;
    let pieces = pieces_of(late, &again);
    for piece in &pieces {
        let share = on_shard(&again, piece.shard).unwrap();
        assert_eq!(second.shards[piece.shard].reserve_part(&spec, &share).await.unwrap(), 0);
        let values = vec![6.0; piece.elements];
        let frame = initial(second.route(*piece), piece.slice, again.reservation, &values);
        assert_eq!(second.refusal(*piece, frame).await.kind, Kind::Precondition);
        // A sealed registration accepts no more slices, which would block it for all clients.
        let more = Share { slices: vec![1 << 60], indices: vec![0], ..share };
        let refused = second.shards[piece.shard].reserve_part(&spec, &more).await.unwrap_err();
        assert!(refused.kind == Kind::Precondition && refused.message.contains("sealed"), "{refused}");
    }
    second.shards[0].commit(again.reservation).await.unwrap();
    second.shards[0].commit(again.reservation).await.unwrap();
    assert!(first.shards[0].register(&spec).await.unwrap().exists);
    world.pieces.extend(pieces);
    for peer in 0..2 {
        world.push(peer, 1).await;
    }
    world.check();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn a_push_that_waited_for_longer_than_its_session_lasts_is_refused() {
    // Shorter than writes are held.
    let lease = Duration::from_secs(1);
    let (server, mut shard, mut stream) = start_with(&ServerConfig { lease, ..config() }).await;
    let (route, slice) = shard.create(&mut stream, "w", &[1.0; 4]).await;
    let hold = pb::HoldRequest { cut: 7, hold_ms: 10_000 };
    shard.control.hold(timed(hold)).await.unwrap();
    let refused = stream.refusal(push(route, slice, 1, &[-1.0; 4])).await;
    assert_eq!(refused.kind, Kind::Lease, "{refused}");
    // Nothing of the client is left; it would never be removed.
    assert_eq!(shard.counter("identity_entries").await, 0);
    let other = Shard::connect(&server.addresses()[0], 77).await;
    let values = other.exchange().await.pull(Route { client: 77, ..route }, slice).await.1;
    assert_eq!(values, bytes(&[1.0; 4]));
}

/// Reserves, fills and seals the slices of a tensor on two shards.
async fn seal_both(shards: &mut [Shard; 2], spec: &pb::TensorSpec) -> pb::RegisterResponse {
    let place = shards[0].register(spec).await.unwrap();
    let placement = place.placement.clone().unwrap();
    assert_eq!(placement.shards, [0, 1]);
    for (k, shard) in shards.iter_mut().enumerate() {
        let ask = pb::ReserveRequest {
            reservation: place.reservation,
            spec: Some(spec.clone()),
            indices: vec![k as u64],
            slices: vec![placement.slices[k]],
            group: placement.group,
            client: CLIENT,
            ..Default::default()
        };
        shard.control.reserve(timed(ask)).await.unwrap();
        let route = Route { group: placement.group, epoch: 1, client: CLIENT };
        let values = vec![1.0; SLICE as usize];
        let frame = initial(route, placement.slices[k], place.reservation, &values);
        let receipt = shard.exchange().await.ask(frame).await;
        assert!(matches!(receipt, Answer::Receipt(_)), "{receipt:?}");
        shard.seal(place.reservation).await.unwrap();
    }
    place
}

/// A lease that expires within the test, but not while a busy machine renews it.
const SHORT: Duration = Duration::from_secs(5);

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn what_is_sealed_and_never_committed_is_freed_and_what_is_committed_stays() {
    let (server, first, _stream) =
        start_with(&ServerConfig { shards: 2, reservation_lease: SHORT, ..config() }).await;
    let second = Shard::connect(&server.addresses()[1], CLIENT).await;
    reservations_are_settled([first, second]).await;
}

/// Shard 1 asks shard 0, with TLS and in plain text.
#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn servers_settle_over_tls() {
    let ca = Ca::new();
    let settled = async |tls: TlsFiles| {
        let certificate_role = if tls.ca.is_some() { Role::Server } else { Role::Reader };
        let more = ServerConfig { certificate_role, ..config() };
        let server =
            Server::start(&ServerConfig { shards: 2, reservation_lease: SHORT, tls, ..more }).unwrap();
        let [first, second] = [0, 1].map(|shard| server.addresses()[shard].clone());
        let first = Shard::over(channel(&first, &ca.client()).await, CLIENT).await;
        let second = Shard::over(channel(&second, &ca.client()).await, CLIENT).await;
        reservations_are_settled([first, second]).await;
    };
    tokio::join!(settled(ca.mutual()), settled(ca.chained()));
}

async fn reservations_are_settled(mut shards: [Shard; 2]) {
    let reservation_lease = SHORT;
    let w = spec("w", 2 * SLICE);
    let place = seal_both(&mut shards, &w).await;
    // A slow owner that is alive keeps its registration.
    for _ in 0..6 {
        tokio::time::sleep(reservation_lease / 4).await;
        assert_eq!(shards[0].register(&w).await.unwrap().reservation, place.reservation);
    }
    for shard in &mut shards {
        assert!(shard.counter("memory_slices").await > 4 * SLICE);
    }
    // A dead one loses it, on every shard.
    let late = Instant::now() + Duration::from_secs(20);
    for shard in &mut shards {
        while shard.counter("memory_slices").await > 0 {
            assert!(Instant::now() < late, "the memory stays taken");
            tokio::time::sleep(reservation_lease / 4).await;
        }
        assert_eq!(shard.counter("reservations_expired").await, 1);
    }
    assert_eq!(shards[0].counter("registrations").await, 0);
    assert_eq!(shards[0].commit(place.reservation).await.unwrap_err().kind, Kind::Lease);

    let again = seal_both(&mut shards, &w).await;
    shards[0].commit(again.reservation).await.unwrap();
    tokio::time::sleep(reservation_lease * 3 / 2).await;
    let placement = again.placement.unwrap();
    let route = Route { group: placement.group, epoch: 1, client: CLIENT };
    for (shard, slice) in shards.iter().zip(placement.slices) {
        assert_eq!(shard.exchange().await.pull(route, slice).await.1, bytes(&vec![1.0; SLICE as usize]));
    }
}

/// Holds every gradient until released.
#[derive(Debug, Default)]
struct Holding(Mutex<Vec<Held>>);

impl Policy for Holding {
    fn admit(&self, _slice: &Slice, push: &Push<'_>) -> Admission {
        if push.action == Action::Gradient { Admission::Hold } else { Admission::Apply }
    }
    fn hold(&self, held: Held) {
        self.0.lock().unwrap().push(held);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn held_pushes_are_answered_later_in_any_order() {
    const PUSHES: u64 = 4;
    let holding = Arc::new(Holding::default());
    let mut world = World::start(ServerConfig { policy: Some(holding.clone()), ..config() }).await;
    let (mut owed, mut pushed) = ([[0; 3]; 2], 0);
    for (peer, owed) in owed.iter_mut().enumerate() {
        for piece in world.pieces_of(peer) {
            let client = &mut world.peers[peer];
            for sequence in 1..=PUSHES {
                let mut frame = client.push(piece, sequence, -1.0);
                header(&mut frame).want_values = sequence > PUSHES / 2;
                client.streams[piece.shard].send(frame).await;
                world.ledger.enter(piece.part, -1.0);
                owed[piece.shard] += 1;
                pushed += 1;
            }
            // A later request is answered at once.
            assert_eq!(client.pull(piece).await, (1, bytes(&vec![0.0; piece.elements])));
        }
    }
    let mut held = std::mem::take(&mut *holding.0.lock().unwrap());
    assert_eq!(held.len(), pushed);
    held.reverse();
    let release = tokio::task::spawn_blocking(|| held.into_iter().for_each(Held::release));
    for (peer, owed) in owed.into_iter().enumerate() {
        for (shard, owed) in owed.into_iter().enumerate() {
            let mut counts = [0; PUSHES as usize];
            for _ in 0..owed {
                let (tag, answer) = world.peers[peer].streams[shard].answer().await;
                let sequence = tag - 1000;
                assert_eq!(matches!(answer, Answer::Values { .. }), sequence > PUSHES / 2, "{answer:?}");
                counts[sequence as usize - 1] += 1;
            }
            assert_eq!(counts, [owed / PUSHES as usize; PUSHES as usize]);
        }
    }
    within(release).await.unwrap();
    world.check();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn a_reader_that_stalls_delays_nobody_and_pins_two_slices() {
    const READS: usize = 40;
    let mut world = World::start(config()).await;
    let bigs: Vec<_> = world.pieces.iter().copied().filter(Piece::is_of_big).collect();
    let mut stalled = Peer::connect(&world.server, 3, 0).await;
    for piece in &bigs {
        for _ in 0..READS {
            let read = convert::read_frame(5, stalled.route(*piece), SliceId(piece.slice), Read::Values);
            stalled.streams[piece.shard].send(read).await;
        }
    }
    tokio::time::sleep(Duration::from_millis(200)).await;
    let started = Instant::now();
    for sequence in 1..=20 {
        for peer in 0..2 {
            for piece in &bigs {
                world.push_to(peer, *piece, sequence).await;
            }
        }
    }
    assert!(started.elapsed() < Duration::from_secs(30));
    // The small slices fit in the connection's window; two of the others are pinned.
    for piece in bigs.iter().filter(|piece| piece.elements as u64 == SLICE) {
        assert!(world.peers[0].shards[piece.shard].counter("pulls").await < READS as u64);
    }
    for piece in &bigs {
        for _ in 0..READS {
            let (_, answer) = stalled.streams[piece.shard].answer().await;
            let Answer::Values { version, payload, .. } = answer else { panic!("{answer:?}") };
            let expected = version as f32 - 1.0;
            assert!(payload == bytes(&vec![expected; piece.elements]), "version {version} is not whole");
        }
    }
    for peer in 0..2 {
        world.push(peer, 21).await;
    }
    world.check();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn stopping_takes_no_longer_than_its_limit_whatever_clients_do() {
    // A stopping server refuses frames only for a moment, which a late client does not see.
    for _ in 0..10 {
        if stop_with_clients().await > 0 {
            return;
        }
    }
    panic!("nothing was ever refused");
}

/// Stops servers that have clients. Returns how many of the clients' streams got a refusal before they ended.
async fn stop_with_clients() -> usize {
    let mut world = World::start(config()).await;
    for peer in 0..2 {
        world.push(peer, 1).await;
    }
    world.check();
    let World { mut peers, pieces, truth: _idle, server, .. } = world;
    let addresses = server.addresses().to_vec();
    // Connections that do not speak HTTP/2, and those of an idle client.
    let _mute: Vec<_> = addresses.iter().map(|a| std::net::TcpStream::connect(a).unwrap()).collect();
    let (tell, receiver) = std::sync::mpsc::channel();
    std::thread::spawn(move || {
        let started = Instant::now();
        server.stop(Duration::from_secs(5)).unwrap();
        server.stop(Duration::from_secs(5)).unwrap();
        tell.send(started.elapsed()).unwrap();
    });
    let started = Instant::now();
    let mut refusals = 0;
    for peer in &mut peers {
        for shard in 0..addresses.len() {
            let is_small = |piece: &&Piece| piece.shard == shard && piece.elements == 10;
            let piece = *pieces.iter().find(is_small).unwrap();
            loop {
                assert!(started.elapsed() < PATIENT);
                let frame = peer.push(piece, 1, -1.0);
                match peer.streams[shard].ask_while_it_lasts(frame).await {
                    Some(Answer::Refused(draining)) => {
                        assert_eq!(draining.kind, Kind::Unavailable);
                        assert!(draining.retry_after_ms.is_some());
                        refusals += 1;
                        break;
                    }
                    Some(_) => tokio::time::sleep(Duration::from_millis(10)).await,
                    None => break,
                }
            }
        }
    }
    // The server ends the streams.
    for stream in peers.iter_mut().flat_map(|peer| &mut peer.streams) {
        assert!(matches!(stream.message().await, Ok(None)));
    }
    let took = receiver.recv_timeout(PATIENT).unwrap();
    assert!(took < Duration::from_secs(5), "{took:?}");
    for address in addresses {
        // Another test may hold the port for a moment.
        until("the port is free", || std::net::TcpListener::bind(&address).is_ok());
    }
    refusals
}
