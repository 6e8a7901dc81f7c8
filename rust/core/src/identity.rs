//! What a slice remembers of each client's pushes, so that a repeat is answered instead of applied again.
//!
//! Per client a window of the last [`WINDOW`] outcomes, forgotten as a whole when the client's lease ends.

use crate::error::Result;
use crate::frame::{Applied, Identity};
use foldhash::fast::RandomState;
use std::collections::{HashMap, VecDeque};

/// How many outcomes per client and slice are remembered.
pub const WINDOW: usize = 64;

/// Called once with what became of a push.
pub type Completion = Box<dyn FnOnce(Result<Applied>) + Send>;

/// What a slice knows about one push.
pub(crate) enum Outcome {
    Applied(Applied),
    /// Never applied, and never will be.
    Fenced,
    /// Held by a policy; repeats wait here.
    Held(Vec<Completion>),
    /// A thread is applying it this moment (`hogwild`); repeats wait here.
    Applying(Vec<Completion>),
}

/// What the table says about an identity that arrives.
pub(crate) enum Seen<'a> {
    New,
    Before(&'a mut Outcome),
    /// Older than the window.
    Forgotten,
}

#[derive(Default)]
struct Client {
    /// Changes of the slice that were this client's.
    own: u64,
    /// Largest sequence that fell out of the window.
    forgotten: u64,
    window: VecDeque<(u64, Outcome)>,
}

/// The table of one slice.
#[derive(Default)]
pub(crate) struct Identities {
    clients: HashMap<u64, Client, RandomState>,
    /// A client and its `own`, ahead of the table: mostly one client changes a slice many times in a row.
    recent: Option<(u64, u64)>,
}

impl Identities {
    pub(crate) fn look_up(&mut self, identity: Identity) -> Seen<'_> {
        let Some(client) = self.clients.get_mut(&identity.client) else {
            return Seen::New;
        };
        let forgotten = identity.sequence <= client.forgotten;
        match client.window.iter_mut().rev().find(|(sequence, _)| *sequence == identity.sequence) {
            Some((_, outcome)) => Seen::Before(outcome),
            None if forgotten => Seen::Forgotten,
            None => Seen::New,
        }
    }

    /// Notes an outcome, in place of an earlier one of the same identity; gives back who waited for it.
    pub(crate) fn note(&mut self, identity: Identity, outcome: Outcome) -> Vec<Completion> {
        let client = self.clients.entry(identity.client).or_default();
        if let Some((_, old)) =
            client.window.iter_mut().rev().find(|(sequence, _)| *sequence == identity.sequence)
        {
            return match std::mem::replace(old, outcome) {
                Outcome::Held(waiting) | Outcome::Applying(waiting) => waiting,
                Outcome::Applied(_) | Outcome::Fenced => Vec::new(),
            };
        }
        if client.window.len() >= WINDOW {
            // Pending ones must stay to be settled; the oldest settled outcome goes.
            let settled = |(_, o): &(u64, Outcome)| matches!(o, Outcome::Applied(_) | Outcome::Fenced);
            if let Some((sequence, _)) =
                client.window.iter().position(settled).and_then(|at| client.window.remove(at))
            {
                client.forgotten = client.forgotten.max(sequence);
            }
        }
        client.window.push_back((identity.sequence, outcome));
        Vec::new()
    }

    /// Forgets a push that was refused after it had been claimed; gives back who waited for it.
    pub(crate) fn withdraw(&mut self, identity: Identity) -> Vec<Completion> {
        let Some(client) = self.clients.get_mut(&identity.client) else {
            return Vec::new();
        };
        // A fence stays, whatever becomes of the push.
        let held = |(sequence, outcome): &(u64, Outcome)| {
            *sequence == identity.sequence && matches!(outcome, Outcome::Held(_))
        };
        let Some(at) = client.window.iter().rposition(held) else {
            return Vec::new();
        };
        match client.window.remove(at) {
            Some((_, Outcome::Held(waiting))) => waiting,
            _ => Vec::new(),
        }
    }

    /// Counts one more change by this client.
    pub(crate) fn count_own(&mut self, client: u64) -> u64 {
        let own = match self.recent {
            Some((recent, own)) if recent == client => own + 1,
            _ => {
                self.settle_recent();
                self.clients.entry(client).or_default().own + 1
            }
        };
        self.recent = Some((client, own));
        own
    }

    fn settle_recent(&mut self) {
        if let Some((client, own)) = self.recent.take()
            && let Some(client) = self.clients.get_mut(&client)
        {
            client.own = own;
        }
    }

    /// How many changes were this client's.
    pub(crate) fn own(&self, client: u64) -> u64 {
        match self.recent {
            Some((recent, own)) if recent == client => own,
            _ => self.clients.get(&client).map_or(0, |c| c.own),
        }
    }

    /// Drops all that is known of a client.
    pub(crate) fn forget(&mut self, client: u64) {
        self.recent = self.recent.filter(|(recent, _)| *recent != client);
        self.clients.remove(&client);
    }

    /// Number of clients known.
    pub(crate) fn len(&self) -> usize {
        self.clients.len()
    }
}

impl std::fmt::Debug for Identities {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Identities").field("clients", &self.clients.len()).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn applied(version: u64) -> Outcome {
        Outcome::Applied(Applied { version, own: version, staleness: None, scale: 1.0, duplicate: false })
    }

    #[test]
    fn remembers_a_window_per_client() {
        let mut table = Identities::default();
        for sequence in 1..=100 {
            let identity = Identity { client: 7, sequence };
            assert!(matches!(table.look_up(identity), Seen::New));
            table.note(identity, applied(sequence));
            assert!(
                matches!(table.look_up(identity), Seen::Before(Outcome::Applied(a)) if a.version == sequence)
            );
        }
        assert!(matches!(table.look_up(Identity { client: 7, sequence: 36 }), Seen::Forgotten));
        assert!(matches!(table.look_up(Identity { client: 7, sequence: 37 }), Seen::Before(_)));
        assert!(matches!(table.look_up(Identity { client: 8, sequence: 1 }), Seen::New));
        assert_eq!((table.count_own(7), table.count_own(7), table.count_own(8), table.own(7)), (1, 2, 1, 2));
        assert_eq!((table.count_own(7), table.own(8)), (3, 1));
        table.forget(7);
        assert_eq!((table.own(7), table.own(8)), (0, 1));
        assert!(matches!(table.look_up(Identity { client: 7, sequence: 100 }), Seen::New));
    }
}
