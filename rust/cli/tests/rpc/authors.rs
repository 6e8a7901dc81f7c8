//! The two native clients of fault tests: one pushes Float32, the other 1-bit with error feedback. They reach
//! the 3 shards through proxies; a third client reads the shards directly.

use crate::cluster::Cluster;
use crate::ledger::{self, Ledger, PATIENT, Part, SLICE, TENSORS, Tensor, gradient, until};
use crate::proxy::Proxies;
use fastps_client::{Client, ConnectOptions};
use fastps_core::codec::{Codec, ErrorFeedback};
use fastps_core::error::Kind;
use fastps_core::verbs::prelude::*;
use fastps_core::verbs::{Fate, Gradient, PushError, PushOptions, Pushed, Ticket};
use fastps_server::ServerConfig;
use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, Mutex};
use std::time::Duration;

/// One push: its gradients, and the value of each slice with the residual added.
pub(crate) struct Sent {
    pub(crate) gradients: Vec<Gradient>,
    pub(crate) values: BTreeMap<Part, f32>,
}

pub(crate) struct Author {
    pub(crate) client: Arc<Client>,
    pub(crate) number: usize,
    feedback: Option<Arc<Mutex<ErrorFeedback>>>,
    round: usize,
    /// The value of each residual.
    owed: HashMap<Part, f32>,
}

impl Author {
    fn new(client: Arc<Client>, number: usize) -> Self {
        let feedback = (number == 1).then(|| Arc::new(Mutex::new(ErrorFeedback::new())));
        Self { client, number, feedback, round: 0, owed: HashMap::new() }
    }

    /// The next push, to the tensors of this client for which `which` holds.
    pub(crate) fn next(&mut self, which: impl Fn(&Tensor) -> bool) -> Sent {
        self.round += 1;
        let (mut gradients, mut values) = (Vec::new(), BTreeMap::new());
        for (k, tensor) in TENSORS.iter().enumerate() {
            if !tensor.is_pushed_by(self.number) || !which(tensor) {
                continue;
            }
            let value = tensor.gradient(self.round);
            gradients.push(gradient(&tensor.name, vec![value; tensor.elements]));
            for (slice, _) in tensor.slices().enumerate() {
                values.insert((k, slice), value + self.owed.remove(&(k, slice)).unwrap_or_default());
            }
        }
        Sent { gradients, values }
    }

    pub(crate) fn options(&self, timeout: Duration) -> PushOptions {
        let codec = if self.feedback.is_some() { Codec::OneBit } else { Codec::Float32 };
        let feedback = self.feedback.clone();
        PushOptions { codec: Some(codec), feedback, timeout, ..PushOptions::default() }
    }

    /// Pushes to all tensors and records it in the ledger. The push must succeed.
    pub(crate) fn push(&mut self, ledger: &Ledger) {
        let sent = self.next(|_| true);
        let pushed = self.client.push(&sent.gradients, &self.options(PATIENT));
        assert!(pushed.is_ok(), "{pushed:?}");
        self.enter(ledger, &sent, &pushed);
    }

    /// Records the outcome of a push, once no slice is in doubt; none may be unknown.
    pub(crate) fn enter(&mut self, ledger: &Ledger, sent: &Sent, pushed: &Pushed) {
        let partial = match pushed {
            Ok(_) => return sent.values.iter().for_each(|(part, value)| ledger.enter(*part, *value)),
            Err(PushError::Refused(error)) => panic!("{error}"),
            Err(PushError::Partial(partial)) => partial,
        };
        let part = |name: &str, first: usize| (Tensor::named(name), first / SLICE);
        let mut applied: BTreeMap<Part, bool> = BTreeMap::new();
        for (name, _) in &partial.receipts {
            let slices = TENSORS[Tensor::named(name)].slices();
            applied.extend(slices.map(|elements| (part(name, elements.start), true)));
        }
        applied.extend(partial.applied.iter().map(|(name, elements, _)| (part(name, elements.start), true)));
        applied.extend(partial.refused.iter().map(|(name, elements, _)| (part(name, elements.start), false)));
        // Values that are not finite are neither sent nor kept for later.
        let never = partial.refused.iter().filter(|(_, _, error)| error.kind == Kind::NonFinite);
        let never: Vec<_> = never.map(|(name, elements, _)| part(name, elements.start)).collect();
        for doubt in &partial.in_doubt {
            let fate = doubt.result(PATIENT).unwrap();
            assert!(fate != Fate::Unknown, "{doubt:?}");
            applied.insert(part(doubt.tensor(), doubt.elements().start), fate != Fate::Fenced);
        }
        assert!(applied.keys().eq(sent.values.keys()), "each slice has an outcome");
        for (part, value) in &sent.values {
            if applied[part] {
                ledger.enter(*part, *value);
            } else if self.feedback.is_some() && !never.contains(part) {
                self.owed.insert(*part, *value);
            }
        }
    }
}

/// Three shards, two authors, and the client that reads the shards directly.
pub(crate) struct World {
    pub(crate) proxies: Proxies,
    pub(crate) cluster: Option<Cluster>,
    pub(crate) authors: Vec<Author>,
    pub(crate) truth: Arc<Client>,
    pub(crate) ledger: Ledger,
}

impl World {
    pub(crate) fn start(change: impl FnOnce(&mut ServerConfig)) -> Self {
        let cluster = Cluster::of(3, change);
        let proxies = Proxies::start(&cluster.addresses(), 1);
        let truth = connect(&cluster.addresses());
        Ledger::register(&*truth);
        assert!((0..3).all(|shard| cluster.counter(shard, "slices") > 10), "all shards take part");
        let author = |number| {
            let client = connect(&proxies.addresses());
            // An answer from every shard: all streams are open before the first fault.
            ledger::pull(&*client, TENSORS.iter().map(|tensor| tensor.name.clone()).collect());
            Author::new(client, number)
        };
        let authors = (0..2).map(author).collect();
        Self { authors, proxies, cluster: Some(cluster), truth, ledger: Ledger::new() }
    }

    /// New clients, of servers that have nothing.
    pub(crate) fn begin_again(&mut self) {
        self.truth = connect(&self.cluster().addresses());
        Ledger::register(&*self.truth);
        let addresses = self.proxies.addresses();
        self.authors = (0..2).map(|number| Author::new(connect(&addresses), number)).collect();
        self.ledger = Ledger::new();
    }

    pub(crate) fn cluster(&self) -> &Cluster {
        self.cluster.as_ref().unwrap()
    }

    /// Both authors push once more; the servers must match the ledger.
    pub(crate) fn go_on(&mut self) {
        self.authors.iter_mut().for_each(|author| author.push(&self.ledger));
        self.ledger.check(&*self.truth);
    }

    /// Drops all answers from now on. Both authors push; the ledger records their pushes, which have arrived
    /// without an answer.
    pub(crate) fn unanswered(
        &mut self,
        which: impl Fn(&Tensor) -> bool,
        timeout: Duration,
    ) -> Vec<(Sent, Arc<dyn Ticket<Pushed>>)> {
        self.proxies.set_deaf(true);
        let mut pushes: Vec<(Sent, Arc<dyn Ticket<Pushed>>)> = Vec::new();
        for author in &mut self.authors {
            let sent = author.next(&which);
            let push = author.client.push_async(sent.gradients.clone(), author.options(timeout)).unwrap();
            sent.values.iter().for_each(|(part, value)| self.ledger.enter(*part, *value));
            pushes.push((sent, push));
        }
        until("the pushes arrive", || self.ledger.difference(&*self.truth).is_none());
        assert!(pushes.iter().all(|(_, push)| !push.is_done()));
        pushes
    }

    /// Ends all connections; new ones work.
    pub(crate) fn reconnect(&self) {
        self.proxies.set_down(true);
        self.proxies.set_deaf(false);
        self.proxies.set_down(false);
    }
}

pub(crate) fn connect(addresses: &[String]) -> Arc<Client> {
    Client::connect(addresses, ConnectOptions { timeout: PATIENT, ..ConnectOptions::default() }).unwrap()
}
