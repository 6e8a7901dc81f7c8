//! A token: 256 random bits that prove who calls, as text that a person can copy. It is `fps_`, 64
//! hexadecimal digits, and the CRC-32 of all before it in 8 more, which tells a token that was cut from a
//! wrong one.

use crc_fast::{CrcAlgorithm, checksum};
use fastps_core::error::{Error, Kind, Result};
use std::fmt;
use std::fmt::Write;

/// Start of every token, by which scanners of repositories find one.
pub const PREFIX: &str = "fps_";
const SECRET_BYTES: usize = 32;
const CHECKSUM_DIGITS: usize = 8;
/// Length of a token in characters.
pub const TOKEN_LENGTH: usize = PREFIX.len() + 2 * SECRET_BYTES + CHECKSUM_DIGITS;

/// A token. Debug output omits it.
#[derive(Clone)]
pub struct Token(String);

impl Token {
    /// Draws a new token from the system's random numbers.
    pub fn draw() -> Result<Self> {
        let mut secret = [0; SECRET_BYTES];
        getrandom::fill(&mut secret)
            .map_err(|error| Error::new(Kind::Internal, format!("no random numbers: {error}")))?;
        let mut text = PREFIX.to_owned();
        for byte in secret {
            let _ = write!(text, "{byte:02x}");
        }
        let sum = crc(&text);
        let _ = write!(text, "{sum:08x}");
        Ok(Self(text))
    }

    /// Checks the form of a token. The error does not contain it.
    pub fn parse(text: &str) -> Result<Self> {
        let bad = |expected: String, got: String| {
            Err(Error::new(Kind::Config, "not a token of fastps").expected(expected, got))
        };
        if !text.starts_with(PREFIX) {
            return bad(format!("text that starts with {PREFIX}"), "other text".to_owned());
        }
        if text.len() != TOKEN_LENGTH {
            return bad(format!("{TOKEN_LENGTH} characters"), format!("{} bytes", text.len()));
        }
        let (body, sum) = text.split_at_checked(TOKEN_LENGTH - CHECKSUM_DIGITS).unwrap_or((text, ""));
        if sum != format!("{:08x}", crc(body)) {
            return bad("a token whose checksum is right".to_owned(), "one that was changed".to_owned());
        }
        Ok(Self(text.to_owned()))
    }

    /// Its text, for the wire or a file.
    pub fn expose(&self) -> &str {
        &self.0
    }
}

fn crc(text: &str) -> u32 {
    checksum(CrcAlgorithm::Crc32IsoHdlc, text.as_bytes()) as u32
}

impl fmt::Debug for Token {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Token(..)")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_token_is_random_and_checked() {
        let (token, other) = (Token::draw().unwrap(), Token::draw().unwrap());
        assert_ne!(token.expose(), other.expose());
        assert_eq!(Token::parse(token.expose()).unwrap().expose(), token.expose());
        assert_eq!(format!("{token:?}"), "Token(..)");
        // zlib.crc32(b"fps_" + b"0" * 64)
        let zero = format!("fps_{}78107bdd", "0".repeat(64));
        Token::parse(&zero).unwrap();
    }

    #[test]
    fn a_token_that_was_changed_is_refused_and_not_shown() {
        let token = Token::draw().unwrap();
        let text = token.expose();
        let flipped = |k: usize| {
            let mut bytes = text.as_bytes().to_vec();
            bytes[k] = if bytes[k] == b'0' { b'1' } else { b'0' };
            String::from_utf8(bytes).unwrap()
        };
        let changed = (PREFIX.len()..TOKEN_LENGTH).map(flipped);
        let others = ["", "fps_", &text[..40], &format!("{text}\n"), &text.to_uppercase(), &"ä".repeat(38)];
        for bad in changed.chain(others.map(ToOwned::to_owned)) {
            let error = Token::parse(&bad).unwrap_err().to_string();
            assert!(bad.is_empty() || !error.contains(&bad[4.min(bad.len())..]) || bad == "fps_", "{error}");
        }
    }
}
