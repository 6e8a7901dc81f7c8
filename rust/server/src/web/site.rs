//! The state that all connections of the web listener share.

use super::Subject;
use super::hosts::Hosts;
use crate::auth::rate::Limiter;
use fastps_transport::tls::ServerTls;
use std::sync::Arc;

/// Failed handshakes that are logged at once, and then each second.
const LOG_BURST: u32 = 8;
const LOGS_PER_SECOND: u32 = 1;

/// Shared by all connections of a listener.
#[derive(Debug)]
pub(super) struct Site {
    pub(super) hosts: Hosts,
    pub(super) subject: Arc<Subject>,
    pub(super) tls: Option<ServerTls>,
    /// Rate of logged handshakes that failed.
    pub(super) log: Limiter,
}

impl Site {
    pub(super) fn new(hosts: Hosts, subject: Arc<Subject>, tls: Option<ServerTls>) -> Self {
        Self { hosts, subject, tls, log: Limiter::new(LOG_BURST, LOGS_PER_SECOND) }
    }
}
