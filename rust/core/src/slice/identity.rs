//! The identity table of a slice. It remembers the outcomes of each client's pushes, so that a repeated push
//! is answered instead of applied again.
//!
//! The table keeps the outcomes that the client has not acknowledged, at most the last [`WINDOW`] per client,
//! and drops all of a client's when its lease ends.

use crate::base::error::Result;
use crate::base::isa::prefetch;
use crate::base::sync::Arc;
use crate::memory::{Charge, Meter, Purpose};
use crate::slice::asynchrony::{self, Asynchrony};
use crate::slice::clients::{Clients, MET_BYTES, Met};
use crate::slice::frame::{Applied, Identity};
use crate::tensor::SliceId;
use std::collections::VecDeque;

/// Number of outcomes that a slice remembers per client.
pub const WINDOW: usize = 64;

/// Most entries of a table that are prefetched.
const MAX_PREFETCHED_CLIENTS: usize = 8;

/// Called once with the outcome of a push.
pub type Completion = Box<dyn FnOnce(Result<Applied>) + Send>;

/// A slice's knowledge of one push.
pub(crate) enum Outcome {
    Applied(Settled),
    /// It was not applied and never will be.
    Fenced,
    /// Held by a policy; repeats wait here.
    Held(Vec<Completion>),
    /// A thread is applying it right now (`hogwild`); repeats wait here.
    Applying(Vec<Completion>),
    /// Part of a version that waits for other gradients; repeats and outcome queries wait here.
    Shared(Vec<Completion>),
}

/// What a slice remembers of a push that it has applied.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Settled {
    /// As in [`Applied`].
    pub version: u64,
    /// As in [`Applied`].
    pub own: u64,
    /// As in [`Applied`].
    pub staleness: Option<u64>,
    /// As in [`Applied`].
    pub scale: f32,
}

impl Settled {
    /// The answer to a repeat of the push.
    pub fn repeated(self) -> Applied {
        let Self { version, own, staleness, scale } = self;
        Applied { version, own, staleness, scale, momentum: None, duplicate: true }
    }
}

impl From<Applied> for Settled {
    fn from(applied: Applied) -> Self {
        let Applied { version, own, staleness, scale, .. } = applied;
        Self { version, own, staleness, scale }
    }
}

/// The table's knowledge of an arriving identity.
pub(crate) enum Seen<'a> {
    /// The client has no entry yet: [`IdentityTable::meet`] creates it.
    Unmet,
    New,
    Before(&'a mut Outcome),
    /// Older than the window.
    Forgotten,
}

/// Bytes of one remembered outcome, charged with the place for it.
const OUTCOME_BYTES: u64 = size_of::<(u64, Outcome)>() as u64;
/// Bytes of one client's entry without outcomes, in a table that grows by a quarter.
const ENTRY_BYTES: u64 = (size_of::<(u64, Client)>() as u64).div_ceil(4) * 5 + MET_BYTES;
/// Outcomes of a client that acknowledges, while one of its pushes is answered and the next one arrives.
const STEADY_OUTCOMES: u64 = 2;
/// Bytes of one client in a slice, if it acknowledges what is answered.
pub const IDENTITY_BYTES: u64 = ENTRY_BYTES + STEADY_OUTCOMES * OUTCOME_BYTES;
/// Bytes of a slice for its clients together: the last gradients, if its optimizer has a momentum.
pub const ASYNCHRONY_BYTES: u64 = Asynchrony::BYTES;
/// Most memory of a client in a slice.
const LARGEST_IDENTITY_BYTES: u64 = 350;
const _: () = assert!(IDENTITY_BYTES <= LARGEST_IDENTITY_BYTES);

struct Client {
    /// Number of the slice's changes by this client.
    own: u64,
    /// How many of those were not gradients.
    assigned: u64,
    /// Largest sequence number that was dropped from the window or acknowledged.
    forgotten: u64,
    /// Largest sequence number noted. The window has none above it, so most new pushes are recognized without
    /// a search.
    newest: u64,
    window: VecDeque<(u64, Outcome)>,
    /// Memory of the entry and of the window's places.
    charge: Charge,
    _met: Met,
}

impl Outcome {
    /// Whether it stands: the others must stay until they are settled.
    fn is_settled(&self) -> bool {
        matches!(self, Self::Applied(_) | Self::Fenced)
    }
}

/// The slice that owns a table, and the accounts of the table's memory and clients.
pub(crate) struct Home<'a> {
    pub(crate) meter: &'a Arc<Meter>,
    pub(crate) clients: &'a Arc<Clients>,
    pub(crate) slice: SliceId,
    /// Whether the optimizer has a momentum, which asynchrony adds to.
    pub(crate) has_momentum: bool,
}

/// A slice's memory of one client, as plain data.
#[derive(Clone, Debug, PartialEq)]
pub struct Remembered {
    /// The client.
    pub client: u64,
    /// Number of the slice's changes by this client.
    pub own: u64,
    /// How many of those were not gradients.
    pub assigned: u64,
    /// Largest sequence number that the slice no longer remembers.
    pub forgotten: u64,
    /// Sequence numbers with their outcomes, in the order noted; `None`: fenced.
    pub outcomes: Vec<(u64, Option<Settled>)>,
}

/// The table of one slice.
#[derive(Default)]
pub(crate) struct IdentityTable {
    /// Sorted by client. A vector instead of a map, so that it can be prefetched.
    clients: Vec<(u64, Client)>,
    /// The last client and its `own`, newer than in its entry: mostly one client changes a slice many times
    /// in a row.
    recent: Option<(u64, u64)>,
    /// Set once a client is known, if the optimizer has a momentum.
    asynchrony: Option<(Box<Asynchrony>, Charge)>,
}

impl Client {
    fn find(&mut self, sequence: u64) -> Option<&mut Outcome> {
        if sequence > self.newest {
            return None;
        }
        let found = self.window.iter_mut().rev().find(|(noted, _)| *noted == sequence);
        found.map(|(_, outcome)| outcome)
    }

    /// Returns whether the next outcome takes the place of the oldest settled one.
    fn is_full(&self) -> bool {
        self.window.len() >= WINDOW && self.window.iter().any(|(_, outcome)| outcome.is_settled())
    }

    /// Drops the oldest settled outcome. False: there is none.
    fn drop_oldest(&mut self) -> bool {
        let at = self.window.iter().position(|(_, outcome)| outcome.is_settled());
        let Some((sequence, _)) = at.and_then(|at| self.window.remove(at)) else {
            return false;
        };
        self.forgotten = self.forgotten.max(sequence);
        true
    }

    /// Takes the memory for one more outcome.
    fn make_room(&mut self) -> Result<()> {
        let (len, places) = (self.window.len(), self.window.capacity());
        if len < places || self.is_full() {
            return Ok(());
        }
        let more = places.max(1);
        self.charge.grow_to(self.charge.bytes() + more as u64 * OUTCOME_BYTES)?;
        self.window.reserve_exact(more);
        Ok(())
    }

    /// Drops the settled outcomes up to this number, and the memory of most places that are empty then.
    fn acknowledge(&mut self, sequence: u64) {
        if sequence <= self.forgotten {
            return;
        }
        self.forgotten = sequence;
        self.window.retain(|(noted, outcome)| *noted > sequence || !outcome.is_settled());
        let (places, kept) = (self.window.capacity(), self.window.len());
        if places > STEADY_OUTCOMES as usize && places > 3 * kept {
            self.window.shrink_to(2 * kept);
            self.charge.shrink_to(ENTRY_BYTES + self.window.capacity() as u64 * OUTCOME_BYTES);
        }
    }
}

impl IdentityTable {
    /// The index of a client's entry, or where to insert it.
    fn place(&self, client: u64) -> std::result::Result<usize, usize> {
        self.clients.binary_search_by_key(&client, |(known, _)| *known)
    }

    fn get(&self, client: u64) -> Option<&Client> {
        self.place(client).ok().map(|at| &self.clients[at].1)
    }

    fn get_mut(&mut self, client: u64) -> Option<&mut Client> {
        self.place(client).ok().map(|at| &mut self.clients[at].1)
    }

    pub(crate) fn look_up(&mut self, identity: Identity) -> Seen<'_> {
        let Some(client) = self.get_mut(identity.client) else {
            return Seen::Unmet;
        };
        let forgotten = identity.sequence <= client.forgotten;
        match client.find(identity.sequence) {
            Some(outcome) => Seen::Before(outcome),
            None if forgotten => Seen::Forgotten,
            None => Seen::New,
        }
    }

    /// Takes the memory for one more outcome of a client, who may be new. On an error, nothing has changed.
    pub(crate) fn make_room(&mut self, client: u64, home: &Home<'_>) -> Result<()> {
        let met = !self.knows(client);
        if met {
            self.meet(client, home)?;
        }
        let made = self.get_mut(client).map_or(Ok(()), Client::make_room);
        if met && made.is_err() {
            self.forget(client);
        }
        made
    }

    /// As `make_room`, for what was remembered before a restart: without memory, the oldest outcome makes
    /// room, since logs do not hold all acknowledgements.
    pub(crate) fn make_room_again(&mut self, client: u64, home: &Home<'_>) -> Result<()> {
        self.make_room(client, home).or_else(|error| {
            let dropped = self.get_mut(client).is_some_and(Client::drop_oldest);
            if dropped { Ok(()) } else { Err(error) }
        })
    }

    /// Notes that a client has the answers to all its pushes to the slice up to this number: their outcomes
    /// need not be remembered, and none of them comes again.
    pub(crate) fn acknowledge(&mut self, client: u64, sequence: u64) {
        if sequence > 0
            && let Some(client) = self.get_mut(client)
        {
            client.acknowledge(sequence);
        }
    }

    /// Creates the entry of a client that has none, without room for outcomes.
    pub(crate) fn meet(&mut self, client: u64, home: &Home<'_>) -> Result<()> {
        if home.has_momentum && self.asynchrony.is_none() {
            let charge = home.meter.take(Purpose::Outcomes, Asynchrony::BYTES)?;
            self.asynchrony = Some((Box::new(Asynchrony::new()), charge));
        }
        let charge = home.meter.take(Purpose::Outcomes, ENTRY_BYTES)?;
        self.forget(client);
        let entry = Client {
            own: 0,
            assigned: 0,
            forgotten: 0,
            newest: 0,
            window: VecDeque::new(),
            charge,
            _met: home.clients.meet(client, home.slice),
        };
        if let Err(at) = self.place(client) {
            // By a quarter, as it is charged.
            if self.clients.len() == self.clients.capacity() {
                self.clients.reserve_exact(self.clients.len() / 4 + 1);
            }
            self.clients.insert(at, (client, entry));
        }
        Ok(())
    }

    /// Notes an outcome, for which there is room, replacing an earlier one of the same identity, and returns the completions that
    /// waited for that one. Does nothing for a client that was forgotten meanwhile: its session is over.
    pub(crate) fn note(&mut self, identity: Identity, outcome: Outcome) -> Vec<Completion> {
        let Some(client) = self.get_mut(identity.client) else {
            return Vec::new();
        };
        if let Some(old) = client.find(identity.sequence) {
            return match std::mem::replace(old, outcome) {
                Outcome::Held(waiting) | Outcome::Applying(waiting) | Outcome::Shared(waiting) => waiting,
                Outcome::Applied(_) | Outcome::Fenced => Vec::new(),
            };
        }
        if client.window.len() >= WINDOW {
            client.drop_oldest();
        }
        client.newest = client.newest.max(identity.sequence);
        client.window.push_back((identity.sequence, outcome));
        Vec::new()
    }

    /// Forgets a push that was refused after its identity was claimed, and returns the completions that
    /// waited for it.
    pub(crate) fn withdraw(&mut self, identity: Identity) -> Vec<Completion> {
        let Some(client) = self.get_mut(identity.client) else {
            return Vec::new();
        };
        // A fence stays, because it promises that the push is never applied.
        let held = |(sequence, outcome): &(u64, Outcome)| {
            *sequence == identity.sequence && matches!(outcome, Outcome::Held(_) | Outcome::Shared(_))
        };
        let Some(at) = client.window.iter().rposition(held) else {
            return Vec::new();
        };
        match client.window.remove(at) {
            Some((_, Outcome::Held(waiting) | Outcome::Shared(waiting))) => waiting,
            _ => Vec::new(),
        }
    }

    /// Counts one more change by this client, and returns their number.
    pub(crate) fn count_own(&mut self, client: u64) -> u64 {
        let own = match self.recent {
            Some((recent, own)) if recent == client => own + 1,
            _ => {
                self.settle_recent();
                self.get(client).map_or(1, |entry| entry.own + 1)
            }
        };
        self.recent = Some((client, own));
        own
    }

    /// Makes the client the recent one, so that counting its next change needs no lookup. False: it has no
    /// entry.
    pub(crate) fn turn_to(&mut self, client: u64) -> bool {
        if self.recent.is_some_and(|(recent, _)| recent == client) {
            return true;
        }
        self.settle_recent();
        self.recent = self.get(client).map(|entry| (client, entry.own));
        self.recent.is_some()
    }

    fn settle_recent(&mut self) {
        if let Some((client, own)) = self.recent.take()
            && let Some(client) = self.get_mut(client)
        {
            client.own = own;
        }
    }

    /// Prefetches the first entries of the table, which are all of a small one.
    pub(crate) fn prefetch(&self) {
        prefetch(&self.clients[..self.clients.len().min(MAX_PREFETCHED_CLIENTS)]);
    }

    /// Prefetches where a client's next outcome goes: to the place of the oldest if the window is full, else
    /// behind the last.
    pub(crate) fn prefetch_window(&self, client: u64) {
        let window = self.get(client).map(|client| &client.window);
        let next =
            window.and_then(|window| if window.len() < WINDOW { window.back() } else { window.front() });
        if let Some(next) = next {
            prefetch(std::slice::from_ref(next));
        }
    }

    /// Number of changes by this client.
    pub(crate) fn own(&self, client: u64) -> u64 {
        match self.recent {
            Some((recent, own)) if recent == client => own,
            _ => self.get(client).map_or(0, |c| c.own),
        }
    }

    /// Notes that a client's latest change was not a gradient.
    pub(crate) fn note_assigned(&mut self, client: u64) {
        if let Some(client) = self.get_mut(client) {
            client.assigned += 1;
        }
    }

    /// Clients with a live lease that push gradients, this one included.
    pub(crate) fn pushing(&self, this: u64) -> usize {
        let pushes = |(client, entry): &&(u64, Client)| {
            let recent = self.recent.filter(|(recent, _)| recent == client);
            recent.map_or(entry.own, |(_, own)| own) > entry.assigned
        };
        1 + self.clients.iter().filter(|(client, _)| *client != this).filter(pushes).count()
    }

    /// The updates that asynchrony adds to the mean age of the gradients in a step that takes this one.
    pub(crate) fn asynchrony(&self, client: u64, staleness: Option<u64>) -> f64 {
        self.asynchrony.as_ref().map_or(0.0, |(asynchrony, _)| asynchrony.added(client, staleness))
    }

    /// Notes an applied dense gradient; one of unknown staleness does not count.
    #[inline(always)]
    pub(crate) fn note_gradient(&mut self, client: u64, staleness: Option<u64>) {
        if let (Some((asynchrony, _)), Some(staleness)) = (&mut self.asynchrony, staleness) {
            asynchrony.note(client, staleness);
        }
    }

    /// The last gradients that count as asynchrony, the oldest first.
    pub(crate) fn gradients(&self) -> Vec<asynchrony::Gradient> {
        self.asynchrony.as_ref().map_or_else(Vec::new, |(asynchrony, _)| asynchrony.image())
    }

    /// Drops everything known about a client, except its last gradients.
    pub(crate) fn forget(&mut self, client: u64) {
        self.recent = self.recent.filter(|(recent, _)| *recent != client);
        if let Ok(at) = self.place(client) {
            self.clients.remove(at);
        }
    }

    /// All settled outcomes, in client order. A push that is being applied right now counts as forgotten, so
    /// its outcome is unknown to a slice that is restored from the image.
    pub(crate) fn image(&self) -> Vec<Remembered> {
        let remembered = |(client, entry): &(u64, Client)| {
            let (mut forgotten, mut outcomes) = (entry.forgotten, Vec::with_capacity(entry.window.len()));
            for (sequence, outcome) in &entry.window {
                match outcome {
                    Outcome::Applied(applied) => outcomes.push((*sequence, Some(*applied))),
                    Outcome::Fenced => outcomes.push((*sequence, None)),
                    Outcome::Applying(_) => forgotten = forgotten.max(*sequence),
                    Outcome::Held(_) | Outcome::Shared(_) => {}
                }
            }
            let (own, assigned) = (self.own(*client), entry.assigned);
            Remembered { client: *client, own, assigned, forgotten, outcomes }
        };
        self.clients.iter().map(remembered).collect()
    }

    /// Rebuilds the table of an image.
    pub(crate) fn restored(
        clients: &[Remembered],
        gradients: &[asynchrony::Gradient],
        home: &Home<'_>,
    ) -> Result<Self> {
        let mut table = Self::default();
        for Remembered { client, own, assigned, forgotten, outcomes } in clients {
            table.meet(*client, home)?;
            if let Some(entry) = table.get_mut(*client) {
                (entry.own, entry.assigned, entry.forgotten) = (*own, *assigned, *forgotten);
            }
            for (sequence, applied) in outcomes {
                table.make_room_again(*client, home)?;
                let outcome = applied.map_or(Outcome::Fenced, Outcome::Applied);
                table.note(Identity { client: *client, sequence: *sequence }, outcome);
            }
        }
        for (client, staleness) in gradients {
            table.note_gradient(*client, Some(u64::from(*staleness)));
        }
        Ok(table)
    }

    /// Returns whether a client has an entry.
    pub(crate) fn knows(&self, client: u64) -> bool {
        self.place(client).is_ok()
    }

    /// Number of clients known.
    pub(crate) fn len(&self) -> usize {
        self.clients.len()
    }
}

impl std::fmt::Debug for IdentityTable {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("IdentityTable").field("clients", &self.clients.len()).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn applied(version: u64) -> Outcome {
        Outcome::Applied(Settled { version, own: version, staleness: None, scale: 1.0 })
    }

    #[test]
    fn remembers_a_window_per_client() {
        let window = ENTRY_BYTES + WINDOW as u64 * OUTCOME_BYTES;
        let (meter, clients) = (Meter::new(window), Arc::default());
        let home = |meter| Home { meter, clients: &clients, slice: SliceId(1), has_momentum: false };
        let mut table = IdentityTable::default();
        assert!(matches!(table.look_up(Identity { client: 7, sequence: 1 }), Seen::Unmet));
        for sequence in 1..=100 {
            let identity = Identity { client: 7, sequence };
            table.make_room(7, &home(&meter)).unwrap();
            assert!(matches!(table.look_up(identity), Seen::New));
            table.note(identity, applied(sequence));
            assert!(
                matches!(table.look_up(identity), Seen::Before(Outcome::Applied(a)) if a.version == sequence)
            );
        }
        table.note(Identity { client: 7, sequence: 200 }, Outcome::Fenced);
        for late in 102..104 {
            let identity = Identity { client: 7, sequence: late };
            assert!(matches!(table.look_up(identity), Seen::New));
            table.note(identity, applied(late));
            assert!(
                matches!(table.look_up(identity), Seen::Before(Outcome::Applied(a)) if a.version == late)
            );
        }
        assert!(matches!(
            table.look_up(Identity { client: 7, sequence: 200 }),
            Seen::Before(Outcome::Fenced)
        ));
        assert!(matches!(table.look_up(Identity { client: 7, sequence: 39 }), Seen::Forgotten));
        assert!(matches!(table.look_up(Identity { client: 7, sequence: 40 }), Seen::Before(_)));
        assert!(table.make_room(8, &home(&meter)).is_err() && !table.knows(8));
        let entry = table.get(7).unwrap();
        let taken = entry.window.capacity() as u64 * OUTCOME_BYTES + size_of::<(u64, Client)>() as u64;
        assert!(taken <= meter.used() && meter.used() == window, "{taken}");
        table.meet(8, &home(&Meter::new(ENTRY_BYTES))).unwrap();
        assert!(table.turn_to(7) && table.turn_to(8) && !table.turn_to(9));
        assert_eq!((table.count_own(7), table.count_own(7), table.count_own(8), table.own(7)), (1, 2, 1, 2));
        assert_eq!((table.count_own(7), table.own(8)), (3, 1));
        table.forget(7);
        assert_eq!((table.own(7), table.own(8)), (0, 1));
        assert!(matches!(table.look_up(Identity { client: 7, sequence: 100 }), Seen::Unmet));
        assert_eq!(meter.used(), 0);
    }
}
