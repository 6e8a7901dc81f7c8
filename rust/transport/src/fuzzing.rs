//! Entry point of the fuzz target `message` in `fuzz/` and of the replay of its corpus: a message of the data
//! service, given arbitrary bytes. It panics if a reader panics, or if the parts of what was read are not those
//! of a message: few, each of another slice, and together the whole payload.

use crate::convert::{self, MAX_PARTS, Part, Parts, Verb};
use fastps_proto::v1 as pb;
use prost::Message;
use std::collections::HashSet;

/// A request or an answer.
pub fn message(bytes: &[u8]) {
    let Ok(frame) = pb::Frame::decode(bytes) else { return };
    if let Ok(request) = convert::request_from_frame(&frame) {
        match request.verb {
            Verb::PushParts(parts, _) | Verb::PullParts(parts) | Verb::PullVersions(parts) => {
                check(&parts, frame.payload.len());
            }
            Verb::Run(run) => drop(run.program()),
            _ => {}
        }
    }
    let _ = convert::answer_from_frame(frame);
}

fn check(parts: &Parts<'_>, payload: usize) {
    let slices: HashSet<_> = parts.iter().map(|part| part.slice).collect();
    assert_eq!(slices.len(), parts.len(), "a slice has two parts");
    assert!(parts.len() <= MAX_PARTS, "too many parts");
    let body = |k: usize, part: Part<'_>| parts.push(k, part).map_or(0, |push| push.body.len());
    let rows = |part: Part<'_>| part.indices.map_or(0, |indices| indices.bytes().len());
    let used: usize = parts.iter().enumerate().map(|(k, part)| rows(part) + body(k, part)).sum();
    assert_eq!(used, payload, "parts are longer or shorter than the payload");
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test")]
mod tests {
    use super::*;
    use std::path::Path;

    #[test]
    fn the_corpus_is_read_without_a_panic() {
        let corpus = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fuzz/corpus/message");
        let inputs: Vec<_> = std::fs::read_dir(corpus).unwrap().collect();
        assert!(!inputs.is_empty());
        for input in inputs {
            message(&std::fs::read(input.unwrap().path()).unwrap());
        }
    }
}
