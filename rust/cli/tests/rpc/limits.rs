//! Limits of the control plane that protect other clients, while shard 0 is away and while snapshots are written.

use crate::durable::Folder;
use crate::stubs::{CLIENT, Peer, SLICE, Shard, config, error, on_shard, spec, start_with, timed};
use fastps_core::error::{Error, Kind};
use fastps_proto::v1 as pb;
use fastps_server::{Server, ServerConfig};
use std::collections::BTreeSet;
use std::net::TcpListener;
use std::time::Duration;

async fn free(shard: &mut Shard, slices: Vec<u64>) -> Result<(), Error> {
    shard.control.drop(timed(pb::DropRequest { slices })).await.map(drop).map_err(error)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn a_registration_that_loses_sealed_slices_is_over() {
    let server =
        Server::start(&ServerConfig { shards: 2, memory_limit: Some(256 << 20), ..config() }).unwrap();
    let mut owner = Peer::connect(&server, CLIENT, 0).await;
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
