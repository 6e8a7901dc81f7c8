//! Calls of generated clients with the token of this end.

use fastps_transport::bearer::Bearer;
use tonic::service::Interceptor;
use tonic::{Request, Status};

/// Puts the token into each call.
#[derive(Clone)]
pub(crate) struct Signed(pub(crate) Bearer);

impl Interceptor for Signed {
    fn call(&mut self, mut request: Request<()>) -> Result<Request<()>, Status> {
        self.0.sign(request.metadata_mut().as_mut());
        Ok(request)
    }
}
