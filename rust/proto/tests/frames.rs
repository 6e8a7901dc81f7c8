//! Golden frames: their bytes decode to the fields beside them, and encode to the same bytes.

use fastps_proto::v1::{Frame, Header};
use prost::Message;
use serde_json::Value;

const GOLDEN: &str = include_str!("../../../tests/vectors/frames.json");

fn bytes(hex: &str) -> Option<Vec<u8>> {
    (0..hex.len()).step_by(2).map(|k| u8::from_str_radix(hex.get(k..k + 2)?, 16).ok()).collect()
}

/// A number as protobuf's JSON form has it: 64 bits as text.
fn number(value: &Value) -> u64 {
    value.as_u64().or_else(|| value.as_str()?.parse().ok()).unwrap_or(0)
}

/// Reads a number of a header.
type ReadField = fn(&Header) -> u64;

#[test]
fn golden_frames_have_their_fields() {
    let frames: Vec<Value> = serde_json::from_str(GOLDEN).unwrap();
    assert!(frames.len() > 20);
    for golden in frames {
        let (name, raw) = (&golden["name"], bytes(golden["hex"].as_str().unwrap()).unwrap());
        let frame = Frame::decode(&raw[..]).unwrap();
        assert_eq!(frame.encode_to_vec(), raw, "{name}");
        let (header, fields) = (frame.header.unwrap(), &golden["fields"]["header"]);
        assert_eq!(header.kind().as_str_name(), fields["kind"], "{name}");
        let read: [(&str, ReadField); 9] = [
            ("tag", |h| h.tag),
            ("slice", |h| h.slice),
            ("count", |h| h.count),
            ("group", |h| h.group.into()),
            ("epoch", |h| h.epoch),
            ("client", |h| h.client),
            ("sequence", |h| h.sequence),
            ("reservation", |h| h.reservation),
            ("version", |h| h.version.unwrap_or(0)),
        ];
        for (field, get) in read {
            assert_eq!(get(&header), number(&fields[field]), "{name}: {field}");
        }
        assert_eq!(header.parts.len(), fields["parts"].as_array().map_or(0, Vec::len), "{name}");
        assert_eq!(frame.payload.is_empty(), golden["fields"]["payload"].is_null(), "{name}");
    }
}
