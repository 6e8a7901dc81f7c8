//! Channels for unary calls: a client's to its servers, and a server's to shard 0.

use crate::socket::Socket;
use crate::tls::{self, ClientTls};
use crate::unix;
use fastps_core::error::{Error, Kind, Result};
use hyper_util::rt::TokioIo;
use std::time::Duration;
use tonic::transport::{Channel, Endpoint};

/// A channel that connects at its first call, and again whenever its connection has broken.
pub fn channel(address: &str, tls: Option<&ClientTls>) -> Result<Channel> {
    let fail = |e| {
        Error::new(Kind::Config, format!("invalid address {address:?}: {e}"))
            .expected("host:port or unix:///path", address)
    };
    let endpoint = Endpoint::from_shared(format!("{}://{}", tls::scheme(tls), unix::authority(address)))
        .map_err(fail)?
        .max_frame_size(1 << 20)
        .initial_connection_window_size(16 << 20)
        .initial_stream_window_size(4 << 20)
        .tcp_nodelay(true)
        .tcp_keepalive(Some(Duration::from_secs(30)))
        .http2_keep_alive_interval(Duration::from_secs(5))
        .keep_alive_timeout(Duration::from_secs(5))
        .keep_alive_while_idle(true)
        .connect_timeout(Duration::from_secs(5));
    if tls.is_none() && unix::path(address).is_none() {
        return Ok(endpoint.connect_lazy());
    }
    let (tls, address) = (tls.cloned(), address.to_owned());
    Ok(endpoint.connect_with_connector_lazy(tower::service_fn(move |_| {
        let (tls, address) = (tls.clone(), address.clone());
        async move { Socket::reach(&address, tls.as_ref()).await.map(TokioIo::new) }
    })))
}
