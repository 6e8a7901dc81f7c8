//! The one error type of the product. Its fields travel through gRPC and become attributes of the Python
//! exception, so every refusal names the tensor, the shard, what was expected and what arrived.

use super::text;
use std::fmt;
use std::ops::{Deref, DerefMut};
use std::sync::Arc;

/// The category of an error: one variant per condition that a caller can react to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Kind {
    /// No tensor (or slice) of this name is registered.
    UnknownTensor,
    /// The shape or the element count does not match the registered tensor.
    Shape,
    /// The dtype does not match, or is not supported.
    DType,
    /// A value is NaN or infinite.
    NonFinite,
    /// A frame is malformed: wrong length, checksum, codec, or a non-canonical body.
    Frame,
    /// An option, name or setting is invalid.
    Config,
    /// The request is valid, but the present state forbids it: another spec, a step that is too early, a
    /// server without a log.
    Precondition,
    /// The request does not fit the configured memory.
    Capacity,
    /// The frame was made for another epoch of the cluster map.
    StaleEpoch,
    /// The gradient is staler than its mode allows. It was refused and counts as never seen.
    StalePush,
    /// The client has no session here, or its lease has expired.
    Lease,
    /// The identity was fenced: the push was not applied and never will be.
    Fenced,
    /// It is no longer known whether the push was applied.
    UnknownOutcome,
    /// The server asks for a token, or for a certificate with a role, and got none that is valid.
    Unauthenticated,
    /// The principal's role does not allow the call, or it is not the owner of the session.
    Denied,
    /// A server restarted without changes that it had acknowledged; [`Details::lost`] lists them. The client
    /// detects this.
    VersionsLost,
    /// The server is stopping or not ready; try again later.
    Unavailable,
    /// The call's deadline passed.
    Deadline,
    /// The connection was lost or could not be made.
    Connection,
    /// A bug in fastps.
    Internal,
}

/// An error with everything that a person needs to act on it. Boxed, so that a successful result stays small.
#[derive(Clone, PartialEq, Eq)]
pub struct Error(Box<Details>);

/// The contents of an error.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Details {
    /// The category.
    pub kind: Kind,
    /// One sentence, lower-case, without the fields below.
    pub message: String,
    /// The tensor concerned.
    pub tensor: Option<Arc<str>>,
    /// The shard that refused.
    pub shard: Option<u32>,
    /// The expected value.
    pub expected: Option<String>,
    /// The value that arrived instead.
    pub got: Option<String>,
    /// When to retry, in milliseconds.
    pub retry_after_ms: Option<u64>,
    /// For [`Kind::VersionsLost`]: the lost changes.
    pub lost: Vec<Lost>,
}

/// Changes of a tensor that a restarted server lacks. If its slices differ, the one that lost most counts.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Lost {
    /// The tensor.
    pub tensor: Arc<str>,
    /// The shard that restarted.
    pub shard: u32,
    /// The number of the client's own acknowledged pushes that were lost; `None` if the server no longer
    /// knows the client.
    pub own: Option<u64>,
    /// The newest version that the client has seen.
    pub seen: u64,
    /// The version that the client found on the restarted server.
    pub now: u64,
}

impl fmt::Display for Lost {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { tensor, shard, own, seen, now } = self;
        write!(f, "{tensor:?} on shard {shard} is at version {now} after {seen}")?;
        match own {
            Some(own) => write!(f, ", without {own} pushes of this client"),
            None => Ok(()),
        }
    }
}

/// Result with the product's error.
pub type Result<T, E = Error> = std::result::Result<T, E>;

impl Error {
    /// A new error without details.
    pub fn new(kind: Kind, message: impl Into<String>) -> Self {
        Self(Box::new(Details {
            kind,
            message: message.into(),
            tensor: None,
            shard: None,
            expected: None,
            got: None,
            retry_after_ms: None,
            lost: Vec::new(),
        }))
    }

    /// Sets the tensor.
    pub fn tensor(mut self, name: impl Into<Arc<str>>) -> Self {
        self.tensor = Some(name.into());
        self
    }

    /// Sets the shard, unless one is set.
    pub fn shard(mut self, shard: u32) -> Self {
        self.shard.get_or_insert(shard);
        self
    }

    /// Sets what was expected and what arrived.
    pub fn expected(mut self, expected: impl fmt::Display, got: impl fmt::Display) -> Self {
        self.expected = Some(expected.to_string());
        self.got = Some(got.to_string());
        self
    }

    /// Sets when to retry.
    pub fn retry_after_ms(mut self, ms: u64) -> Self {
        self.retry_after_ms = Some(ms);
        self
    }
}

/// The error of a name under which no tensor is registered; `known` are the registered ones that are known
/// here.
pub fn unknown_tensor<'a>(
    message: impl Into<String>,
    name: &str,
    known: impl IntoIterator<Item = &'a str>,
) -> Error {
    let known: Vec<_> = known.into_iter().collect();
    let expected = match (text::nearest(name, known.iter().copied()), known.len()) {
        (Some(near), _) => format!("a registered name, such as {near:?}"),
        (None, 0) => "a registered name (register() makes one)".to_owned(),
        (None, _) => "a registered name (names() lists them)".to_owned(),
    };
    Error::new(Kind::UnknownTensor, message).tensor(name).expected(expected, format_args!("{name:?}"))
}

/// Fails for a new name that [`text::printable`] would change. `what` has it, such as "tensor name".
pub fn check_printable(what: &str, name: &str) -> Result<()> {
    let Some((at, hidden)) = name.chars().enumerate().find(|(_, c)| text::is_hidden(*c)) else {
        return Ok(());
    };
    let got = format!("U+{:04X} at character {}", u32::from(hidden), at + 1);
    let expected = "no control, bidirectional or invisible characters";
    Err(Error::new(Kind::Config, format!("invalid {what}")).expected(expected, got))
}

impl From<Details> for Error {
    fn from(details: Details) -> Self {
        Self(Box::new(details))
    }
}

impl Deref for Error {
    type Target = Details;
    fn deref(&self) -> &Details {
        &self.0
    }
}

impl DerefMut for Error {
    fn deref_mut(&mut self) -> &mut Details {
        &mut self.0
    }
}

impl fmt::Debug for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl fmt::Display for Error {
    /// Secrets that were given in the place of something else are left out.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&text::without_secrets(&self.0.to_string()))
    }
}

impl fmt::Display for Details {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)?;
        if let Some(tensor) = &self.tensor {
            write!(f, " (tensor {tensor:?}")?;
            if let Some(shard) = self.shard {
                write!(f, ", shard {shard}")?;
            }
            f.write_str(")")?;
        } else if let Some(shard) = self.shard {
            write!(f, " (shard {shard})")?;
        }
        if let (Some(expected), Some(got)) = (&self.expected, &self.got) {
            write!(f, ": expected {expected}, got {got}")?;
        }
        if let Some(ms) = self.retry_after_ms {
            write!(f, "; try again in {ms} ms")?;
        }
        Ok(())
    }
}

impl std::error::Error for Error {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hidden_characters_are_escaped_and_refused() {
        for (name, code) in [
            ("a\u{1b}]52;c;\u{7}", "U+001B at character 2"),
            ("a\nb", "U+000A"),
            ("\u{7f}", "U+007F at character 1"),
            ("\u{85}", "U+0085"),
            ("ab\u{202e}c", "U+202E at character 3"),
            ("\u{2066}", "U+2066"),
            ("\u{61c}", "U+061C"),
            ("\u{2028}", "U+2028"),
            ("\u{e0041}", "U+E0041"),
        ] {
            let error = check_printable("name of a tensor", name).unwrap_err();
            assert!(error.got.as_ref().unwrap().starts_with(code), "{name:?}: {error}");
            assert_eq!(check_printable("name", &text::printable(name)), Ok(()), "{name:?}");
        }
        assert_eq!(text::printable("a\u{1b}\n\u{202e}\u{e0041}"), r"a\u001b\u000a\u202e\udb40\udc41");
        for name in ["w", "layer 1/weight", "e\u{301}", "الاسم", "می\u{200c}خواهم", "👨\u{200d}👩"]
        {
            assert_eq!((check_printable("name", name), text::printable(name).as_str()), (Ok(()), name));
        }
    }
}
