//! Calls to the other servers of a cluster.

use fastps_core::error::{Error, Kind, Result};
use fastps_proto::MAX_MESSAGE_BYTES;
use fastps_proto::v1::control_client::ControlClient;
use fastps_transport::bearer::Bearer;
use fastps_transport::tls::ClientTls;
use fastps_transport::{channel, convert};
use std::time::Duration;
use tonic::transport::Channel;
use tonic::{Request, Response, Status};

/// Timeout of a call to another server.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(5);

/// TLS and token for calls to the other servers.
#[derive(Clone, Debug, Default)]
pub(crate) struct Peers {
    /// TLS, if this server has it.
    pub(crate) tls: Option<ClientTls>,
    /// The token of this server.
    pub(crate) bearer: Bearer,
}

impl Peers {
    /// A connection to a server.
    pub(crate) fn channel(&self, address: &str) -> Result<Channel> {
        self.bearer.check_address(address, self.tls.is_some())?;
        channel(address, self.tls.as_ref())
    }

    /// One call.
    pub(crate) async fn call<Q, A>(
        &self,
        channel: Channel,
        address: &str,
        message: Q,
        send: impl AsyncFnOnce(ControlClient<Channel>, Request<Q>) -> Result<Response<A>, Status>,
    ) -> Result<A> {
        let control = ControlClient::new(channel).max_decoding_message_size(MAX_MESSAGE_BYTES);
        let mut request = Request::new(message);
        request.set_timeout(ANSWER_TIMEOUT);
        if let Err(error) = self.bearer.refresh() {
            tracing::warn!(%error, "the last token of this server stays in use");
        }
        self.bearer.sign(request.metadata_mut().as_mut());
        let late = |_| Error::new(Kind::Deadline, format!("{address} did not answer in time"));
        let answer = tokio::time::timeout(ANSWER_TIMEOUT, send(control, request)).await.map_err(late)?;
        answer.map(Response::into_inner).map_err(|status| {
            let mut error = convert::error_from_status(&status);
            error.message = format!("{address}: {}", error.message);
            error
        })
    }
}
