//! A cluster of real servers in this process.

use fastps_server::{Server, ServerConfig};

/// A cluster that stops when it is dropped.
#[derive(Debug)]
pub(crate) struct Cluster(Server);

impl Cluster {
    pub(crate) fn start(shards: u32) -> Self {
        Self::of(shards, |_| ())
    }

    pub(crate) fn of(shards: u32, change: impl FnOnce(&mut ServerConfig)) -> Self {
        let mut config =
            ServerConfig { listen: vec!["127.0.0.1:0".to_owned()], shards, ..ServerConfig::default() };
        change(&mut config);
        Self(Server::start(&config).unwrap())
    }

    /// A counter of one shard.
    pub(crate) fn counter(&self, shard: usize, name: &str) -> u64 {
        self.0.counters()[shard].iter().find(|(n, _)| *n == name).unwrap().1
    }

    pub(crate) fn addresses(&self) -> Vec<String> {
        self.0.addresses().to_vec()
    }
}
