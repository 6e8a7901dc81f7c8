//! Converts between wire messages and core types. Only this module checks outside input, once, and gives
//! numbers on the wire a meaning.

mod answer;
mod error;
mod fields;
pub mod header;
mod hello;
mod kinds;
mod mode;
mod parts;
mod portion;
mod registrations;
mod request;
mod space;
mod spec;
mod vector;
mod worker;

pub use answer::{
    Answer, answer_from_frame, fenced, keeping, lent, receipt, refused, snapshot, values, version,
};
pub use error::{
    error_from_refusal, error_from_status, plain_text, refusal, status, timed_out, unreadable,
    unreadable_response,
};
pub use fields::Read;
pub use hello::{
    Ack, CAN_LOG, COPIED, DTYPES, HISTORY, INITIAL_PARTS, MATCHES_STALENESS, PARTS, PULL_CODEC,
    REGISTRATIONS, ROUNDS, VERSIONS, can, check_mark_name, cluster_digest,
};
pub use kinds::{KIND_NAMES, Retry, is_conclusive, kind_from_name, kind_name, passes, retry};
pub use mode::{membership_from_wire, membership_to_wire, mode_from_wire, mode_to_wire};
pub use parts::{
    MAX_PARTS, Part, Parts, are_initial, are_whole, receipts, rows_header, values_header, versions,
};
pub use portion::{ask_from_wire, ask_to_wire, given_from_wire, given_to_wire};
pub use registrations::{MAX_REGISTERED, MAX_REGISTERED_BYTES, MAX_RESERVATIONS, pages, registered_bytes};
pub use request::{
    Request, Route, Verb, crc32c, plain_len, push_frame, read_frame, request_from_frame, resolve_frame,
};
pub use space::{
    batch_from_wire, batch_to_wire, given_portion_from_wire, given_portion_to_wire, replica_from_wire,
    replica_to_wire, report_from_wire, report_to_wire, seat_request_from_wire, seat_request_to_wire,
    space_from_wire, space_to_wire,
};
pub use spec::{optimizer_from_wire, optimizer_to_wire, spec_from_wire, spec_to_wire};
pub use vector::{
    MAX_SCALAR_BYTES, PortionOf, Run, VectorRead, portion_header, portion_receipt, program_to_wire,
    run_header, scalars, vector_read_header,
};
pub use worker::{
    MAX_REPORT_BYTES, group_state_from_wire, group_state_to_wire, worker_report_from_wire,
    worker_report_to_wire, worker_state_from_wire, worker_state_to_wire,
};
