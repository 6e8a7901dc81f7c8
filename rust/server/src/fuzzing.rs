//! Entry points of the fuzz targets in `fuzz/` and of the replay of their corpus: the readers of credentials,
//! given arbitrary bytes. An entry point panics if a reader panics, or if what it has read is written as
//! something else.

use crate::auth::access::shown;
use crate::auth::principal_uri as uri;
use crate::auth::token_file::TokenFile;
use fastps_transport::token::TOKEN_LENGTH;
use http::header::AUTHORIZATION;
use http::{HeaderMap, HeaderValue};

/// The text of a token file.
pub fn token_file(bytes: &[u8]) {
    let Ok(read) =
        std::str::from_utf8(bytes).map_err(drop).and_then(|text| TokenFile::parse(text).map_err(drop))
    else {
        return;
    };
    let lines: Vec<_> = read.entries().iter().map(ToString::to_string).collect();
    let again = TokenFile::parse(&lines.join("\n"));
    let again = again.as_ref().map(TokenFile::entries);
    assert_eq!(again, Ok(read.entries()), "what was read is written otherwise");
}

/// The values of the header `authorization`, one a line.
pub fn authorization(bytes: &[u8]) {
    let values = bytes.split(|byte| *byte == b'\n').map(HeaderValue::from_bytes);
    let headers: HeaderMap = values.flatten().map(|value| (AUTHORIZATION, value)).collect();
    let given = headers.get_all(AUTHORIZATION).iter().count();
    match shown(&headers) {
        Ok(Some(token)) => {
            assert_eq!((token.len(), given), (TOKEN_LENGTH, 1));
            assert!(TokenFile::default().find(token.as_bytes(), 0).is_none(), "there are no tokens");
        }
        Ok(None) => assert_eq!(given, 0, "a header is overlooked"),
        Err(()) => assert!(given > 0, "no header has another form"),
    }
}

/// A URI among the names of a client's certificate.
pub fn principal_uri(bytes: &[u8]) {
    let Ok(text) = std::str::from_utf8(bytes) else { return };
    let Ok(read) = uri::parse(text) else { return };
    let written = uri::text(read.name.as_deref().unwrap_or_default(), read.role, &read.scope);
    let again = written.and_then(|written| uri::parse(&written));
    assert_eq!(again, Ok(read), "what was read is written otherwise");
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::path::Path;

    /// Runs a target on every input of its corpus.
    fn replay(name: &str, target: fn(&[u8])) {
        let corpus = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fuzz/corpus").join(name);
        let inputs: Vec<_> = std::fs::read_dir(corpus).unwrap().collect();
        assert!(!inputs.is_empty(), "{name}");
        for input in inputs {
            target(&std::fs::read(input.unwrap().path()).unwrap());
        }
    }

    #[test]
    fn the_corpus_is_read_without_a_panic() {
        replay("token_file", token_file);
        replay("authorization", authorization);
        replay("principal_uri", principal_uri);
    }
}
