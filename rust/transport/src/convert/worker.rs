//! Reports of workers, and the lists of workers and groups in statistics.

use fastps_core::error::{Error, Kind, Result};
use fastps_core::verbs::{GroupState, WorkerReport, WorkerState};
use fastps_proto::v1 as pb;
use prost::Message;
use std::time::Duration;

/// Longest report, encoded.
pub const MAX_REPORT_BYTES: usize = 512;

/// A report as another type with the same fields; the compiler compares them.
macro_rules! with_fields_of {
    ($report:expr, $($kind:ident)::+) => {{
        let report = $report.clone();
        $($kind)::+ {
            rank: report.rank,
            host: report.host,
            steps: report.steps,
            loss: report.loss,
            pushes: report.pushes,
            bytes: report.bytes,
            staleness_p50: report.staleness_p50,
            staleness_p99: report.staleness_p99,
            waited: report.waited,
            rejected: report.rejected,
            scaled: report.scaled,
            mode: report.mode,
            codec: report.codec,
            step_seconds: report.step_seconds,
            name: report.name,
            momentum: report.momentum,
        }
    }};
}

/// A report in wire form.
pub fn worker_report_to_wire(report: &WorkerReport) -> pb::WorkerReport {
    with_fields_of!(report, pb::WorkerReport)
}

/// Reads a report; fails if it is too long or has numbers or names that nothing can show.
pub fn worker_report_from_wire(report: &pb::WorkerReport) -> Result<WorkerReport> {
    let length = report.encoded_len();
    if length > MAX_REPORT_BYTES {
        let error = Error::new(Kind::Config, "a worker's report is too long");
        return Err(error.expected(format!("at most {MAX_REPORT_BYTES} bytes"), format!("{length} bytes")));
    }
    let report = with_fields_of!(report, WorkerReport);
    report.check().map(|()| report)
}

/// A client's session in wire form.
pub fn worker_state_to_wire(state: &WorkerState) -> pb::Session {
    pb::Session {
        number: state.session,
        name: state.name.clone(),
        applied: state.applied,
        idle_ms: state.idle.as_millis() as u64,
        report: state.report.as_ref().map(worker_report_to_wire),
    }
}

/// Reads a client's session. A report that breaks the rules is left out.
pub fn worker_state_from_wire(session: pb::Session) -> WorkerState {
    WorkerState {
        session: session.number,
        applied: session.applied,
        idle: Duration::from_millis(session.idle_ms),
        report: session.report.as_ref().and_then(|report| worker_report_from_wire(report).ok()),
        name: session.name,
    }
}

/// A group in wire form.
pub fn group_state_to_wire(state: &GroupState) -> pb::GroupState {
    let GroupState { name, mode, workers, slowest, fastest } = state.clone();
    pb::GroupState { name, mode, workers, slowest, fastest }
}

/// Reads a group.
pub fn group_state_from_wire(state: pb::GroupState) -> GroupState {
    let pb::GroupState { name, mode, workers, slowest, fastest } = state;
    GroupState { name, mode, workers, slowest, fastest }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_report_survives_the_wire_if_it_is_short_and_finite() {
        let fine = WorkerReport {
            rank: Some(3),
            host: "host-a".to_owned(),
            steps: u64::MAX,
            loss: Some(0.5),
            waited: Some(1.0),
            mode: "Async".to_owned(),
            ..WorkerReport::default()
        };
        let wire = worker_report_to_wire(&fine);
        assert_eq!(worker_report_from_wire(&wire).unwrap(), fine);
        let wrong = [
            (pb::WorkerReport { host: "x".repeat(10 << 10), ..wire.clone() }, "at most 512 bytes"),
            (pb::WorkerReport { loss: Some(f64::NAN), ..wire.clone() }, "loss"),
            (pb::WorkerReport { loss: Some(f64::INFINITY), ..wire.clone() }, "loss"),
            (pb::WorkerReport { waited: Some(-0.1), ..wire.clone() }, "0 to 1"),
            (pb::WorkerReport { waited: Some(f64::NAN), ..wire.clone() }, "0 to 1"),
            (pb::WorkerReport { momentum: Some(-0.5), ..wire.clone() }, "0 to 1"),
            (pb::WorkerReport { step_seconds: Some(f64::INFINITY), ..wire }, "seconds"),
        ];
        for (report, why) in wrong {
            let error = worker_report_from_wire(&report).unwrap_err().to_string();
            assert!(error.contains(why), "{error}");
        }
    }
}
