//! Deadlines of unary calls: the caller's, or the server's default.

use fastps_core::error::{Error, Kind};
use fastps_transport::convert;
use http::{HeaderMap, Request, Response};
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;
use tokio::time::Instant;
use tower::Service;

/// How long a call without a deadline may take.
pub(crate) const DEFAULT_TIMEOUT: Duration = Duration::from_mins(1);

/// Time by which a call ends before its deadline. tonic's timer, which is set before ours, ends a call
/// without details; when both are due, ours is polled first.
const LEAD: Duration = Duration::from_millis(5);

/// Prefix of calls with a deadline: streams end when their client likes.
const UNARY_PREFIX: &str = "/fastps.v1.Control/";

/// A service whose unary calls end by their deadline.
#[derive(Clone, Debug)]
pub(crate) struct Timeout<S> {
    inner: S,
    shard: u32,
    own: Duration,
}

impl<S> Timeout<S> {
    pub(crate) fn new(inner: S, shard: u32) -> Self {
        Self { inner, shard, own: DEFAULT_TIMEOUT }
    }
}

impl<S, Q, A> Service<Request<Q>> for Timeout<S>
where
    S: Service<Request<Q>, Response = Response<A>>,
    S::Future: Send + 'static,
    A: Default,
{
    type Response = Response<A>;
    type Error = S::Error;
    type Future = Pin<Box<dyn Future<Output = Result<Response<A>, S::Error>> + Send>>;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), S::Error>> {
        self.inner.poll_ready(cx)
    }

    fn call(&mut self, request: Request<Q>) -> Self::Future {
        let unary = request.uri().path().starts_with(UNARY_PREFIX);
        let limit = deadline_of(request.headers()).unwrap_or(self.own);
        let deadline = Instant::now() + limit.saturating_sub(LEAD);
        let (answer, shard) = (self.inner.call(request), self.shard);
        if !unary {
            return Box::pin(answer);
        }
        Box::pin(async move {
            match tokio::time::timeout_at(deadline, answer).await {
                Ok(answer) => answer,
                Err(_) => Ok(convert::status(&late(limit).shard(shard)).into_http()),
            }
        })
    }
}

fn late(limit: Duration) -> Error {
    Error::new(Kind::Deadline, format!("the call's {} ms have passed", limit.as_millis()))
}

/// The header `grpc-timeout`: up to eight digits and a unit. An invalid one counts as absent.
fn deadline_of(headers: &HeaderMap) -> Option<Duration> {
    let text = headers.get("grpc-timeout")?.to_str().ok()?;
    let (digits, unit) = text.split_at_checked(text.len().checked_sub(1)?)?;
    if digits.is_empty() || digits.len() > 8 || !digits.bytes().all(|byte| byte.is_ascii_digit()) {
        return None;
    }
    let number = digits.parse::<u64>().ok()?;
    Some(match unit {
        "H" => Duration::from_secs(3600 * number),
        "M" => Duration::from_secs(60 * number),
        "S" => Duration::from_secs(number),
        "m" => Duration::from_millis(number),
        "u" => Duration::from_micros(number),
        "n" => Duration::from_nanos(number),
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::convert::Infallible;
    use tonic::{Code, Status};
    use tower::service_fn;

    #[test]
    fn the_header_is_read() {
        let read = |text: &str| {
            deadline_of(&[("grpc-timeout".parse().unwrap(), text.parse().unwrap())].into_iter().collect())
        };
        assert_eq!(read("3H"), Some(Duration::from_hours(3)));
        assert_eq!(read("2M"), Some(Duration::from_mins(2)));
        assert_eq!(read("7S"), Some(Duration::from_secs(7)));
        assert_eq!(read("99999999m"), Some(Duration::from_millis(99_999_999)));
        assert_eq!(read("5u"), Some(Duration::from_micros(5)));
        assert_eq!(read("0n"), Some(Duration::ZERO));
        for wrong in ["", "S", "5", "5s", "+5S", "-5S", "5 S", "123456789S", "5ä"] {
            assert_eq!(read(wrong), None, "{wrong:?}");
        }
    }

    /// Outcome of a call without an answer.
    async fn unanswered(path: &str, timeout: Option<&str>, own: Duration) -> Status {
        let inner = service_fn(|_: Request<()>| std::future::pending::<Result<Response<()>, Infallible>>());
        let mut request = Request::builder().uri(path);
        if let Some(timeout) = timeout {
            request = request.header("grpc-timeout", timeout);
        }
        let answer = Timeout { inner, shard: 3, own }.call(request.body(()).unwrap()).await.unwrap();
        Status::from_header_map(answer.headers()).unwrap()
    }

    #[tokio::test]
    async fn every_unary_call_ends() {
        let path = format!("{UNARY_PREFIX}Advance");
        let short = Duration::from_millis(1);
        for status in
            [unanswered(&path, None, short).await, unanswered(&path, Some("1m"), DEFAULT_TIMEOUT).await]
        {
            assert_eq!(status.code(), Code::DeadlineExceeded);
            let error = convert::error_from_status(&status);
            assert_eq!((error.kind, error.shard), (Kind::Deadline, Some(3)));
        }
        // A stream has no deadline.
        let stream = unanswered("/fastps.v1.Data/Exchange", None, Duration::ZERO);
        assert!(tokio::time::timeout(Duration::from_millis(50), stream).await.is_err());
    }
}
