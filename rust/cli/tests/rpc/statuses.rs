//! Refusals as gRPC statuses, against golden bytes made with Python's `google.rpc` messages.

use bytes::Bytes;
use fastps_core::error::{Details, Error};
use fastps_transport::convert;
use serde_json::Value;

fn cases() -> Vec<Value> {
    let text = include_str!("../../../../tests/vectors/statuses.json");
    serde_json::from_str(text).unwrap()
}

fn error(case: &Value) -> Error {
    let refusal = &case["refusal"];
    let text = |field: &str| refusal[field].as_str().unwrap().to_owned();
    Error::from(Details {
        kind: convert::kind_from_name(&text("kind")),
        message: text("message"),
        tensor: Some(text("tensor").into()),
        shard: Some(refusal["shard"].as_u64().unwrap() as u32),
        expected: Some(text("expected")),
        got: Some(text("got")),
        retry_after_ms: refusal["retry_after_ms"].as_u64(),
        lost: Vec::new(),
    })
}

#[test]
fn a_status_has_the_golden_bytes() {
    let cases = cases();
    assert_eq!(cases.len(), 18, "one of each kind that a server sends");
    for case in cases {
        let error = error(&case);
        assert_eq!(convert::kind_name(error.kind), case["refusal"]["kind"], "{error}");
        let status = convert::status(&error);
        let code = format!("{:?}", status.code()).to_uppercase();
        assert_eq!(code, case["code"].as_str().unwrap().replace('_', ""), "{error}");
        assert_eq!(status.message(), case["message"]);
        let details = Bytes::copy_from_slice(status.details());
        assert_eq!(format!("{details:x}"), case["details"].as_str().unwrap(), "{error}");
        assert_eq!(convert::error_from_status(&status), error);
    }
}
