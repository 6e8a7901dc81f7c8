//! The peer of a connection, as the handlers know it.

pub(crate) mod ending;
pub(crate) mod unauthenticated;

use crate::auth::principal::Principal;
use crate::auth::rate::Limiter;
use ending::Ending;
use fastps_core::error::{Error, Kind, Result};
use fastps_transport::Medium;
use fastps_transport::memory_budget::MemoryBudget;
use http_body_util::BodyExt;
use std::net::IpAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;
use tokio::sync::Semaphore;
use tonic::body::Body;
use unauthenticated::{Unauthenticated, UnauthenticatedPlace};

/// Slices that one connection may keep pinned: answers that are not encoded yet. One that lends may have as
/// many as it can lend.
pub(crate) const MAX_PINS: usize = 2;
/// Sessions that one connection may begin at once, and then per second.
const HELLO_BURST: u32 = 256;
const HELLOS_PER_SECOND: u32 = 64;

/// Facts about a connection that its handlers use.
#[derive(Clone, Debug)]
pub(crate) struct Peer {
    /// The principal that its certificate names.
    pub(crate) certificate: Option<Arc<Principal>>,
    /// Its address; `None`: through a Unix socket.
    pub(crate) address: Option<IpAddr>,
    pub(crate) pins: Arc<Semaphore>,
    pub(crate) budget: Arc<MemoryBudget>,
    pub(crate) medium: Medium,
    /// For sessions that it begins.
    pub(crate) hellos: Arc<Limiter>,
    /// Ends the connection.
    pub(crate) ending: Arc<Ending>,
    /// Set once it has been answered as by the owner of the shard.
    answered: Arc<AtomicBool>,
    /// Its place among those whose callers are unknown, if the server asks who calls.
    unauthenticated: Option<Arc<UnauthenticatedPlace>>,
}

impl Peer {
    pub(crate) fn new(
        budget: Arc<MemoryBudget>,
        certificate: Option<Arc<Principal>>,
        (medium, address): (Medium, Option<IpAddr>),
    ) -> Self {
        let (pins, hellos) =
            (Arc::new(Semaphore::new(MAX_PINS)), Arc::new(Limiter::new(HELLO_BURST, HELLOS_PER_SECOND)));
        Self {
            certificate,
            address,
            pins,
            budget,
            medium,
            hellos,
            ending: Arc::default(),
            answered: Arc::default(),
            unauthenticated: None,
        }
    }

    /// Takes a place among those whose callers are unknown, until one is known.
    pub(crate) fn await_authentication(&mut self, table: &Arc<Unauthenticated>) {
        self.unauthenticated = Some(Arc::new(table.enter(self.address, &self.ending, Instant::now())));
    }

    /// Notes that answers of the shard's owner may be on their way, until the connection ends.
    pub(crate) fn note_answered(&self) {
        self.answered.store(true, Ordering::Relaxed);
    }

    /// Returns whether answers of the shard's owner may be on their way.
    pub(crate) fn is_answered(&self) -> bool {
        self.answered.load(Ordering::Relaxed)
    }

    /// Notes that a caller is known.
    pub(crate) fn authenticated(&self) {
        if let Some(place) = &self.unauthenticated {
            place.leave();
        }
    }

    /// Fails if the connection exceeds its rate of new sessions.
    pub(crate) fn check_hello(&self) -> Result<()> {
        self.hellos.take(Instant::now()).map_err(|wait| {
            Error::new(Kind::Capacity, "the connection opens too many sessions")
                .expected(self.hellos.bounds(), "one more")
                .retry_after_ms(wait.as_millis() as u64 + 1)
        })
    }

    /// Evidence of its callers besides a token.
    pub(crate) fn origin(&self) -> (Option<&Arc<Principal>>, Option<IpAddr>) {
        (self.certificate.as_ref(), self.address)
    }

    /// The peer of a request.
    pub(crate) fn of<T>(request: &tonic::Request<T>) -> Result<Self, tonic::Status> {
        let peer = request.extensions().get::<Self>().cloned();
        peer.ok_or_else(|| tonic::Status::internal("a request without a connection"))
    }

    /// A request whose body keeps its connection from resting: what was received of it may wait there.
    pub(crate) fn keep_busy(request: http::Request<Body>) -> http::Request<Body> {
        let busy = request.extensions().get::<Self>().map(|peer| peer.budget.busy());
        request.map(|body| {
            Body::new(body.map_frame(move |frame| {
                let _ = &busy;
                frame
            }))
        })
    }
}
