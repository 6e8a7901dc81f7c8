//! Admission of calls by their headers, before any of their body is read: a caller without a valid token
//! costs no memory and learns nothing, and one above its rate waits or is refused. Handlers check the role
//! that each call needs.

use crate::auth::budget::calls::one_message;
use crate::auth::budget::{Account, Budget};
use crate::auth::peer::Peer;
use crate::cluster::node::Node;
use fastps_core::error::{Error, Result};
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

impl<S> Service<Request<Body>> for Admission<S>
where
    S: Service<Request<Body>, Response = Response<Body>> + Clone + Send + 'static,
    S::Future: Send + 'static,
    S::Error: Send + 'static,
{
    type Response = Response<Body>;
    type Error = S::Error;
    type Future = Pin<Box<dyn Future<Output = Result<Response<Body>, S::Error>> + Send>>;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), S::Error>> {
        self.inner.poll_ready(cx)
    }

    fn call(&mut self, request: Request<Body>) -> Self::Future {
        let (access, path) = (&self.node.security.access, request.uri().path());
        let peer = request.extensions().get::<Peer>().filter(|_| path.starts_with(OURS));
        let Some(peer) = peer else { return Box::pin(self.inner.call(request)) };
        let known = match access.admit(peer.origin(), request.headers(), pb::Role::Reader) {
            Ok(known) => known,
            Err(error) => return Box::pin(std::future::ready(Ok(self.refusal(error)))),
        };
        peer.authenticated();
        let budget = self.node.security.budgets.of(&known.principal).filter(Budget::has_rates);
        let (account, shard) = (Account::of_call(path), self.node.index());
        let Some(account) = account else { return Box::pin(self.inner.call(request)) };
        let Some(budget) = budget else {
            return Box::pin(self.inner.call(request.map(|body| one_message(body, shard))));
        };
        // The service that is ready, and one that may become so later.
        let next = self.inner.clone();
        let mut admission = Self { inner: std::mem::replace(&mut self.inner, next), node: self.node.clone() };
        Box::pin(async move {
            if let Err(error) = budget.admit_call(account).await {
                return Ok(admission.refusal(error));
            }
            let paid = request.map(|body| one_message(budget.clone().paid(account, body, shard), shard));
            let answer = admission.inner.call(paid).await?;
            Ok(answer.map(|body| budget.charged(account, body)))
        })
    }
}

impl<S> Admission<S> {
    fn refusal(&self, error: Error) -> Response<Body> {
        convert::status(&self.node.sign(error)).into_http()
    }
}
