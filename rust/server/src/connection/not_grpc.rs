//! Answers to probes and browsers that take a shard's port for a web server: 404, with the place of metrics
//! and health. Otherwise a probe would get 200 with a gRPC error inside, or the bytes of HTTP/2.

use crate::connection::reject::linger;
use http::header::CONTENT_TYPE;
use http::{HeaderValue, Method, Request, Response, StatusCode};
use std::pin::Pin;
use std::task::{Context, Poll};
use tokio::io::{AsyncRead, AsyncWrite, AsyncWriteExt};
use tonic::body::Body;
use tower::Service;

const TEXT: &str = "text/plain; charset=utf-8";
const SENTENCE: &str = "this port speaks gRPC: metrics and health are at the address of --web, by default http://127.0.0.1:7069\n";

/// Returns whether a connection that begins with these bytes asks for a page by HTTP/1 (GET or HEAD).
pub(super) fn is_http1(opening: &[u8]) -> bool {
    matches!(opening.first(), Some(b'G' | b'H'))
}

/// Answers a request of HTTP/1, and ends the connection.
pub(super) async fn refuse_http1(io: &mut (impl AsyncRead + AsyncWrite + Unpin), opening: &[u8]) {
    answer_http1(io, opening, "404 Not Found", SENTENCE).await;
}

/// Answers a request of HTTP/1 that begins with these bytes by a status and a line of text, and ends the
/// connection.
pub(crate) async fn answer_http1(
    io: &mut (impl AsyncRead + AsyncWrite + Unpin),
    opening: &[u8],
    status: &str,
    text: &str,
) {
    let length = text.len();
    let body = if opening.starts_with(b"H") { "" } else { text };
    let answer = format!(
        "HTTP/1.1 {status}\r\nContent-Type: {TEXT}\r\nContent-Length: {length}\r\nConnection: close\r\n\r\n{body}"
    );
    // The peer may be gone.
    let _ = io.write_all(answer.as_bytes()).await;
    linger(io).await;
}

/// A service of gRPC, whose calls are all POST.
#[derive(Clone, Debug)]
pub(crate) struct OnlyGrpc<S>(pub(crate) S);

impl<S, Q> Service<Request<Q>> for OnlyGrpc<S>
where
    S: Service<Request<Q>, Response = Response<Body>>,
    S::Future: Send + 'static,
    S::Error: Send + 'static,
{
    type Response = Response<Body>;
    type Error = S::Error;
    type Future = Pin<Box<dyn Future<Output = Result<Response<Body>, S::Error>> + Send>>;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), S::Error>> {
        self.0.poll_ready(cx)
    }

    fn call(&mut self, request: Request<Q>) -> Self::Future {
        if request.method() == Method::POST {
            return Box::pin(self.0.call(request));
        }
        let mut answer = Response::new(Body::new(http_body_util::Full::from(SENTENCE)));
        *answer.status_mut() = StatusCode::NOT_FOUND;
        answer.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static(TEXT));
        Box::pin(std::future::ready(Ok(answer)))
    }
}
