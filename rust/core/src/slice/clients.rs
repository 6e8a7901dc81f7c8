//! Which slices remember each client. When a client ends, the shard visits the slices that this client
//! touched instead of all slices.

use crate::base::sync::{Arc, Mutex, lock};
use crate::tensor::SliceId;
use foldhash::fast::RandomState;
use std::collections::{HashMap, HashSet};

/// Bytes of one client's mark on one slice.
pub(crate) const MET_BYTES: u64 = 128;

type ClientTable = HashMap<u64, HashSet<SliceId, RandomState>, RandomState>;

/// The clients of a shard, and the slices that remember each of them.
#[derive(Debug, Default)]
pub(crate) struct Clients(Mutex<ClientTable>);

/// Marks a slice as remembering a client, until it is dropped.
#[derive(Debug)]
pub(crate) struct Met {
    clients: Arc<Clients>,
    client: u64,
    slice: SliceId,
}

impl Clients {
    pub(crate) fn meet(self: &Arc<Self>, client: u64, slice: SliceId) -> Met {
        lock(&self.0).entry(client).or_default().insert(slice);
        Met { clients: self.clone(), client, slice }
    }

    /// Returns whether any slice remembers the client.
    pub(crate) fn knows(&self, client: u64) -> bool {
        lock(&self.0).contains_key(&client)
    }

    /// Takes out the slices that remember a client; the caller makes them forget it.
    pub(crate) fn take(&self, client: u64) -> Vec<SliceId> {
        lock(&self.0).remove(&client).unwrap_or_default().into_iter().collect()
    }
}

impl Drop for Met {
    fn drop(&mut self) {
        let mut table = lock(&self.clients.0);
        if let Some(slices) = table.get_mut(&self.client) {
            slices.remove(&self.slice);
            if slices.is_empty() {
                table.remove(&self.client);
            }
        }
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
