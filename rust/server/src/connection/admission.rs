//! Admission of calls by their headers, before any of their body is read: a caller without a valid token
//! costs no memory and learns nothing. Handlers check the role that each call needs.

use crate::auth::peer::Peer;
use crate::cluster::node::Node;
use fastps_proto::v1 as pb;
use fastps_transport::convert;
use http::{Request, Response};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use tonic::body::Body;
use tower::Service;

/// Services of which every call needs a role; health is for everybody.
const OURS: &str = "/fastps.";

/// A service whose callers are known.
#[derive(Clone, Debug)]
pub(crate) struct Admission<S> {
    pub(crate) inner: S,
    pub(crate) node: Arc<Node>,
}

impl<S, Q> Service<Request<Q>> for Admission<S>
where
    S: Service<Request<Q>, Response = Response<Body>>,
    S::Future: Send + 'static,
    S::Error: Send + 'static,
{
    type Response = Response<Body>;
    type Error = S::Error;
    type Future = Pin<Box<dyn Future<Output = Result<Response<Body>, S::Error>> + Send>>;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), S::Error>> {
        self.inner.poll_ready(cx)
    }

    fn call(&mut self, request: Request<Q>) -> Self::Future {
        let access = &self.node.access;
        let peer = request.extensions().get::<Peer>().filter(|_| request.uri().path().starts_with(OURS));
        let known = peer.map(|peer| access.admit(peer.origin(), request.headers(), pb::Role::Reader));
        match known {
            Some(Err(error)) => {
                let refused = convert::status(&error.shard(self.node.index())).into_http();
                Box::pin(std::future::ready(Ok(refused)))
            }
            Some(Ok(_)) | None => Box::pin(self.inner.call(request)),
        }
    }
}
