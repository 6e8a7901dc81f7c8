//! Pings a silent peer to detect that it is gone.

use h2::{Ping, PingPong};
use std::time::Duration;

/// Pings the peer at intervals; returns when it does not answer within one.
pub async fn keep_alive(pings: Option<PingPong>, every: Duration) {
    let Some(mut pings) = pings else {
        return std::future::pending().await;
    };
    loop {
        tokio::time::sleep(every).await;
        if !matches!(tokio::time::timeout(every, pings.ping(Ping::opaque())).await, Ok(Ok(_))) {
            return;
        }
    }
}
