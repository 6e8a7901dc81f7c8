//! The one error type of the product. The same fields travel through gRPC and surface as attributes of the
//! Python exception, so a refusal always names the tensor, the shard, what was expected and what came.

use std::fmt;
use std::ops::{Deref, DerefMut};
use std::sync::Arc;

/// What went wrong; one variant per thing that a caller can react to.
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
    /// The request is in order, but what is there forbids it: another spec, a step that came too early, a
    /// server without a log.
    Precondition,
    /// The request does not fit the configured memory.
    Capacity,
    /// The frame was made for another epoch of the cluster map.
    StaleEpoch,
    /// The gradient is staler than its mode allows: refused, and counts as never seen.
    StalePush,
    /// The client has no session here, or its lease ran out.
    Lease,
    /// The identity was fenced: the push was not applied and never will be.
    Fenced,
    /// Nobody can tell any more whether the push was applied.
    UnknownOutcome,
    /// The principal's role does not allow the call.
    Denied,
    /// Changes that were told are gone, since a server was started anew; [`Details::lost`] says which. Found
    /// by the client.
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

/// An error with everything that a person needs to act on it. Boxed, so that a result that is well stays
/// small.
#[derive(Clone, PartialEq, Eq)]
pub struct Error(Box<Details>);

/// What an error says.
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
    /// What would have been right.
    pub expected: Option<String>,
    /// What came instead.
    pub got: Option<String>,
    /// When trying again makes sense, in milliseconds.
    pub retry_after_ms: Option<u64>,
    /// Of [`Kind::VersionsLost`]: what is gone.
    pub lost: Vec<Lost>,
}

/// What a restarted server lacks of a tensor. Where slices differ, of the one that lost most.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Lost {
    /// The tensor.
    pub tensor: Arc<str>,
    /// The shard that was started anew.
    pub shard: u32,
    /// How many of the client's own pushes are gone that were acknowledged; `None`: the server knows the
    /// client no more.
    pub own: Option<u64>,
    /// The newest version that the client was told.
    pub seen: u64,
    /// The version that the server had when it was back, as the client found it.
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

    /// Names the tensor.
    pub fn tensor(mut self, name: impl Into<Arc<str>>) -> Self {
        self.tensor = Some(name.into());
        self
    }

    /// Names the shard, unless it is named already.
    pub fn shard(mut self, shard: u32) -> Self {
        self.shard.get_or_insert(shard);
        self
    }

    /// Says what was expected and what came.
    pub fn expected(mut self, expected: impl fmt::Display, got: impl fmt::Display) -> Self {
        self.expected = Some(expected.to_string());
        self.got = Some(got.to_string());
        self
    }

    /// Says when to try again.
    pub fn retry_after_ms(mut self, ms: u64) -> Self {
        self.retry_after_ms = Some(ms);
        self
    }
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
