//! Who owns the shards, as shard 0 has told: a shard that was taken over is at its owner's address.

use crate::state::runtime::lock;
use fastps_proto::v1 as pb;
use std::sync::Mutex;

/// The owners of the shards, in the order of their indices; empty: unknown.
#[derive(Debug, Default)]
pub(crate) struct Owners(Mutex<Vec<pb::ShardOwner>>);

impl Owners {
    /// Notes what shard 0 of so many shards tells, unless that is nothing.
    pub(crate) fn note(&self, owners: Vec<pb::ShardOwner>, shards: usize) {
        if owners.len() == shards {
            *lock(&self.0) = owners;
        }
    }

    /// The address of a shard's owner, unless a client that has met this term must not talk to it.
    pub(crate) fn address(&self, shard: u32, met: u64) -> Option<String> {
        let owners = lock(&self.0);
        let owner = owners.get(shard as usize)?;
        (!owner.address.is_empty() && owner.term >= met).then(|| owner.address.clone())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_earlier_owner_and_an_unknown_one_have_no_address() {
        let owners = Owners::default();
        let owner = |address: &str, term| pb::ShardOwner { address: address.to_owned(), term };
        assert_eq!(owners.address(0, 0), None);
        owners.note(vec![owner("host-a:7070", 2), pb::ShardOwner::default()], 2);
        owners.note(Vec::new(), 2);
        owners.note(vec![owner("host-z:7070", 9); 3], 2);
        assert_eq!(owners.address(0, 2).as_deref(), Some("host-a:7070"));
        assert_eq!([owners.address(0, 3), owners.address(1, 0), owners.address(2, 0)], [None, None, None]);
    }
}
