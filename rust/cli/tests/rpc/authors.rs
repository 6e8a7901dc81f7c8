//! The two native clients of fault tests: the first pushes Float32, the second 1-bit with error feedback.
//! Proxies stand between them and the 3 shards, and a third client sees the truth.

use crate::cluster::Cluster;
use crate::ledger::{self, Ledger, PATIENT, Part, SLICE, TENSORS, Tensor, gradient, until};
use crate::proxy::Proxies;
use fastps_client::{Client, ConnectOptions};
use fastps_core::codec::{Codec, ErrorFeedback};
use fastps_core::error::Kind;
use fastps_core::verbs::{Fate, Gradient, ParameterServer, PushError, PushOptions, Pushed, Ticket};
use fastps_server::ServerConfig;
use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, Mutex};
use std::time::Duration;

/// One push: its gradients, and what they say of each slice, the residual included.
pub(crate) struct Sent {
    pub(crate) gradients: Vec<Gradient>,
    pub(crate) values: BTreeMap<Part, f32>,
}

pub(crate) struct Author {
    pub(crate) client: Arc<Client>,
    pub(crate) number: usize,
    feedback: Option<Arc<Mutex<ErrorFeedback>>>,
    round: usize,
    /// What the residuals hold.
    owed: HashMap<Part, f32>,
}

impl Author {
    fn new(client: Arc<Client>, number: usize) -> Self {
        let feedback = (number == 1).then(|| Arc::new(Mutex::new(ErrorFeedback::new())));
        Self { client, number, feedback, round: 0, owed: HashMap::new() }
    }

    /// The next push to those of its tensors.
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
        PushOptions { codec, feedback, timeout, ..PushOptions::default() }
    }

    /// Pushes everything and enters it; it must succeed.
    pub(crate) fn push(&mut self, ledger: &Ledger) {
        let sent = self.next(|_| true);
        let pushed = self.client.push(&sent.gradients, &self.options(PATIENT));
        assert!(pushed.is_ok(), "{pushed:?}");
        self.enter(ledger, &sent, &pushed);
    }

    /// Enters what became of a push, once nothing of it is in doubt; nothing may be unknown.
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
        // What is not finite is never sent, nor kept for later.
        let never = partial.refused.iter().filter(|(_, _, error)| error.kind == Kind::NonFinite);
        let never: Vec<_> = never.map(|(name, elements, _)| part(name, elements.start)).collect();
        for doubt in &partial.in_doubt {
            let fate = doubt.result(PATIENT).unwrap();
            assert!(fate != Fate::Unknown, "{doubt:?}");
            applied.insert(part(doubt.tensor(), doubt.elements().start), fate != Fate::Fenced);
        }
        assert!(applied.keys().eq(sent.values.keys()), "each slice is told of");
        for (part, value) in &sent.values {
            if applied[part] {
                ledger.enter(*part, *value);
            } else if self.feedback.is_some() && !never.contains(part) {
                self.owed.insert(*part, *value);
            }
        }
    }
}

/// Three shards, two authors, the truth.
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
            // An answer from everywhere: all its streams are open before anything goes wrong.
            ledger::pull(&*client, TENSORS.iter().map(|tensor| tensor.name.clone()).collect());
            Author::new(client, number)
        };
        let authors = (0..2).map(author).collect();
        Self { authors, proxies, cluster: Some(cluster), truth, ledger: Ledger::new() }
    }

    pub(crate) fn cluster(&self) -> &Cluster {
        self.cluster.as_ref().unwrap()
    }

    /// Both push once more, and everything is as acknowledged.
    pub(crate) fn go_on(&mut self) {
        self.authors.iter_mut().for_each(|author| author.push(&self.ledger));
        self.ledger.check(&*self.truth);
    }

    /// Loses the answers from now on. Both push; all of it has arrived, which is entered, and nobody was
    /// told.
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

    /// Ends the connections; new ones work.
    pub(crate) fn reconnect(&self) {
        self.proxies.set_down(true);
        self.proxies.set_deaf(false);
        self.proxies.set_down(false);
    }
}

pub(crate) fn connect(addresses: &[String]) -> Arc<Client> {
    Client::connect(addresses, ConnectOptions { timeout: PATIENT, ..ConnectOptions::default() }).unwrap()
}
