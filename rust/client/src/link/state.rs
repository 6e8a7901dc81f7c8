//! The state of the link to one shard.
//!
//! A frame keeps its tag, and an identified one its identity, over all connections. It leaves the queue
//! exactly once: when it is answered, or when its call abandons it. An identified frame that was sent and
//! abandoned leaves a doubt behind, and a question about it joins the end of the queue.

use crate::link::queue::Queue;
use crate::link::route::ServerRoute;
use crate::state::runtime::{Driver, lock};
use crate::state::shared::Shared;
use crate::state::waiting::{self, WaitsFor};
use fastps_core::error::{Error, Kind, Result};
use fastps_core::tensor::SliceId;
use fastps_proto::v1 as pb;
use fastps_transport::addressee::Addressee;
use fastps_transport::convert;
use fastps_transport::loopback::is_loopback;
use std::fmt;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, Weak};
use std::time::{Duration, Instant};
use tokio::sync::{Notify, watch};
use tonic::transport::Channel;

/// The link to one shard.
pub(crate) struct Link {
    pub(crate) shard: u32,
    /// Shards of its cluster.
    pub(crate) shards: usize,
    /// Set when payloads carry a CRC-32C.
    checksums: AtomicBool,
    /// Channel for control calls; a closed link has none, so that the connection ends.
    pub(crate) channel: Mutex<Option<Channel>>,
    pub(crate) lease: Duration,
    /// Identity of the cluster; 0 until the server reports it.
    pub(crate) cluster_id: AtomicU64,
    /// The latest term of an owner of the shard that the client has met; 0: its servers have none.
    pub(crate) term: AtomicU64,
    /// Set when the server is not the one that the client met first.
    pub(crate) restarted: AtomicBool,
    /// Set when the server matches momentum by staleness.
    pub(crate) matches: AtomicBool,
    /// Set when the server ends versions by a quorum and a grace, and weighs their gradients.
    pub(crate) rounds: AtomicBool,
    /// Digest of the list of shards in the last hello that had one; 0: the server tells none.
    pub(crate) listed: AtomicU64,
    /// Set when the server's tensors keep averages.
    pub(crate) dtypes: AtomicBool,
    /// Set when the server answers pulls in bfloat16.
    pub(crate) pull_codec: AtomicBool,
    /// Set when the server keeps history.
    pub(crate) history: AtomicBool,
    /// Set when the server takes several whole slices in one message.
    pub(crate) parts: AtomicBool,
    /// Set when the server takes the initial values of several slices in one message.
    pub(crate) initial_parts: AtomicBool,
    /// Set when the server's calls register several tensors at a time.
    pub(crate) registrations: AtomicBool,
    pub(crate) driver: Weak<Driver>,
    route: Mutex<Arc<ServerRoute>>,
    pub(crate) shared: Arc<Shared>,
    pub(crate) queue: Mutex<Queue>,
    /// Signals the driver that the link was closed or that its lease is lost.
    pub(crate) changed: Notify,
    /// Outcome of the first attempt to connect.
    first: watch::Sender<Option<Result<()>>>,
}

impl Link {
    pub(crate) fn new(
        shared: Arc<Shared>,
        channel: Channel,
        client: u64,
        hello: &pb::HelloResponse,
        driver: &Arc<Driver>,
        route: ServerRoute,
    ) -> Arc<Self> {
        let queue = Queue::new(client, hello.server);
        route.note(hello);
        Arc::new(Self {
            shard: hello.shard,
            shards: hello.cluster.len(),
            checksums: AtomicBool::new(has_checksums(&shared, &route)),
            channel: Mutex::new(Some(channel)),
            lease: Duration::from_millis(u64::from(hello.lease_ms.max(300))),
            cluster_id: AtomicU64::new(hello.cluster_id),
            term: AtomicU64::new(hello.term),
            restarted: AtomicBool::new(false),
            matches: AtomicBool::new(convert::can(hello, convert::MATCHES_STALENESS)),
            rounds: AtomicBool::new(convert::can(hello, convert::ROUNDS)),
            listed: AtomicU64::new(hello.cluster_digest),
            dtypes: AtomicBool::new(convert::can(hello, convert::DTYPES)),
            pull_codec: AtomicBool::new(convert::can(hello, convert::PULL_CODEC)),
            history: AtomicBool::new(convert::can(hello, convert::HISTORY)),
            parts: AtomicBool::new(convert::can(hello, convert::PARTS)),
            initial_parts: AtomicBool::new(convert::can(hello, convert::INITIAL_PARTS)),
            registrations: AtomicBool::new(convert::can(hello, convert::REGISTRATIONS)),
            driver: Arc::downgrade(driver),
            route: Mutex::new(Arc::new(route)),
            shared,
            queue: Mutex::new(queue),
            changed: Notify::new(),
            first: watch::Sender::new(None),
        })
    }

    /// Notes the outcome of an attempt to connect.
    pub(crate) fn note_attempt(&self, error: Option<&Error>) {
        self.first.send_if_modified(|first| {
            let is_first = first.is_none();
            first.get_or_insert_with(|| error.cloned().map_or(Ok(()), Err));
            is_first
        });
    }

    /// Waits for the first attempt to connect. Fails if it has hit a limit, which others would hit, too;
    /// other failures are retried.
    pub(crate) async fn begun(&self, deadline: Instant) -> Result<()> {
        let mut first = self.first.subscribe();
        let tried = tokio::time::timeout_at(deadline.into(), first.wait_for(Option::is_some)).await;
        match tried.ok().and_then(|first| first.ok()?.clone()) {
            Some(Err(mut error)) if error.kind == Kind::Capacity => {
                error.message = format!("cannot connect to {}: {}", self.address(), error.message);
                Err(error.shard(self.shard))
            }
            _ => Ok(()),
        }
    }

    pub(crate) fn shard(&self) -> u32 {
        self.shard
    }

    /// This link's incarnation.
    pub(crate) fn client(&self) -> u64 {
        lock(&self.queue).client
    }

    /// The shard's present address.
    pub(crate) fn address(&self) -> String {
        lock(&self.route).address.clone()
    }

    /// The route to that address.
    pub(crate) fn route(&self) -> Arc<ServerRoute> {
        lock(&self.route).clone()
    }

    pub(crate) fn has_checksums(&self) -> bool {
        self.checksums.load(Ordering::Relaxed)
    }

    /// Follows the shard to another address.
    pub(crate) fn move_to(&self, address: String, channel: Channel) {
        let route = self.route().at(address);
        self.checksums.store(has_checksums(&self.shared, &route), Ordering::Relaxed);
        *lock(&self.route) = Arc::new(route);
        // A closed link has none.
        if let Some(present) = &mut *lock(&self.channel) {
            *present = channel;
        }
    }

    pub(crate) fn channel(&self) -> Result<Channel> {
        lock(&self.channel).clone().ok_or_else(|| self.closed())
    }

    /// Error of every call on the closed link.
    pub(crate) fn closed(&self) -> Error {
        self.shared.fence.error().cloned().unwrap_or_else(closed)
    }

    /// Addressee of calls.
    pub(crate) fn addressee(&self) -> Addressee {
        Addressee { cluster_id: self.cluster_id.load(Ordering::Acquire), shard: self.shard }
    }

    pub(crate) fn is_closed(&self) -> bool {
        lock(&self.queue).closed
    }

    /// Forgets a slice that is gone.
    pub(crate) fn forget(&self, slice: SliceId) {
        lock(&self.queue).slices.remove(&slice.0);
    }

    /// Returns whether any frame waits to be sent or answered.
    pub(crate) fn has_frames(&self) -> bool {
        !lock(&self.queue).frames.is_empty()
    }

    /// Returns whether it has a connection, as far as known.
    pub(crate) fn is_connected(&self) -> bool {
        lock(&self.queue).session != 0
    }

    /// Returns whether the present session must end to release a caller's memory.
    pub(crate) fn is_recalled(&self) -> bool {
        lock(&self.queue).recalled
    }

    /// Ends the current session, which releases unsent payloads; the next session sends what is unanswered.
    pub(crate) fn recall(&self) {
        let mut queue = lock(&self.queue);
        if queue.session != 0 && !std::mem::replace(&mut queue.recalled, true) {
            self.changed.notify_one();
        }
    }

    /// The server's incarnation, from its hello.
    pub(crate) fn server(&self) -> u64 {
        lock(&self.queue).server
    }

    /// Wakes the driver for a new incarnation once the last frame under a lost one is answered.
    pub(crate) fn check_drained(&self, queue: &Queue) {
        if queue.is_drained() {
            self.changed.notify_one();
        }
    }

    /// Handles a server that does not know this incarnation.
    pub(crate) fn lease_is_lost(&self, client: u64) {
        let mut queue = lock(&self.queue);
        if queue.client == client {
            queue.lease_lost = true;
            self.check_drained(&queue);
        }
    }

    /// Returns whether the present session must end because its lease is lost.
    pub(crate) fn is_drained(&self) -> bool {
        lock(&self.queue).is_drained()
    }

    /// Reason why a tensor is gone, as far as known.
    pub(crate) fn gone(&self, name: &str) -> String {
        if self.restarted.load(Ordering::Relaxed) {
            format!("the server restarted, and its data directory has no tensor {name:?}")
        } else {
            format!("tensor {name:?} is no longer registered")
        }
    }

    /// Returns whether a call that failed in this way may succeed at another address.
    pub(crate) fn may_move(&self, error: &Error) -> bool {
        let elsewhere =
            error.kind == Kind::Precondition && error.shard.is_some_and(|shard| shard != self.shard);
        self.shared.resolution.is_some() && (error.kind == Kind::Fenced || elsewhere)
    }

    /// Adds the resolver's trouble to the reason for a missing connection.
    pub(crate) fn in_trouble(&self, why: &str) -> String {
        match self.shared.resolution.as_ref().and_then(|resolution| resolution.trouble()) {
            Some(trouble) => format!("{why}; {trouble}"),
            None => why.to_owned(),
        }
    }

    /// Reason for the wait of an unanswered frame.
    pub(crate) fn waits_for(&self) -> (WaitsFor, String) {
        let queue = lock(&self.queue);
        if queue.session == 0 {
            return waiting::server(&self.address(), queue.last_error.as_ref().map(|error| &*error.message));
        }
        let text = format!("waiting for an answer of shard {} at {}", self.shard, self.address());
        (WaitsFor::Answer, text)
    }
}

/// Returns whether payloads on a route carry a CRC-32C.
fn has_checksums(shared: &Shared, route: &ServerRoute) -> bool {
    shared.checksums.unwrap_or_else(|| route.tls().is_none() && !is_loopback(&route.address))
}

/// Error of every call on a closed client.
pub(crate) fn closed() -> Error {
    Error::new(Kind::Connection, "this client is closed")
}

impl fmt::Debug for Link {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Link")
            .field("shard", &self.shard)
            .field("address", &self.address())
            .finish_non_exhaustive()
    }
}
