//! Wire <-> core types, both ways, in one place: what comes from outside is checked here once, and nowhere else is a
//! number of the wire given a meaning.

mod answer;
mod error;
mod request;
mod spec;

pub(crate) use answer::snapshot;
pub use answer::{Answer, answer_from_frame, fenced, receipt, refused, values, version};
pub use error::{
    error_from_refusal, error_from_status, kind_from_name, kind_name, refusal, status, unreadable,
    unreadable_response,
};
pub use request::{
    Read, Request, Route, Verb, crc32c, plain_len, push_frame, read_frame, request_from_frame, resolve_frame,
};
pub use spec::{optimizer_from_wire, optimizer_to_wire, spec_difference, spec_from_wire, spec_to_wire};
