//! Leases portions of samples from shard 0.

use crate::client::Client;
use crate::link::unary::{call, request};
use crate::state::time::after;
use fastps_core::error::Result;
use fastps_core::portions::{Ask, PortionAnswer};
use fastps_proto::v1 as pb;
use fastps_transport::convert::{self, Retry, retry};
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

/// How long to wait for a link's new session.
const SESSION_RENEWAL_PAUSE: Duration = Duration::from_millis(100);
/// Limit on a closing client's notice to its servers.
const LEAVE_TIMEOUT: Duration = Duration::from_secs(5);
/// The limit for a client without a connection.
const DISCONNECTED_LEAVE_TIMEOUT: Duration = Duration::from_millis(500);

impl Client {
    /// Asks; the server may delay the answer for `wait`, and half of the time that is left.
    pub(crate) fn ask_for_portion(
        &self,
        ask: &Ask,
        wait: Duration,
        timeout: Duration,
    ) -> Result<PortionAnswer> {
        self.alive()?;
        self.has_portions.store(true, Ordering::Relaxed);
        let (link, mut ask, deadline) = (self.links[0].clone(), ask.clone(), after(timeout));
        ask.samples.name = self.map.run().there(&ask.samples.name).into();
        self.block(async move {
            loop {
                let answer = call(&link, deadline, |mut client, left| {
                    let ask = convert::ask_to_wire(&ask, link.client(), wait.min(left / 2));
                    async move { client.portion(request(ask, left)).await }
                });
                match answer.await {
                    // The session ended while we were suspended; the link is about to open a new one.
                    Err(error)
                        if retry(error.kind) == Retry::Session
                            && Instant::now() + SESSION_RENEWAL_PAUSE < deadline =>
                    {
                        tokio::time::sleep(SESSION_RENEWAL_PAUSE).await;
                    }
                    answer => return answer.map(convert::given_from_wire),
                }
            }
        })
    }

    /// Returns the portions and seats of this client's workers and replicas at once; an unreachable server
    /// frees them when the lease expires.
    pub(crate) fn leave_portions(&self, within: Duration) {
        if self.alive().is_err() || !self.has_portions.swap(false, Ordering::Relaxed) {
            return;
        }
        let link = self.links[0].clone();
        let longest = if link.is_connected() { LEAVE_TIMEOUT } else { DISCONNECTED_LEAVE_TIMEOUT };
        let deadline = after(longest.min(self.options.timeout).min(within));
        let _ = self.block(async move {
            call(&link, deadline, |mut client, left| {
                let then = pb::PortionThen::Leave.into();
                let leave = pb::PortionRequest { client: link.client(), then, ..Default::default() };
                async move { client.portion(request(leave, left)).await }
            })
            .await
        });
    }
}
