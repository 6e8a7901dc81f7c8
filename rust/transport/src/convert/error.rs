//! The error map: core [`Error`] <-> [`pb::Refusal`] <-> [`tonic::Status`], whose details hold a
//! `google.rpc.Status`.

use super::kinds::{self, kind_from_name, kind_name};
use crate::open_files;
use fastps_core::error::{Details, Error, Kind};
use fastps_core::text::printable;
use fastps_proto::{MAX_MESSAGE_BYTES, v1 as pb};
use prost::Message;
use prost_types::Any;
use std::io;
use std::time::Duration;
use tonic::codegen::http;
use tonic::{Code, Status, TimeoutExpired};
use tonic_types::{ErrorInfo, RetryInfo, pb as rpc};

/// Domain of the reasons in `google.rpc.ErrorInfo`.
const DOMAIN: &str = "fastps";
/// Type of a refusal in the details of a status.
const REFUSAL_URL: &str = "type.googleapis.com/fastps.v1.Refusal";
/// Bytes of a status's message. The header holds it with up to three characters a byte, and the details hold
/// it again: all of it fits the 8 KiB of headers that any gRPC implementation accepts.
const MAX_STATUS_MESSAGE: usize = 768;

/// Clips a client's text for an error, so that with everything else it fits the 4 KiB that details may have.
fn clipped(text: &str, bytes: usize) -> String {
    text[..text.floor_char_boundary(bytes)].to_owned()
}

/// An error in wire form.
pub fn refusal(error: &Error) -> pb::Refusal {
    let text = |text: &Option<String>| clipped(text.as_deref().unwrap_or_default(), 512);
    pb::Refusal {
        kind: kind_name(error.kind).to_owned(),
        message: clipped(&error.message, 512),
        tensor: clipped(error.tensor.as_deref().unwrap_or_default(), 1024),
        shard: error.shard,
        expected: text(&error.expected),
        got: text(&error.got),
        retry_after_ms: error.retry_after_ms,
    }
}

/// An error in wire form among many others: the actionable fields, in about 100 bytes.
pub(super) fn brief_refusal(error: &Error) -> pb::Refusal {
    pb::Refusal {
        kind: kind_name(error.kind).to_owned(),
        message: clipped(&error.message, 64),
        shard: error.shard,
        retry_after_ms: error.retry_after_ms,
        ..Default::default()
    }
}

/// Reads an error from the wire, whose text may go to a terminal.
pub fn error_from_refusal(refusal: pb::Refusal) -> Error {
    let some = |text: String| (!text.is_empty()).then_some(text);
    let shown = |text: String| some(printable(&text));
    Error::from(Details {
        kind: kind_from_name(&refusal.kind),
        message: printable(&refusal.message),
        tensor: some(refusal.tensor).map(Into::into),
        shard: refusal.shard,
        expected: shown(refusal.expected),
        got: shown(refusal.got),
        retry_after_ms: refusal.retry_after_ms,
        lost: Vec::new(),
    })
}

/// The status that ends a call: the code for any gRPC client, every field of the error in the details.
pub fn status(error: &Error) -> Status {
    status_with(kinds::code(error.kind), error)
}

fn status_with(code: Code, error: &Error) -> Status {
    // The message names everything too: many tools show no details.
    let message = clipped(&error.to_string(), MAX_STATUS_MESSAGE);
    let reason = kind_name(error.kind).to_ascii_uppercase();
    let info = rpc::ErrorInfo { reason, domain: DOMAIN.to_owned(), ..Default::default() };
    let mut details = vec![any(REFUSAL_URL, &refusal(error)), any(ErrorInfo::TYPE_URL, &info)];
    if let Some(ms) = error.retry_after_ms {
        let delay = RetryInfo::new(Some(Duration::from_millis(ms)));
        details.push(any(RetryInfo::TYPE_URL, &rpc::RetryInfo::from(delay)));
    }
    let status = rpc::Status { code: code.into(), message: message.clone(), details };
    Status::with_details(code, message, status.encode_to_vec().into())
}

fn any(url: &str, message: &impl Message) -> Any {
    Any { type_url: url.to_owned(), value: message.encode_to_vec() }
}

/// The refusal in a status's details.
fn refusal_in(status: &Status) -> Option<pb::Refusal> {
    let status = rpc::Status::decode(status.details()).ok()?;
    let name = |url: &str| url.rsplit('/').next() == REFUSAL_URL.rsplit('/').next();
    let any = status.details.iter().find(|any| name(&any.type_url))?;
    pb::Refusal::decode(any.value.as_slice()).ok().filter(|refusal| !refusal.kind.is_empty())
}

/// Adds a refusal to the status with which gRPC ends a call with an unreadable message. A compressed message
/// keeps gRPC's code, and the header that names the supported encodings.
pub fn unreadable(status: Status, shard: u32) -> Status {
    if !status.details().is_empty() {
        return status;
    }
    let compressed = status.message().contains("compressed");
    let (message, expected) = match status.code() {
        Code::Unimplemented | Code::Internal if compressed => {
            ("a message is compressed", "no compression".to_owned())
        }
        Code::OutOfRange => ("a message is too large", format!("at most {MAX_MESSAGE_BYTES} bytes")),
        Code::Internal => ("bytes came that are no message of fastps.v1", "protobuf".to_owned()),
        _ => return status,
    };
    let error = Error::new(Kind::Frame, message).shard(shard).expected(expected, status.message());
    if !compressed {
        return self::status(&error);
    }
    let mut refused = status_with(Code::Unimplemented, &error);
    *refused.metadata_mut() = status.metadata().clone();
    refused
}

/// [`unreadable`] for a response that ended before its handler ran.
pub fn unreadable_response<B: Default>(response: http::Response<B>, shard: u32) -> http::Response<B> {
    match Status::from_header_map(response.headers()) {
        Some(status) if status.code() != Code::Ok => unreadable(status, shard).into_http(),
        _ => response,
    }
}

/// The error of a status: from its details, or from its code if the peer is not fastps or the transport
/// failed.
pub fn error_from_status(status: &Status) -> Error {
    if let Some(refusal) = refusal_in(status) {
        return error_from_refusal(refusal);
    }
    if let Some(reason) =
        of_the_system(status, |io| (io.kind() == io::ErrorKind::PermissionDenied).then(|| io.to_string()))
    {
        // TLS refused the server, or the server refused this client: a retry changes nothing.
        return Error::new(Kind::Denied, reason);
    }
    if let Some(error) = of_the_system(status, open_files::exhausted) {
        return error;
    }
    if wants_tls(status) {
        return plain_text();
    }
    let kind = match status.code() {
        Code::NotFound => Kind::UnknownTensor,
        Code::InvalidArgument | Code::OutOfRange => Kind::Frame,
        Code::ResourceExhausted => Kind::Capacity,
        Code::PermissionDenied => Kind::Denied,
        Code::Unauthenticated => Kind::Unauthenticated,
        Code::DeadlineExceeded => Kind::Deadline,
        // Without details it is not from our handlers, but from the connection or a proxy.
        Code::Unavailable | Code::Cancelled | Code::Unknown | Code::Aborted => Kind::Connection,
        Code::Internal if is_farewell(status) => Kind::Connection,
        Code::Unimplemented | Code::FailedPrecondition | Code::AlreadyExists => Kind::Precondition,
        _ => Kind::Internal,
    };
    let mut message = match (kind, status.message()) {
        (_, "") => status.code().description().to_owned(),
        // The transport's text says more than "the service is currently unavailable".
        (Kind::Connection, text) => text.to_owned(),
        (_, text) => format!("{}: {text}", status.code().description()),
    };
    // The transport's last event, such as a farewell of the server, is at the end of the chain.
    let cause = std::iter::successors(std::error::Error::source(status), |error| error.source()).last();
    if let Some(cause) = cause.map(ToString::to_string).filter(|cause| !message.contains(cause)) {
        message = format!("{message} ({cause})");
    }
    Error::new(kind, printable(&message))
}

/// Returns whether the peer closed the connection during a call in order, which tonic calls `Internal`.
fn is_farewell(status: &Status) -> bool {
    of_http2(status).any(|error| error.reason() == Some(h2::Reason::NO_ERROR))
}

/// The error of a client that speaks plain text to a server with TLS.
pub fn plain_text() -> Error {
    let expected = "tls_ca, the file of the CA that signed the server's certificate";
    Error::new(Kind::Denied, "this port speaks TLS").expected(expected, "no tls_ca")
}

/// Whether a server with TLS has refused plain text.
fn wants_tls(status: &Status) -> bool {
    of_http2(status).any(|error| error.is_remote() && error.reason() == Some(h2::Reason::INADEQUATE_SECURITY))
}

/// The errors of HTTP/2 behind a status.
fn of_http2(status: &Status) -> impl Iterator<Item = &h2::Error> {
    std::iter::successors(std::error::Error::source(status), |error| error.source())
        .filter_map(|error| error.downcast_ref::<h2::Error>())
}

/// Returns whether tonic gave up, on either side, at the deadline that the call carries.
pub fn timed_out(status: &Status) -> bool {
    status.code() == Code::Cancelled && status.message() == TimeoutExpired(()).to_string()
}

/// Searches the system errors behind a status.
fn of_the_system<T>(status: &Status, tell: impl Fn(&io::Error) -> Option<T>) -> Option<T> {
    let mut causes = std::iter::successors(std::error::Error::source(status), |error| error.source());
    causes.find_map(|error| {
        let io = error.downcast_ref::<io::Error>();
        tell(io.or_else(|| error.downcast_ref::<h2::Error>()?.get_io())?)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_kind_survives_both_ways() {
        for kind in kinds::all() {
            assert_eq!(kind_from_name(kind_name(kind)), kind);
            let full = Error::new(kind, "something is wrong")
                .tensor("wäight")
                .shard(0)
                .expected("this", "that")
                .retry_after_ms(7);
            for error in [full, Error::new(kind, "bare")] {
                assert_eq!(error_from_refusal(refusal(&error)), error);
                assert_eq!(error_from_status(&status(&error)), error);
            }
        }
        assert_eq!(kind_from_name("of the future"), Kind::Internal);
    }

    #[test]
    fn the_text_of_a_hostile_server_is_printable() {
        let evil = "a\u{1b}]52\n\u{202e}b";
        let shown = r"a\u001b]52\u000a\u202eb";
        let error = Error::new(Kind::Config, evil).expected(evil, evil);
        let error = error_from_status(&status(&error));
        let parts = (&error.message[..], error.expected.as_deref(), error.got.as_deref());
        assert_eq!(parts, (shown, Some(shown), Some(shown)));
        assert_eq!(error_from_status(&Status::unavailable(evil)).message, shown);
    }

    #[test]
    fn the_longest_error_fits_the_headers() {
        for letter in ["x", "ß", "\u{1}", "深", "🦀"] {
            let long = || letter.repeat(4096);
            let error = Error::new(Kind::UnknownOutcome, long())
                .tensor(long())
                .shard(u32::MAX)
                .expected(long(), long())
                .retry_after_ms(u64::MAX);
            let status = status(&error);
            assert!(status.details().len() < 4 << 10, "{letter:?}: {} bytes", status.details().len());
            let mut headers = http::HeaderMap::new();
            status.add_header(&mut headers).unwrap();
            // As HTTP/2 counts them.
            let size: usize =
                headers.iter().map(|(name, value)| name.as_str().len() + value.len() + 32).sum();
            assert!(size < 8 << 10, "{letter:?}: {size} bytes");
            let read = error_from_status(&status);
            assert_eq!((read.kind, read.retry_after_ms), (error.kind, error.retry_after_ms));
        }
    }

    #[test]
    fn a_compressed_message_keeps_the_code_that_grpc_has_for_it() {
        let mut theirs = Status::unimplemented("Content is compressed with `br` which isn't supported");
        theirs.metadata_mut().insert("grpc-accept-encoding", "identity".parse().unwrap());
        let status = unreadable(theirs, 2);
        assert_eq!(status.code(), Code::Unimplemented);
        assert_eq!(status.metadata().get("grpc-accept-encoding").unwrap(), "identity");
        assert_eq!(error_from_status(&status).kind, Kind::Frame);
        assert!(unreadable(Status::unimplemented(""), 2).details().is_empty());
    }

    #[test]
    fn an_unreadable_message_is_a_refusal() {
        for code in [Status::out_of_range("found 5 bytes"), Status::internal("found 5 bytes")] {
            let error = error_from_status(&unreadable(code, 2));
            assert_eq!((error.kind, error.shard), (Kind::Frame, Some(2)));
            assert_eq!(error.got.as_deref(), Some("found 5 bytes"));
        }
        assert_eq!(unreadable(Status::not_found("it"), 2).message(), "it");
        let refusal = status(&Error::new(Kind::Internal, "it").shard(0));
        assert_eq!(unreadable(refusal.clone(), 2).message(), refusal.message());
    }

    #[test]
    fn a_foreign_status_has_a_kind() {
        assert_eq!(error_from_status(&Status::unavailable("refused")).kind, Kind::Connection);
        assert_eq!(error_from_status(&Status::unavailable("refused")).to_string(), "refused");
        assert!(!error_from_status(&Status::unavailable("")).to_string().is_empty());
        assert_eq!(error_from_status(&Status::deadline_exceeded("late")).kind, Kind::Deadline);
        assert_eq!(error_from_status(&Status::out_of_range("too large")).kind, Kind::Frame);
        assert_eq!(error_from_status(&Status::internal("its bug")).kind, Kind::Internal);
    }

    #[test]
    fn a_connection_that_its_peer_closes_in_order_is_no_internal_error() {
        let status = Status::from_error(Box::new(h2::Error::from(h2::Reason::NO_ERROR)));
        assert_eq!(status.code(), Code::Internal);
        assert_eq!(error_from_status(&status).kind, Kind::Connection);
        // A peer that speaks no HTTP/2 will not do so later.
        let status = Status::from_error(Box::new(h2::Error::from(h2::Reason::FRAME_SIZE_ERROR)));
        assert_eq!(error_from_status(&status).kind, Kind::Internal);
    }
}
