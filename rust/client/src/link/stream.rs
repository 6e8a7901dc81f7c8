//! One connection to a shard's data service, and the one stream on it.

use crate::link::route::ServerRoute;
use crate::state::shared::Shared;
use fastps_core::error::{Error, Kind, Result};
use fastps_transport::Socket;
use fastps_transport::convert;
use fastps_transport::tls;
use fastps_transport::unix;
use fastps_transport::wire::{
    Borrower, EXCHANGE_PATH, Framed, MAX_FRAME, MAX_RESET_STREAMS, MAX_UNWRITTEN_BYTES, Messages,
    NATIVE_SETTING, Outbox, Piece, PollCycle, SERVER_HEADER, status,
};
use h2::client::{Builder, Connection};
use http::header::{CONTENT_TYPE, TE};
use http::{HeaderMap, Request};
use std::sync::Arc;
use tonic::{Code, Status};

/// Bytes that the server may send before they are read.
const STREAM_WINDOW: u32 = 4 << 20;
const CONNECTION_WINDOW: u32 = 16 << 20;

/// A stream that the server has accepted. Its owner polls the connection.
pub(crate) struct Stream {
    pub(crate) connection: Connection<Framed<Socket>, Piece>,
    pub(crate) outbox: Outbox,
    pub(crate) messages: Messages,
    /// Maps values in the server's memory.
    pub(crate) borrower: Option<Arc<Borrower>>,
}

impl Stream {
    /// Connects to the server with this incarnation, with the secret and the token of the client.
    pub(crate) async fn open(route: &ServerRoute, server: u64, shared: &Shared) -> Result<Self> {
        let (scheme, authority) = (tls::scheme(route.tls()), unix::authority(&route.address));
        let socket = route.connect(server, &shared.bearer).await?;
        let borrower = socket.borrower();
        let (mut requests, mut connection) = Builder::new()
            .max_frame_size(MAX_FRAME)
            .initial_window_size(STREAM_WINDOW)
            .initial_connection_window_size(CONNECTION_WINDOW)
            .max_header_list_size(NATIVE_SETTING)
            .max_send_buffer_size(MAX_UNWRITTEN_BYTES)
            .max_concurrent_reset_streams(MAX_RESET_STREAMS)
            .enable_push(false)
            .handshake(Framed::new(socket, 0, PollCycle::default()))
            .await
            .map_err(|error| broken(Err(error)))?;
        let mut request = Request::post(format!("{scheme}://{authority}{EXCHANGE_PATH}"))
            .header(CONTENT_TYPE, "application/grpc")
            .header(TE, "trailers")
            .body(())
            .map_err(|error| Error::new(Kind::Internal, format!("a bad request: {error}")))?;
        shared.secret.sign(request.headers_mut());
        shared.bearer.sign(request.headers_mut());
        let (response, stream) = requests.send_request(request, false).map_err(|error| broken(Err(error)))?;
        let response = tokio::select! {
            biased;
            result = &mut connection => return Err(broken(result)),
            response = response => response.map_err(|error| broken(Err(error)))?,
        };
        check(response.headers(), server)?;
        let messages = Messages::new(response.into_body(), None);
        Ok(Self { connection, outbox: Outbox::new(stream, PollCycle::default()), messages, borrower })
    }
}

/// Fails unless the server accepts the stream and is the one that said hello.
fn check(headers: &HeaderMap, server: u64) -> Result<()> {
    if let Some(status) = Status::from_header_map(headers)
        && status.code() != Code::Ok
    {
        return Err(convert::error_from_status(&status));
    }
    let reported = headers.get(SERVER_HEADER).and_then(|value| value.to_str().ok()?.parse::<u64>().ok());
    match reported {
        Some(other) if other != server => {
            Err(Error::new(Kind::Connection, "the server restarted between two calls"))
        }
        // Other implementations may omit it.
        _ => Ok(()),
    }
}

/// Error of a broken connection.
pub(crate) fn broken(result: Result<(), h2::Error>) -> Error {
    match result {
        Ok(()) => Error::new(Kind::Connection, "the server closed the connection"),
        Err(error) => {
            // The peer gives the reason in words.
            let full = error.reason() == Some(h2::Reason::ENHANCE_YOUR_CALM);
            let kind = if full { Kind::Capacity } else { Kind::Connection };
            Error::new(kind, status(&error).message())
        }
    }
}
