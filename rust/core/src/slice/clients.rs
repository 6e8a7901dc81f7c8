//! Which slices remember each client. When a client ends, the shard visits the slices that this client
//! touched instead of all slices.

use crate::base::sync::{Arc, Mutex, lock};
use crate::tensor::SliceId;
use std::collections::BTreeSet;
use std::ops::RangeInclusive;

/// Bytes of one client's mark on one slice: 16 in nodes that are at least half full, and their share of the
/// nodes above.
pub(crate) const MET_BYTES: u64 = 48;

/// The clients of a shard, each with the slices that remember it. One flat set, since most clients of a shard
/// with many slices touch many of them, and those of a small one few.
#[derive(Debug, Default)]
pub(crate) struct Clients(Mutex<BTreeSet<(u64, u64)>>);

/// The marks of a client.
fn of(client: u64) -> RangeInclusive<(u64, u64)> {
    (client, 0)..=(client, u64::MAX)
}

/// Marks a slice as remembering a client, until it is dropped.
#[derive(Debug)]
pub(crate) struct Met {
    clients: Arc<Clients>,
    client: u64,
    slice: SliceId,
}

impl Clients {
    pub(crate) fn meet(self: &Arc<Self>, client: u64, slice: SliceId) -> Met {
        lock(&self.0).insert((client, slice.0));
        Met { clients: self.clone(), client, slice }
    }

    /// Returns whether any slice remembers the client.
    pub(crate) fn knows(&self, client: u64) -> bool {
        lock(&self.0).range(of(client)).next().is_some()
    }

    /// Takes out the slices that remember a client; the caller makes them forget it.
    pub(crate) fn take(&self, client: u64) -> Vec<SliceId> {
        let mut table = lock(&self.0);
        let slices: Vec<_> = table.range(of(client)).map(|(_, slice)| SliceId(*slice)).collect();
        for slice in &slices {
            table.remove(&(client, slice.0));
        }
        slices
    }
}

impl Drop for Met {
    fn drop(&mut self) {
        lock(&self.clients.0).remove(&(self.client, self.slice.0));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_client_is_known_while_a_slice_remembers_it() {
        let clients = Arc::new(Clients::default());
        let (one, two) = (clients.meet(7, SliceId(1)), clients.meet(7, SliceId(2)));
        drop(one);
        assert!(clients.knows(7) && !clients.knows(8));
        assert_eq!(clients.take(7), [SliceId(2)]);
        assert!(!clients.knows(7) && clients.take(7).is_empty());
        let again = clients.meet(7, SliceId(3));
        drop(two);
        assert!(clients.knows(7));
        drop(again);
        assert!(!clients.knows(7));
    }
}
