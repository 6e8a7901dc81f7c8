//! The principal of a client certificate: a URI among its alternative names, such as
//! `fastps://principal/alice?role=worker&scope=a,b,namespace:n`. Without a scope, it is everything.
//!
//! Characters outside the unreserved set of RFC 3986 are percent-encoded, so that any name of a group fits.

use crate::auth::principal::Principal;
use crate::auth::role::Role;
use crate::auth::scope::Scope;
use fastps_core::error::{Error, Kind, Result};
use std::fmt::{Display, Write};

/// Start of our URIs; a certificate may have others.
pub const SCHEME: &str = "fastps:";
const PREFIX: &str = "fastps://principal/";
const FORM: &str = "fastps://principal/NAME?role=ROLE or fastps://principal/NAME?role=ROLE&scope=GROUPS";
/// Longest URI, in bytes.
const MAX_URI: usize = 16 << 10;
/// Longest name of a principal, in bytes.
const MAX_NAME: usize = 256;

/// Reads the URI of a certificate.
pub fn parse(uri: &str) -> Result<Principal> {
    let wrong = |message| bad(message, FORM, format!("{uri:?}"));
    if uri.len() > MAX_URI {
        return Err(bad("the URI of a principal is too long", format!("at most {MAX_URI} bytes"), uri.len()));
    }
    let rest = uri.strip_prefix(PREFIX).ok_or_else(|| wrong("not the URI of a principal"))?;
    let (name, query) = rest.split_once('?').ok_or_else(|| wrong("the URI of a principal has no role"))?;
    let (role, scope) = match query.split_once('&') {
        None => (query, None),
        Some((role, scope)) => (role, Some(scope)),
    };
    let role: Role =
        role.strip_prefix("role=").ok_or_else(|| wrong("the URI of a principal has no role"))?.parse()?;
    let scope = match scope {
        None => Scope::Everything,
        Some(scope) => {
            let scope = scope.strip_prefix("scope=").ok_or_else(|| wrong("not the URI of a principal"))?;
            decode(scope)?.parse()?
        }
    };
    check_name(name)?;
    Ok(Principal::new(name, role, scope))
}

/// The URI of the certificate for a principal of this name, role and scope.
pub fn text(name: &str, role: Role, scope: &Scope) -> Result<String> {
    check_name(name)?;
    let mut uri = format!("{PREFIX}{name}?role={role}");
    if *scope != Scope::Everything {
        let _ = write!(uri, "&scope={}", encode(&scope.to_string()));
    }
    if uri.len() > MAX_URI {
        return Err(bad("too many groups and namespaces for a certificate", "fewer", scope));
    }
    Ok(uri)
}

/// Fails unless the name of a principal fits into a URI, and into a column of a token file.
pub fn check_name(name: &str) -> Result<()> {
    let fits = |letter: char| letter.is_ascii_alphanumeric() || "._@-".contains(letter);
    let begins = name.starts_with(|first: char| first.is_ascii_alphanumeric());
    if !begins || name.len() > MAX_NAME || !name.chars().all(fits) {
        let form = format!("at most {MAX_NAME} letters, digits and any of . _ @ -, a letter or digit first");
        return Err(bad("invalid name of a principal", form, format!("{name:?}")));
    }
    Ok(())
}

fn encode(text: &str) -> String {
    let mut encoded = String::with_capacity(text.len());
    for byte in text.bytes() {
        if byte.is_ascii_alphanumeric() || b"-._~@,:*".contains(&byte) {
            encoded.push(byte.into());
        } else {
            let _ = write!(encoded, "%{byte:02X}");
        }
    }
    encoded
}

/// Reverses `encode`. Accepts only what that writes, so that a scope has one spelling.
fn decode(text: &str) -> Result<String> {
    let wrong = || bad("the scope is not percent-encoded", "RFC 3986", format!("{text:?}"));
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text.bytes();
    while let Some(byte) = rest.next() {
        if byte == b'%' {
            let mut digit = || char::from(rest.next()?).to_digit(16);
            let (high, low) = digit().zip(digit()).ok_or_else(wrong)?;
            bytes.push((high << 4 | low) as u8);
        } else {
            bytes.push(byte);
        }
    }
    let decoded = String::from_utf8(bytes).map_err(|_| wrong())?;
    if encode(&decoded) == text { Ok(decoded) } else { Err(wrong()) }
}

fn bad(message: &str, expected: impl Display, got: impl Display) -> Error {
    Error::new(Kind::Config, message).expected(expected, got)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_principal_survives_its_uri() {
        for role in Role::ALL {
            for scope in ["*", "a,b", "namespace:n", "a,b&role=admin,namespace:ä=%,%41,/?#"] {
                let scope: Scope = scope.parse().unwrap();
                let uri = text("alice@host-1.example", role, &scope).unwrap();
                assert_eq!(parse(&uri).unwrap(), Principal::new("alice@host-1.example", role, scope));
                assert!(uri.is_ascii() && uri.starts_with(SCHEME), "{uri}");
            }
        }
        let uri = "fastps://principal/alice?role=worker&scope=a,b,namespace:n";
        let alice = Principal::new("alice", Role::Worker, "a,b,namespace:n".parse().unwrap());
        assert_eq!(parse(uri).unwrap(), alice);
        assert_eq!(text("alice", Role::Worker, &alice.scope).unwrap(), uri);
    }

    #[test]
    fn bad_uris_are_refused() {
        let start = "fastps://principal/alice";
        let long = format!("{start}?role=worker&scope={}", "x".repeat(MAX_URI));
        for (uri, says) in [
            ("https://alice?role=worker", "not the URI of a principal"),
            (start, "has no role"),
            (&format!("{start}?scope=a"), "has no role"),
            (&format!("{start}?role=wroker"), "unknown role: expected worker"),
            (&format!("{start}?role="), "unknown role"),
            (&format!("{start}?role=worker&"), "not the URI of a principal"),
            (&format!("{start}?role=worker&role=admin"), "not the URI of a principal"),
            (&format!("{start}?role=worker&scope=a&role=admin"), "percent-encoded"),
            (&format!("{start}?role=worker&scope="), "groups or namespaces"),
            (&format!("{start}?role=worker&scope=a,,b"), "groups or namespaces"),
            (&format!("{start}?role=worker&scope=a%20b"), "groups or namespaces"),
            (&format!("{start}?role=worker&scope=a%2"), "percent-encoded"),
            (&format!("{start}?role=worker&scope=%61"), "percent-encoded"),
            (&format!("{start}?role=worker&scope=%ff"), "percent-encoded"),
            (&long, "too long"),
            ("fastps://principal/?role=worker", "name of a principal"),
            ("fastps://principal/a%20b?role=worker", "name of a principal"),
            ("fastps://principal/-a?role=worker", "name of a principal"),
        ] {
            let error = parse(uri).unwrap_err();
            assert!(error.kind == Kind::Config && error.to_string().contains(says), "{uri}: {error}");
        }
        assert!(text("a b", Role::Worker, &Scope::Everything).is_err());
    }
}
