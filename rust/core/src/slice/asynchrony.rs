//! How much momentum asynchrony adds to a slice, from the staleness of its last gradients.
//!
//! ```text
//! of the last 64 gradients        c_i = how many are client i's      T_i = sum of their min(staleness, 64)
//! k clients sent them             s = 0 if all T_i are 0
//!                                 s = min(k - 1, sum c_i T_i / sum c_i (c_i - 1)); k - 1 if the divisor is 0
//! ```
//!
//! The mean staleness of all gradients is k - 1 whatever the speeds are. Weighted by the share of its sender,
//! it is `1 / sum p_i^2 - 1` for workers of shares `p_i` that fetch after each push: k - 1 for equal ones, and
//! near 0 for a fast worker beside rare pushes. Workers that take turns with fresh values add nothing.
//!
//! It is a function of the applied gradients alone, so replay and repeated pushes give the same bits.

use std::collections::VecDeque;

/// Number of gradients that count.
const GRADIENTS: usize = 64;
/// Largest staleness that counts, so that one very old gradient does not outweigh the others.
const LARGEST: u64 = 64;

/// The client and staleness of a gradient.
pub type Gradient = (u64, u8);

/// The last gradients of a slice whose staleness is known.
#[derive(Debug)]
pub(crate) struct Asynchrony {
    /// Place of the sender, and staleness, of each gradient; the oldest first.
    gradients: VecDeque<(u8, u8)>,
    /// Senders by place. One without gradients leaves its place to the next new one.
    senders: Vec<Sender>,
}

#[derive(Clone, Copy, Debug)]
struct Sender {
    client: u64,
    gradients: u8,
    staleness: u16,
}

/// The sums over all senders.
#[derive(Default)]
struct Sums {
    senders: u32,
    staleness: u32,
    weighted: u32,
    pairs: u32,
}

impl Sums {
    fn add(&mut self, gradients: u32, staleness: u32) {
        if gradients > 0 {
            self.senders += 1;
            self.staleness += staleness;
            self.weighted += gradients * staleness;
            self.pairs += gradients * (gradients - 1);
        }
    }

    fn added(&self) -> f64 {
        if self.staleness == 0 {
            return 0.0;
        }
        let others = f64::from(self.senders - 1);
        if self.pairs == 0 { others } else { others.min(f64::from(self.weighted) / f64::from(self.pairs)) }
    }
}

impl Asynchrony {
    /// Bytes that it takes at most.
    pub(crate) const BYTES: u64 =
        (size_of::<Self>() + GRADIENTS * (size_of::<Sender>() + size_of::<(u8, u8)>())) as u64;

    pub(crate) fn new() -> Self {
        Self { gradients: VecDeque::with_capacity(GRADIENTS), senders: Vec::new() }
    }

    /// The gradient that the next one replaces.
    fn oldest(&self) -> Option<(u8, u8)> {
        if self.gradients.len() < GRADIENTS { None } else { self.gradients.front().copied() }
    }

    /// The updates `s` that asynchrony adds to the mean age of the gradients in a step that takes this one;
    /// `None`: its staleness is unknown, so it does not count.
    pub(crate) fn added(&self, client: u64, staleness: Option<u64>) -> f64 {
        let next = staleness.map(|staleness| u32::from(bounded(staleness)));
        let oldest = self.oldest().filter(|_| next.is_some());
        let (mut sums, mut is_new) = (Sums::default(), true);
        for (place, sender) in self.senders.iter().enumerate() {
            let (mut gradients, mut staleness) = (u32::from(sender.gradients), u32::from(sender.staleness));
            if let Some((_, left)) = oldest.filter(|(left, _)| usize::from(*left) == place) {
                gradients -= 1;
                staleness -= u32::from(left);
            }
            if let Some(next) = next.filter(|_| sender.client == client) {
                gradients += 1;
                staleness += next;
                is_new = false;
            }
            sums.add(gradients, staleness);
        }
        if let Some(next) = next.filter(|_| is_new) {
            sums.add(1, next);
        }
        sums.added()
    }

    /// Notes an applied gradient.
    pub(crate) fn note(&mut self, client: u64, staleness: u64) {
        if let Some((place, staleness)) = self.oldest() {
            self.gradients.pop_front();
            let sender = &mut self.senders[usize::from(place)];
            sender.gradients -= 1;
            sender.staleness -= u16::from(staleness);
        }
        let staleness = bounded(staleness);
        let place = self.place(client);
        let sender = &mut self.senders[place];
        sender.gradients += 1;
        sender.staleness += u16::from(staleness);
        self.gradients.push_back((place as u8, staleness));
    }

    /// The place of a client among the senders, at most one per gradient.
    fn place(&mut self, client: u64) -> usize {
        let (known, free) = (|s: &Sender| s.client == client, |s: &Sender| s.gradients == 0);
        if let Some(place) = self.senders.iter().position(known) {
            return place;
        }
        let sender = Sender { client, gradients: 0, staleness: 0 };
        if let Some(place) = self.senders.iter().position(free) {
            self.senders[place] = sender;
            return place;
        }
        self.senders.push(sender);
        self.senders.len() - 1
    }

    /// The gradients, the oldest first.
    pub(crate) fn image(&self) -> Vec<Gradient> {
        let gradient = |(place, staleness): &(u8, u8)| (self.senders[usize::from(*place)].client, *staleness);
        self.gradients.iter().map(gradient).collect()
    }
}

fn bounded(staleness: u64) -> u8 {
    staleness.min(LARGEST) as u8
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// The rule as the header states it.
    fn reference(all: &[(u64, u64)]) -> f64 {
        let last = &all[all.len().saturating_sub(64)..];
        let mut clients: Vec<u64> = last.iter().map(|(client, _)| *client).collect();
        clients.sort_unstable();
        clients.dedup();
        let of = |client| last.iter().filter(move |(sender, _)| *sender == client);
        let staleness = |client| of(client).map(|(_, tau)| (*tau).min(64)).sum::<u64>();
        let (weighted, pairs) = clients.iter().fold((0, 0), |(weighted, pairs), client| {
            let count = of(*client).count() as u64;
            (weighted + count * staleness(*client), pairs + count * (count - 1))
        });
        let others = (clients.len() - 1) as f64;
        match clients.iter().map(|client| staleness(*client)).sum::<u64>() {
            0 => 0.0,
            _ if pairs == 0 => others,
            _ => others.min(weighted as f64 / pairs as f64),
        }
    }

    proptest! {
        #[test]
        fn equals_the_rule_at_each_gradient(
            gradients in proptest::collection::vec((0..12_u64, prop_oneof![Just(0_u64), 0..90_u64]), 1..300),
            narrow in 1..12_u64,
        ) {
            let mut asynchrony = Asynchrony::new();
            let gradients: Vec<_> = gradients.into_iter().map(|(client, tau)| (client % narrow, tau)).collect();
            for (n, (client, tau)) in gradients.iter().enumerate() {
                let expected = reference(&gradients[..=n]);
                prop_assert_eq!(asynchrony.added(*client, Some(*tau)).to_bits(), expected.to_bits());
                asynchrony.note(*client, *tau);
                prop_assert_eq!(asynchrony.added(*client, None).to_bits(), expected.to_bits());
                let image = asynchrony.image();
                let mut again = Asynchrony::new();
                for (client, tau) in &image {
                    again.note(*client, (*tau).into());
                }
                prop_assert_eq!(again.image(), image);
                prop_assert_eq!(again.added(*client, Some(1)), asynchrony.added(*client, Some(1)));
            }
            prop_assert!(asynchrony.senders.len() <= 64);
        }
    }

    /// What it adds, gradient by gradient, for clients that push in this order and fetch after each push.
    fn added(order: impl Iterator<Item = u64>) -> Vec<f64> {
        let (mut asynchrony, mut fetched) = (Asynchrony::new(), std::collections::HashMap::new());
        let step = |(now, client): (u64, u64)| {
            let tau = now - fetched.insert(client, now + 1).unwrap_or(0);
            let added = asynchrony.added(client, Some(tau));
            asynchrony.note(client, tau);
            added
        };
        (0..).zip(order).map(step).collect()
    }

    #[test]
    fn equal_workers_add_their_number() {
        for workers in [1, 2, 3, 8, 16] {
            let found = added((0..200).map(|n| n % workers));
            assert!(found[workers as usize..].iter().all(|s| *s == (workers - 1) as f64), "{found:?}");
        }
    }

    #[test]
    fn a_worker_beside_sleepers_is_alone_after_64_gradients() {
        let found = added((0..10).chain(std::iter::repeat_n(0, 100)));
        assert_eq!(found[9], 9.0);
        assert!(found[11] > 0.0);
        assert!(found[74..].iter().all(|s| *s == 0.0), "{found:?}");
    }
}
