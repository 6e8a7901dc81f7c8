//! Rates of unary calls. A call is charged by its headers, before its body is read, and its body once it has
//! arrived, before the call is made.

use super::{Account, Budget};
use bytes::{Bytes, BytesMut};
use fastps_core::error::{Error, Kind, Result};
use fastps_proto::MAX_MESSAGE_BYTES;
use fastps_transport::convert;
use http_body_util::{BodyExt, LengthLimitError, Limited, StreamBody};
use hyper::body::Frame;
use prost::encoding::{DecodeContext, WireType, decode_key, skip_field};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};
use tonic::Status;
use tonic::body::Body;

/// Prefix of unary calls. The frames of a stream are charged one by one.
const UNARY_PREFIX: &str = "/fastps.v1.Control/";
/// Bytes before a message of gRPC.
const PREFIX_BYTES: usize = 5;
/// Most tensors that one call names: more would keep the shard's thread from others.
const MAX_NAMES: usize = 4096;
/// Field numbers of requests are below this.
const FIELDS: usize = 32;
const HELLO: &str = "/fastps.v1.Control/Hello";

impl Account {
    /// The account that pays for a call; `None`: it is free.
    pub(crate) fn of_call(path: &str) -> Option<Self> {
        match path {
            HELLO => Some(Self::Hellos),
            path if path.starts_with(UNARY_PREFIX) => Some(Self::Calls),
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

    /// The answer to a call, whose bytes delay the next ones.
    pub(crate) fn charged(self, account: Account, body: Body) -> Body {
        Body::new(body.map_frame(move |frame| {
            let length = frame.data_ref().map_or(0, Bytes::len);
            self.charge_past(account, length as u64, Instant::now());
            frame
        }))
    }

    /// The body of a call, which ends once the principal's rate has room for its bytes, or with an error of
    /// shard `shard`. What was read of a body without an end is charged, too.
    pub(crate) fn paid(self, account: Account, body: Body, shard: u32) -> Body {
        let bill = Arc::new(Bill { budget: self, account, bytes: AtomicU64::new(0) });
        let open = bill.clone();
        let body = body.map_frame(move |frame| {
            let length = frame.data_ref().map_or(0, Bytes::len);
            open.bytes.fetch_add(length as u64, Ordering::Relaxed);
            frame
        });
        Body::new(body.with_trailers(async move {
            let bytes = bill.bytes.swap(0, Ordering::Relaxed);
            match bill.budget.charge_body(bill.account, bytes, Instant::now()) {
                Ok(wait) => {
                    sleep(wait).await;
                    None
                }
                Err(error) => Some(Err(convert::status(&error.shard(shard)))),
            }
        }))
    }
}

/// The bytes of a body that are not charged yet.
struct Bill {
    budget: Budget,
    account: Account,
    bytes: AtomicU64,
}

impl Drop for Bill {
    fn drop(&mut self) {
        let bytes = *self.bytes.get_mut();
        if bytes > 0 {
            self.budget.charge_past(self.account, bytes, Instant::now());
        }
    }
}

/// A body of one message at most, which names few tensors: tonic would read any number of others and drop
/// them, and decode all names before the call can refuse them.
pub(crate) fn one_message(body: Body, shard: u32) -> Body {
    let checked = async move {
        let bytes = read_message(body, shard).await?;
        check_names(bytes.get(PREFIX_BYTES..).unwrap_or_default())
            .map_err(|error| convert::status(&error.shard(shard)))?;
        Ok::<_, Status>(Frame::data(bytes))
    };
    Body::new(StreamBody::new(futures_util::stream::once(checked)))
}

/// The bytes of a body, or the first ones of a message that announces too many, which tonic then refuses.
async fn read_message(body: Body, shard: u32) -> Result<Bytes, Status> {
    let most = MAX_MESSAGE_BYTES + PREFIX_BYTES;
    let (mut body, mut bytes) = (Limited::new(body, most), BytesMut::new());
    while let Some(frame) = body.frame().await {
        let frame = frame.map_err(|error| match error.downcast::<LengthLimitError>() {
            Ok(_) => {
                let error = Error::new(Kind::Frame, "a call sends more than one message").shard(shard);
                convert::status(&error.expected(format!("at most {most} bytes"), "more"))
            }
            Err(error) => Status::from_error(error),
        })?;
        bytes.extend_from_slice(frame.data_ref().map_or(&[][..], |data| data));
        let announced = bytes.get(1..PREFIX_BYTES).and_then(|length| length.try_into().ok());
        if announced.is_some_and(|length| u32::from_be_bytes(length) as usize > MAX_MESSAGE_BYTES) {
            break;
        }
    }
    Ok(bytes.freeze())
}

/// Fails if a field of the message, which is not a number, occurs too often. What cannot be read is left to the decoder.
fn check_names(mut message: &[u8]) -> Result<()> {
    let mut counts = [0_usize; FIELDS];
    while let Ok((field, wire)) = decode_key(&mut message)
        && skip_field(wire, field, &mut message, DecodeContext::default()).is_ok()
    {
        if let Some(count) = counts.get_mut(field as usize).filter(|_| wire == WireType::LengthDelimited) {
            *count += 1;
        }
    }
    match counts.into_iter().max() {
        Some(names) if names > MAX_NAMES => {
            let error = Error::new(Kind::Config, "one call names too many tensors");
            Err(error.expected(format!("at most {MAX_NAMES}"), names))
        }
        _ => Ok(()),
    }
}

/// Sleeps, unless there is nothing to wait for.
pub(crate) async fn sleep(wait: Duration) {
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
    use fastps_proto::v1 as pb;
    use prost::Message;

    #[tokio::test]
    async fn a_body_is_charged_at_its_end() {
        let limits = Limits { bytes_per_second: Some(100), ..Limits::default() };
        let principal = Principal { limits, ..Principal::new("a", Role::Worker, Scope::Everything) };
        let budget = Budgets::default().of(&principal).unwrap();
        let body = || {
            let body = Body::new(http_body_util::Full::from(vec![7_u8; 1000]));
            budget.clone().paid(Account::Calls, body, 3)
        };
        assert_eq!(body().collect().await.unwrap().to_bytes(), vec![7_u8; 1000]);
        let status = body().collect().await.unwrap_err();
        let error = convert::error_from_status(&status);
        assert_eq!((error.kind, error.shard), (Kind::Capacity, Some(3)));
        assert!(error.retry_after_ms.is_some_and(|after| (9_000..10_000).contains(&after)), "{error:?}");
        assert!(budget.admit_call(Account::Calls).await.is_err());
        budget.admit_call(Account::Hellos).await.unwrap();
    }

    #[tokio::test]
    async fn a_body_without_an_end_is_charged() {
        let limits = Limits { bytes_per_second: Some(100), ..Limits::default() };
        let principal = Principal { limits, ..Principal::new("a", Role::Worker, Scope::Everything) };
        let budget = Budgets::default().of(&principal).unwrap();
        let body = Body::new(http_body_util::Full::from(vec![7_u8; 1000]));
        let mut body = budget.clone().paid(Account::Calls, body, 3);
        body.frame().await.unwrap().unwrap();
        budget.admit_call(Account::Calls).await.unwrap();
        drop(body);
        assert!(budget.admit_call(Account::Calls).await.is_err());
    }

    #[tokio::test]
    async fn a_call_has_one_message() {
        let body = |length: usize| one_message(Body::new(http_body_util::Full::from(vec![0_u8; length])), 3);
        let most = MAX_MESSAGE_BYTES + PREFIX_BYTES;
        assert_eq!(body(most).collect().await.unwrap().to_bytes().len(), most);
        let error = convert::error_from_status(&body(most + 1).collect().await.unwrap_err());
        assert_eq!((error.kind, error.shard), (Kind::Frame, Some(3)));
    }

    #[tokio::test]
    async fn a_call_that_lists_too_many_is_refused_before_it_is_decoded() {
        let names = |count: usize| vec!["n".to_owned(); count];
        let body = |message: &[u8]| {
            let body = [&[0; PREFIX_BYTES][..], message].concat();
            one_message(Body::new(http_body_util::Full::from(body)), 3).collect()
        };
        for (count, refused) in [(0, false), (MAX_NAMES, false), (MAX_NAMES + 1, true), (20_000, true)] {
            for message in [
                pb::GetMapRequest { names: names(count), ..Default::default() }.encode_to_vec(),
                pb::StatsRequest { changed: names(count) }.encode_to_vec(),
                pb::OpenSpaceRequest { tensors: names(count), client: 1, ..Default::default() }
                    .encode_to_vec(),
                pb::OpenSpaceRequest { vectors: names(count), ..Default::default() }.encode_to_vec(),
            ] {
                let passed = body(&message).await;
                if !refused {
                    assert_eq!(&passed.unwrap().to_bytes()[PREFIX_BYTES..], message);
                    continue;
                }
                let error = convert::error_from_status(&passed.unwrap_err());
                assert_eq!((error.kind, error.shard), (Kind::Config, Some(3)));
                assert_eq!(error.got, Some(count.to_string()));
            }
        }
        // Nothing that cannot be read is refused here.
        for bytes in [&[0xff; 12][..], &[0x0a, 0x7f], &[0x0b], &[0]] {
            assert_eq!(&body(bytes).await.unwrap().to_bytes()[PREFIX_BYTES..], bytes);
        }
    }

    #[test]
    fn unary_calls_are_charged_and_health_is_free() {
        for (path, account) in [
            ("/fastps.v1.Control/Hello", Some(Account::Hellos)),
            ("/fastps.v1.Control/GetMap", Some(Account::Calls)),
            ("/fastps.v1.Data/Exchange", None),
            ("/grpc.health.v1.Health/Check", None),
        ] {
            assert_eq!(Account::of_call(path), account, "{path}");
        }
    }
}
