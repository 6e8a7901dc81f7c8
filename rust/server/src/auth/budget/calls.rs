//! Rates of unary calls. A call is charged by its headers, before its body is read, and its body once it has
//! arrived, before the call is made.

use super::{Account, Budget};
use fastps_core::error::Result;
use fastps_transport::convert;
use http_body_util::BodyExt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};
use tonic::body::Body;

/// Prefix of unary calls. The frames of a stream are charged one by one.
const UNARY_PREFIX: &str = "/fastps.v1.Control/";
const HELLO: &str = "/fastps.v1.Control/Hello";

impl Account {
    /// The account that pays for a call; `None`: it is free.
    pub(crate) fn of_call(path: &str) -> Option<Self> {
        match path {
            HELLO => Some(Self::Hellos),
            path if path.starts_with(UNARY_PREFIX) => Some(Self::Work),
            _ => None,
        }
    }
}

impl Budget {
    /// Charges the headers of a call, and waits until the principal's rate has room for it.
    pub(crate) async fn admit_call(&self, account: Account) -> Result<()> {
        sleep(self.charge(account, 0, Instant::now())?).await;
        Ok(())
    }

    /// The body of a call, which ends once the principal's rate has room for its bytes, or with an error of
    /// shard `shard`.
    pub(crate) fn paid(self, account: Account, body: Body, shard: u32) -> Body {
        let bytes = Arc::new(AtomicU64::new(0));
        let counted = bytes.clone();
        let body = body.map_frame(move |frame| {
            let length = frame.data_ref().map_or(0, bytes::Bytes::len);
            counted.fetch_add(length as u64, Ordering::Relaxed);
            frame
        });
        Body::new(body.with_trailers(async move {
            let wait = self.charge_body(account, bytes.load(Ordering::Relaxed), Instant::now());
            match wait {
                Ok(wait) => {
                    sleep(wait).await;
                    None
                }
                Err(error) => Some(Err(convert::status(&error.shard(shard)))),
            }
        }))
    }
}

async fn sleep(wait: Duration) {
    if !wait.is_zero() {
        tokio::time::sleep(wait).await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::auth::budget::Budgets;
    use crate::auth::principal::{Limits, Principal};
    use crate::auth::role::Role;
    use crate::auth::scope::Scope;
    use fastps_core::error::Kind;

    #[tokio::test]
    async fn a_body_is_charged_at_its_end() {
        let limits = Limits { bytes_per_second: Some(100), ..Limits::default() };
        let principal = Principal { limits, ..Principal::new("a", Role::Worker, Scope::Everything) };
        let budget = Budgets::default().of(&principal).unwrap();
        let body = || {
            let body = Body::new(http_body_util::Full::from(vec![7_u8; 1000]));
            budget.clone().paid(Account::Work, body, 3)
        };
        assert_eq!(body().collect().await.unwrap().to_bytes(), vec![7_u8; 1000]);
        let status = body().collect().await.unwrap_err();
        let error = convert::error_from_status(&status);
        assert_eq!((error.kind, error.shard), (Kind::Capacity, Some(3)));
        assert!(error.retry_after_ms.is_some_and(|after| (9_000..10_000).contains(&after)), "{error:?}");
        assert!(budget.admit_call(Account::Work).await.is_err());
        budget.admit_call(Account::Hellos).await.unwrap();
    }

    #[test]
    fn unary_calls_are_charged_and_health_is_free() {
        for (path, account) in [
            ("/fastps.v1.Control/Hello", Some(Account::Hellos)),
            ("/fastps.v1.Control/GetMap", Some(Account::Work)),
            ("/fastps.v1.Data/Exchange", None),
            ("/grpc.health.v1.Health/Check", None),
        ] {
            assert_eq!(Account::of_call(path), account, "{path}");
        }
    }
}
