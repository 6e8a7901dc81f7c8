//! The table of refusals (`protos/README.md`, section 8): the name of each kind, the status code of its
//! calls, and whether a request may be retried. Server and client both read it here.

use fastps_core::error::{Error, Kind};
use tonic::Code;

/// Condition for repeating a refused request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Retry {
    /// Never: it would be refused again.
    No,
    /// Once the cause of the refusal has changed, which only the caller can know.
    Changed,
    /// After `retry_after_ms`; without one only the caller can know when.
    Later,
    /// When there is room, not before `retry_after_ms`; it may take long, so callers decide.
    Capacity,
    /// With the current map.
    Map,
    /// In a session that is renewed or new.
    Session,
    /// On another connection or with a later deadline; a push as section 6 says.
    Resend,
}

/// One line of the table.
struct Row {
    kind: Kind,
    name: &'static str,
    code: Code,
    retry: Retry,
    /// Set if the refusal depends only on the request's bytes, or is permanent: the refusal of a repeat then
    /// proves that the earlier copy was not applied either.
    proves: bool,
}

const fn row(kind: Kind, name: &'static str, code: Code, retry: Retry) -> Row {
    Row { kind, name, code, retry, proves: false }
}

const fn proof(kind: Kind, name: &'static str, code: Code) -> Row {
    Row { kind, name, code, retry: Retry::No, proves: true }
}

/// Omits the kind that clients raise themselves (`versions_lost`).
const ROWS: [Row; 19] = [
    row(Kind::UnknownTensor, "unknown_tensor", Code::NotFound, Retry::Map),
    proof(Kind::Shape, "shape", Code::InvalidArgument),
    proof(Kind::DType, "dtype", Code::InvalidArgument),
    proof(Kind::NonFinite, "non_finite", Code::InvalidArgument),
    proof(Kind::Frame, "frame", Code::InvalidArgument),
    proof(Kind::Config, "config", Code::InvalidArgument),
    row(Kind::Precondition, "precondition", Code::FailedPrecondition, Retry::Changed),
    row(Kind::Capacity, "capacity", Code::ResourceExhausted, Retry::Capacity),
    row(Kind::StaleEpoch, "stale_epoch", Code::FailedPrecondition, Retry::Map),
    row(Kind::StalePush, "stale_push", Code::Aborted, Retry::No),
    row(Kind::Lease, "lease", Code::FailedPrecondition, Retry::Session),
    proof(Kind::Fenced, "fenced", Code::Aborted),
    row(Kind::UnknownOutcome, "unknown_outcome", Code::DataLoss, Retry::No),
    row(Kind::Unauthenticated, "unauthenticated", Code::Unauthenticated, Retry::Changed),
    row(Kind::Denied, "denied", Code::PermissionDenied, Retry::No),
    row(Kind::Unavailable, "unavailable", Code::Unavailable, Retry::Later),
    row(Kind::Deadline, "deadline", Code::DeadlineExceeded, Retry::Resend),
    row(Kind::Connection, "connection", Code::Unavailable, Retry::Resend),
    row(Kind::Internal, "internal", Code::Internal, Retry::No),
];

/// The names of all kinds on the wire.
pub const KIND_NAMES: [&str; ROWS.len()] = {
    let mut names = [""; ROWS.len()];
    let mut at = 0;
    while at < names.len() {
        names[at] = ROWS[at].name;
        at += 1;
    }
    names
};

fn of(kind: Kind) -> Option<&'static Row> {
    ROWS.iter().find(|row| row.kind == kind)
}

/// The name of a kind on the wire.
pub fn kind_name(kind: Kind) -> &'static str {
    of(kind).map_or("internal", |row| row.name)
}

/// The kind with a name; `Kind::Internal` for a name of a later minor version.
pub fn kind_from_name(name: &str) -> Kind {
    ROWS.iter().find(|row| row.name == name).map_or(Kind::Internal, |row| row.kind)
}

/// The status code of a unary call that fails with this kind.
pub(super) fn code(kind: Kind) -> Code {
    of(kind).map_or(Code::Internal, |row| row.code)
}

/// Condition for repeating a request refused with this kind.
pub fn retry(kind: Kind) -> Retry {
    of(kind).map_or(Retry::No, |row| row.retry)
}

/// Returns whether to repeat the same request without asking the caller: the peer will be ready at a time
/// that it reports, or the connection failed.
pub fn passes(error: &Error) -> bool {
    match retry(error.kind) {
        Retry::Later => error.retry_after_ms.is_some(),
        Retry::Resend => error.kind == Kind::Connection,
        Retry::No | Retry::Changed | Retry::Capacity | Retry::Map | Retry::Session => false,
    }
}

/// Returns whether a refusal of a repeat proves that the push was not applied earlier.
pub fn is_conclusive(kind: Kind) -> bool {
    of(kind).is_some_and(|row| row.proves)
}

/// Every kind in the table.
#[cfg(test)]
pub(super) fn all() -> impl Iterator<Item = Kind> {
    ROWS.iter().map(|row| row.kind)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeMap;

    const PAGE: &str = include_str!("../../../../protos/README.md");

    /// Wording of the page.
    fn wording(retry: Retry) -> &'static str {
        match retry {
            Retry::No => "no",
            Retry::Changed => "when what forbids it has changed",
            Retry::Later => "after `retry_after_ms`",
            Retry::Capacity => "when there is room, not before `retry_after_ms`",
            Retry::Map => "with the current map",
            Retry::Session => "in a session that is renewed or new",
            Retry::Resend => "with a later deadline; a push as section 6 says",
        }
    }

    #[test]
    fn the_page_says_the_same() {
        let cells =
            |line: &'static str| line.trim_matches('|').split(" | ").map(str::trim).collect::<Vec<_>>();
        let lines =
            PAGE.lines().skip_while(|line| !line.starts_with("| kind | meaning | status code |")).skip(2);
        let page: BTreeMap<_, _> = lines
            .take_while(|line| line.starts_with('|'))
            .map(cells)
            .map(|row| (row[0].trim_matches('`'), (row[2].replace('_', ""), row[3])))
            .collect();
        // `connection` is never sent.
        let here = ROWS.iter().filter(|row| row.kind != Kind::Connection);
        let here = here.map(|row| (row.name, (format!("{:?}", row.code).to_uppercase(), wording(row.retry))));
        assert_eq!(page, here.collect());
        let proofs =
            ROWS.iter().filter(|row| row.proves).map(|row| format!("`{}`", row.name)).collect::<Vec<_>>();
        let (last, first) = proofs.split_last().unwrap();
        let proofs = format!("only {} and {last} prove", first.join(", "));
        let page = PAGE.split_whitespace().collect::<Vec<_>>().join(" ");
        assert!(page.contains(&proofs), "{proofs}");
    }

    #[test]
    fn what_passes_is_sent_again() {
        let error = Error::new(Kind::Unavailable, "not ready").retry_after_ms(5);
        assert!(passes(&error) && passes(&Error::new(Kind::Connection, "gone")));
        let untold = Error::new(Kind::Unavailable, "another call waits in its place");
        for error in [untold, Error::new(Kind::Capacity, "full").retry_after_ms(5)] {
            assert!(!passes(&error), "{error}");
        }
    }
}
