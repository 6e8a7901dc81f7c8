//! The error map: core [`Error`] <-> [`pb::Refusal`] <-> [`tonic::Status`].

use fastps_core::error::{Details, Error, Kind};
use fastps_proto::{MAX_MESSAGE_BYTES, v1 as pb};
use prost::Message;
use std::io;
use tonic::codegen::http;
use tonic::{Code, Status, TimeoutExpired};

/// Kind, its name on the wire, and the status code of a unary call that it ends. What clients find out alone is not here.
const KINDS: [(Kind, &str, Code); 17] = [
    (Kind::UnknownTensor, "unknown_tensor", Code::NotFound),
    (Kind::Shape, "shape", Code::InvalidArgument),
    (Kind::DType, "dtype", Code::InvalidArgument),
    (Kind::NonFinite, "non_finite", Code::InvalidArgument),
    (Kind::Frame, "frame", Code::InvalidArgument),
    (Kind::Config, "config", Code::FailedPrecondition),
    (Kind::Capacity, "capacity", Code::ResourceExhausted),
    (Kind::StaleEpoch, "stale_epoch", Code::FailedPrecondition),
    (Kind::StalePush, "stale_push", Code::Aborted),
    (Kind::Lease, "lease", Code::FailedPrecondition),
    (Kind::Fenced, "fenced", Code::Aborted),
    (Kind::UnknownOutcome, "unknown_outcome", Code::DataLoss),
    (Kind::Denied, "denied", Code::PermissionDenied),
    (Kind::Unavailable, "unavailable", Code::Unavailable),
    (Kind::Deadline, "deadline", Code::DeadlineExceeded),
    (Kind::Connection, "connection", Code::Unavailable),
    (Kind::Internal, "internal", Code::Internal),
];

/// The name of a kind on the wire.
pub fn kind_name(kind: Kind) -> &'static str {
    KINDS.iter().find(|k| k.0 == kind).map_or("internal", |k| k.1)
}

/// The kind of a name; a name of a later minor version is [`Kind::Internal`].
pub fn kind_from_name(name: &str) -> Kind {
    KINDS.iter().find(|k| k.1 == name).map_or(Kind::Internal, |k| k.0)
}

/// What a client wrote may come back in an error: no more of it than fits, with everything else, the 8 KiB of headers
/// that any gRPC implementation accepts.
fn clipped(text: &str, bytes: usize) -> String {
    text[..text.floor_char_boundary(bytes)].to_owned()
}

/// An error as it travels.
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

/// An error as it travels where many others do: what one can act on, in about 100 bytes.
pub(super) fn brief_refusal(error: &Error) -> pb::Refusal {
    pb::Refusal {
        kind: kind_name(error.kind).to_owned(),
        message: clipped(&error.message, 64),
        shard: error.shard,
        retry_after_ms: error.retry_after_ms,
        ..Default::default()
    }
}

/// An error as it arrived.
pub fn error_from_refusal(refusal: pb::Refusal) -> Error {
    let some = |text: String| (!text.is_empty()).then_some(text);
    Error::from(Details {
        kind: kind_from_name(&refusal.kind),
        message: refusal.message,
        tensor: some(refusal.tensor).map(Into::into),
        shard: refusal.shard,
        expected: some(refusal.expected),
        got: some(refusal.got),
        retry_after_ms: refusal.retry_after_ms,
        lost: Vec::new(),
    })
}

/// The status that ends a unary call: the code for any gRPC client, every field of the error in the details.
pub fn status(error: &Error) -> Status {
    let code = KINDS.iter().find(|k| k.0 == error.kind).map_or(Code::Internal, |k| k.2);
    // The message names everything too: many tools show no details. Header values stay short and printable.
    let message: String = error.to_string().chars().take(1024).collect();
    Status::with_details(code, message, refusal(error).encode_to_vec().into())
}

/// The status with which gRPC itself ends a call whose message nobody could read, with what a refusal tells.
pub fn unreadable(status: Status, shard: u32) -> Status {
    let (message, expected) = match status.code() {
        _ if !status.details().is_empty() => return status,
        Code::OutOfRange => ("a message is too large", format!("at most {MAX_MESSAGE_BYTES} bytes")),
        Code::Internal => ("bytes came that are no message of fastps.v1", "protobuf".to_owned()),
        _ => return status,
    };
    self::status(&Error::new(Kind::Frame, message).shard(shard).expected(expected, status.message()))
}

/// The same for a response that is over before its handler has run.
pub fn unreadable_response<B: Default>(response: http::Response<B>, shard: u32) -> http::Response<B> {
    match Status::from_header_map(response.headers()) {
        Some(status) if status.code() != Code::Ok => unreadable(status, shard).into_http(),
        _ => response,
    }
}

/// The error of a status: from its details, or from its code where the peer is not fastps or the transport failed.
pub fn error_from_status(status: &Status) -> Error {
    if let Ok(refusal) = pb::Refusal::decode(status.details())
        && !refusal.kind.is_empty()
    {
        return error_from_refusal(refusal);
    }
    if let Some(reason) = denied_by_tls(status) {
        return Error::new(Kind::Denied, reason);
    }
    let kind = match status.code() {
        Code::NotFound => Kind::UnknownTensor,
        Code::InvalidArgument | Code::OutOfRange => Kind::Frame,
        Code::ResourceExhausted => Kind::Capacity,
        Code::PermissionDenied | Code::Unauthenticated => Kind::Denied,
        Code::DeadlineExceeded => Kind::Deadline,
        // Without details it was not our handler that said so: the connection or a proxy did.
        Code::Unavailable | Code::Cancelled | Code::Unknown | Code::Aborted => Kind::Connection,
        Code::Unimplemented | Code::FailedPrecondition | Code::AlreadyExists => Kind::Config,
        _ => Kind::Internal,
    };
    let mut message = format!("{}: {}", status.code().description(), status.message());
    // What the transport heard last, a farewell of the server included, stands at the end of the chain.
    let cause = std::iter::successors(std::error::Error::source(status), |error| error.source()).last();
    if let Some(cause) = cause.map(ToString::to_string).filter(|cause| !message.contains(cause)) {
        message = format!("{message} ({cause})");
    }
    Error::new(kind, message)
}

/// Whether tonic gave up, on either side, at the deadline that the call carries.
pub fn timed_out(status: &Status) -> bool {
    status.code() == Code::Cancelled && status.message() == TimeoutExpired(()).to_string()
}

/// Why TLS refused the server, or the server this client: trying again changes nothing.
fn denied_by_tls(status: &Status) -> Option<String> {
    let mut causes = std::iter::successors(std::error::Error::source(status), |error| error.source());
    causes.find_map(|error| {
        let io = error.downcast_ref::<io::Error>();
        let io = io.or_else(|| error.downcast_ref::<h2::Error>()?.get_io())?;
        (io.kind() == io::ErrorKind::PermissionDenied).then(|| io.to_string())
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_kind_survives_both_ways() {
        for (kind, name, code) in KINDS {
            assert_eq!(kind_from_name(name), kind);
            let full = Error::new(kind, "something is wrong")
                .tensor("wäight")
                .shard(0)
                .expected("this", "that")
                .retry_after_ms(7);
            for error in [full, Error::new(kind, "bare")] {
                assert_eq!(error_from_refusal(refusal(&error)), error);
                assert_eq!(status(&error).code(), code);
                assert_eq!(error_from_status(&status(&error)), error);
            }
        }
        assert_eq!(kind_from_name("of the future"), Kind::Internal);
    }

    #[test]
    fn what_nobody_could_read_is_told_as_a_refusal() {
        for code in [Status::out_of_range("found 5 bytes"), Status::internal("found 5 bytes")] {
            let error = error_from_status(&unreadable(code, 2));
            assert_eq!((error.kind, error.shard), (Kind::Frame, Some(2)));
            assert_eq!(error.got.as_deref(), Some("found 5 bytes"));
        }
        assert_eq!(unreadable(Status::not_found("it"), 2).message(), "it");
        let told = status(&Error::new(Kind::Internal, "it").shard(0));
        assert_eq!(unreadable(told.clone(), 2).message(), told.message());
    }

    #[test]
    fn a_foreign_status_has_a_kind() {
        assert_eq!(error_from_status(&Status::unavailable("refused")).kind, Kind::Connection);
        assert_eq!(error_from_status(&Status::deadline_exceeded("late")).kind, Kind::Deadline);
        assert_eq!(error_from_status(&Status::out_of_range("too large")).kind, Kind::Frame);
    }
}
