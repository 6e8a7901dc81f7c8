//! Limits of the control plane that protect other clients: memory, tensors, sessions, the disk.

use crate::durable::Folder;
use crate::stubs::{
    CLIENT, Peer, SLICE, Shard, Share, config, error, on_shard, push, spec, start_with, timed,
};
use fastps_core::error::{Error, Kind};
use fastps_proto::v1 as pb;
use fastps_server::{Server, ServerConfig};
use fastps_transport::convert::{Answer, Route};
use futures_util::future::join_all;
use std::collections::BTreeSet;
use std::net::TcpListener;
use std::time::Duration;

const STRANGER: u64 = 0xBAD;

async fn two_shards() -> (Server, Peer, Peer) {
    let server =
        Server::start(&ServerConfig { shards: 2, memory_limit: Some(256 << 20), ..config() }).unwrap();
    let first = Peer::connect(&server, CLIENT, 0).await;
    let second = Peer::connect(&server, STRANGER, 1).await;
    (server, first, second)
}

async fn free(shard: &mut Shard, slices: Vec<u64>) -> Result<(), Error> {
    shard.control.drop(timed(pb::DropRequest { slices })).await.map(drop).map_err(error)
}

async fn unregister(shard: &mut Shard, name: &str) {
    shard.control.unregister(timed(pb::UnregisterRequest { name: name.to_owned() })).await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn slices_of_a_registered_tensor_are_not_freed() {
    let (_server, mut owner, mut stranger) = two_shards().await;
    let spec = spec("big", 3 * SLICE);
    let place = owner.register(&spec).await;
    let other = owner.shards[0].register(&crate::stubs::spec("other", 1)).await.unwrap();
    for shard in 0..2 {
        let slices = on_shard(&place, shard).unwrap().slices;
        // Neither a single slice of it, nor a mix with slices that could be freed.
        let mixed = [&slices[..1], &other.placement.as_ref().unwrap().slices].concat();
        for asked in [slices, mixed] {
            let refused = free(&mut stranger.shards[shard], asked).await.unwrap_err();
            let parts = (refused.kind, refused.tensor.as_deref(), refused.shard);
            assert_eq!(parts, (Kind::Precondition, Some("big"), Some(shard as u32)), "{refused}");
        }
    }
    for piece in place.placement.iter().flat_map(|p| p.slices.iter().zip(&p.shards)) {
        let route = Route { group: 1, epoch: 1, client: CLIENT };
        let receipt =
            owner.streams[*piece.1 as usize].ask(push(route, *piece.0, 1, &vec![-1.0; SLICE as usize])).await;
        assert!(matches!(receipt, Answer::Receipt(applied) if applied.version == 2), "{receipt:?}");
    }
    // Nothing changed for the other tensor either.
    let again = owner.shards[0].register(&crate::stubs::spec("other", 1)).await.unwrap();
    assert_eq!(again.reservation, other.reservation);
    // Once the tensor is unregistered, any client may free its slices.
    unregister(&mut stranger.shards[0], "big").await;
    for shard in 0..2 {
        free(&mut stranger.shards[shard], on_shard(&place, shard).unwrap().slices).await.unwrap();
        assert_eq!(owner.shards[shard].counter("memory_slices").await, 0);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn a_registration_that_loses_sealed_slices_is_over() {
    let (_server, mut owner, _) = two_shards().await;
    let spec = spec("big", 2 * SLICE);
    for shard in 0..2 {
        let place = owner.shards[0].register(&spec).await.unwrap();
        owner.fill(&spec, &place, 0.0).await;
        free(&mut owner.shards[shard], on_shard(&place, shard).unwrap().slices).await.unwrap();
        assert_eq!(owner.shards[0].commit(place.reservation).await.unwrap_err().kind, Kind::Lease);
        free(&mut owner.shards[1 - shard], on_shard(&place, 1 - shard).unwrap().slices).await.unwrap();
    }
    owner.register(&spec).await;
}

/// Two servers of one shard each, in the order of the cluster.
fn two_servers() -> [Server; 2] {
    for _ in 0..100 {
        let free: Vec<_> = (0..2).map(|_| TcpListener::bind("127.0.0.1:0").unwrap()).collect();
        let cluster: Vec<_> = free.iter().map(|port| port.local_addr().unwrap().to_string()).collect();
        drop(free);
        let start = |k: usize| {
            let (listen, cluster) = (vec![cluster[k].clone()], cluster.clone());
            Server::start(&ServerConfig { listen, cluster, memory_limit: None, ..config() })
        };
        // Another test may hold a port for a moment.
        if let (Ok(first), Ok(second)) = (start(0), start(1)) {
            return [first, second];
        }
    }
    panic!("no two ports are free");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn while_shard_0_is_away_nothing_is_freed_that_may_be_registered() {
    let [first, second] = two_servers();
    let (mut shards, mut streams) = (Vec::new(), Vec::new());
    for server in [&first, &second] {
        let shard = Shard::connect(&server.addresses()[0], CLIENT).await;
        streams.push(shard.exchange().await);
        shards.push(shard);
    }
    let mut owner = Peer { number: 0, shards, streams };
    let (kept, open) = (spec("kept", 2 * SLICE), spec("open", 2 * SLICE));
    let kept_at = on_shard(&owner.register(&kept).await, 1).unwrap();
    let open_at = owner.shards[0].register(&open).await.unwrap();
    let open_at = on_shard(&open_at, 1).unwrap();
    owner.shards[1].reserve_part(&open, &open_at).await.unwrap();
    let late = owner.shards[0].register(&spec("late", 2 * SLICE)).await.unwrap();
    first.stop(Duration::from_secs(5)).unwrap();
    let refused = free(&mut owner.shards[1], kept_at.slices).await.unwrap_err();
    assert!(refused.kind == Kind::Unavailable && refused.retry_after_ms.is_some(), "{refused}");
    let late = on_shard(&late, 1).unwrap();
    let refused = owner.shards[1].reserve_part(&spec("late", 2 * SLICE), &late).await.unwrap_err();
    assert!(refused.kind == Kind::Unavailable && refused.retry_after_ms.is_some(), "{refused}");
    // Known tensors still work.
    owner.shards[1].reserve_part(&open, &open_at).await.unwrap();
    free(&mut owner.shards[1], open_at.slices).await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn a_reservation_needs_a_registration() {
    let (_server, mut owner, _) = two_shards().await;
    let known = spec("big", 2 * SLICE);
    let place = owner.shards[0].register(&known).await.unwrap();
    for shard in 0..2 {
        let own = || on_shard(&place, shard).unwrap();
        let share = |change: &dyn Fn(&mut Share)| {
            let mut share = own();
            change(&mut share);
            share
        };
        let elsewhere = on_shard(&place, 1 - shard).unwrap();
        let large = spec("big", 4 * SLICE);
        let bad = [
            (&known, share(&|s| s.reservation ^= 1), Kind::Lease, ""),
            (&known, share(&|s| s.slices[0] ^= 1), Kind::Precondition, "slices"),
            (&known, share(&|s| s.indices[0] ^= 1), Kind::Precondition, "slices"),
            (&known, elsewhere, Kind::Precondition, "slices"),
            (&known, share(&|s| s.group += 1), Kind::Precondition, "group"),
            (&large, own(), Kind::Precondition, "shape"),
            (&large, share(&|s| (s.slices.push(7), s.indices.push(3)).0), Kind::Precondition, "shape"),
        ];
        let used = owner.shards[shard].counter("memory_slices").await;
        for (spec, share, kind, word) in bad {
            let refused = owner.shards[shard].reserve_part(spec, &share).await.unwrap_err();
            assert_eq!((refused.kind, refused.message.contains(word)), (kind, true), "{refused}");
        }
        assert_eq!(owner.shards[shard].counter("memory_slices").await, used);
    }
    owner.fill(&known, &place, 0.0).await;
    owner.shards[0].commit(place.reservation).await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn a_group_without_tensors_is_not_joined() {
    let (_server, mut owner, mut stranger) = two_shards().await;
    let join = |client, group| {
        let mode = pb::Mode { kind: pb::ModeKind::ModeSync.into(), workers: 2, ..Default::default() };
        let name = "worker".to_owned();
        timed(pb::JoinRequest { client, group, mode: Some(mode), rank: None, name })
    };
    let pending = owner.shards[0].register(&spec("late", 1)).await.unwrap();
    let group = pending.placement.as_ref().unwrap().group;
    for shard in 0..2 {
        for number in [group, 7] {
            let refused =
                error(stranger.shards[shard].control.join(join(STRANGER, number)).await.unwrap_err());
            assert_eq!(refused.kind, Kind::UnknownTensor, "{refused}");
        }
        assert_eq!(stranger.shards[shard].counter("workers").await, 0);
    }
    owner.fill(&spec("late", 1), &pending, 0.0).await;
    owner.shards[0].commit(pending.reservation).await.unwrap();
    // The other shard has no slices of the group, and may get some.
    for shard in 0..2 {
        stranger.shards[shard].control.join(join(STRANGER, group)).await.unwrap();
    }
    // A place is kept, and can be taken again, after the last tensor is gone.
    unregister(&mut owner.shards[0], "late").await;
    stranger.shards[0].control.join(join(STRANGER, group)).await.unwrap();
    assert!(owner.shards[0].control.join(join(CLIENT, group)).await.is_err());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn a_connection_begins_few_sessions() {
    let (server, mut shard, _) = start_with(&config()).await;
    let hello = |client| timed(crate::stubs::hello(client));
    // Concurrently, since sequential calls stay below the allowed rate on a busy machine.
    let hellos = (1..=1000).map(|client| {
        let mut control = shard.control.clone();
        async move { control.hello(hello(client)).await }
    });
    let mut refused = 0;
    for answer in join_all(hellos).await {
        if let Err(status) = answer {
            let error = error(status);
            assert!(error.kind == Kind::Capacity && error.retry_after_ms.is_some(), "{error}");
            refused += 1;
        }
    }
    // An existing session can be renewed whatever else the connection requests.
    for _ in 0..500 {
        shard.control.hello(hello(CLIENT)).await.unwrap();
    }
    assert!(refused > 0);
    let mut other = Shard::connect(&server.addresses()[0], 0xF00D).await;
    assert_eq!(other.counter("sessions").await, 1002 - refused);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn registrations_take_memory_that_is_counted() {
    const LIMIT: u64 = 256 << 20;
    let (server, mut shard, _) = start_with(&ServerConfig { memory_limit: Some(LIMIT), ..config() }).await;
    // As many slices as a tensor may have; the shard could not hold one of them.
    for k in 0..600 {
        let refused = shard.register(&spec(&format!("huge {k}"), SLICE << 18)).await.unwrap_err();
        assert_eq!(refused.kind, Kind::Capacity, "{refused}");
    }
    assert_eq!(shard.counter("memory_map").await, 0);
    let mut kept = Vec::new();
    for k in 0..70 {
        match shard.register(&spec(&format!("fits {k}"), SLICE * 64)).await {
            Ok(place) => kept.push(place),
            Err(refused) => assert!(refused.kind == Kind::Capacity && refused.retry_after_ms.is_some()),
        }
    }
    assert_eq!(kept.len(), 64);
    assert!(shard.counter("memory_map").await > 64 * 1024);
    let mut other = Shard::connect(&server.addresses()[0], STRANGER).await;
    other.register(&spec("theirs", 1)).await.unwrap();
    let touched = shard.counter("tensors_touched").await;
    free(&mut shard, vec![1]).await.unwrap();
    assert_eq!(shard.counter("tensors_touched").await, touched + 1);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn snapshots_that_wait_for_their_turn_are_one() {
    const CALLS: usize = 16;
    let folder = Folder::new();
    let with_files = ServerConfig { data_dir: Some(folder.0.clone()), memory_limit: None, ..config() };
    let (_server, mut shard, mut stream) = start_with(&with_files).await;
    for k in 0..8 {
        shard.create(&mut stream, &format!("w{k}"), &vec![0.0; SLICE as usize]).await;
    }
    let calls = (0..CALLS).map(|_| {
        let mut control = shard.control.clone();
        tokio::spawn(async move { control.checkpoint(timed(pb::CheckpointRequest::default())).await })
    });
    let mut numbers = BTreeSet::new();
    for call in calls.collect::<Vec<_>>() {
        numbers.insert(call.await.unwrap().unwrap().into_inner().snapshot);
    }
    assert!(numbers.len() <= CALLS / 2, "{numbers:?}");
    let cut = pb::CheckpointRequest { group: "default".to_owned(), cut: 7 };
    assert_eq!(error(shard.control.checkpoint(timed(cut)).await.unwrap_err()).kind, Kind::Deadline);
}
