//! [`Residue`]: an encoded body, kept until its slice has answered, so that error feedback gets back the
//! content of a body that is never applied. Store and client keep one for each slice in doubt.

use crate::base::error::{Kind, Result};
use crate::base::isa::Isa;
use crate::base::sync::{Arc, Mutex, lock};
use crate::kernel::codec::{CodecId, ErrorFeedback};
use std::ops::Range;

/// One slice's body, and the residual that its content belongs to.
#[derive(Debug)]
pub struct Residue<B> {
    /// The instruction set to decode with.
    pub isa: Isa,
    /// The residuals.
    pub feedback: Arc<Mutex<ErrorFeedback>>,
    /// The tensor.
    pub tensor: Arc<str>,
    /// The slice's elements in the tensor.
    pub elements: Range<usize>,
    /// The encoding of the body.
    pub codec: CodecId,
    /// The body.
    pub body: B,
}

impl<B: AsRef<[u8]>> Residue<B> {
    /// Does what a refusal of this kind asks for. A gradient that is late, or whose step overflows, would be
    /// refused again, so its content does not return.
    pub fn refused(self, why: Kind) -> Result<()> {
        match why {
            Kind::StalePush | Kind::Lease => {}
            Kind::NonFinite => lock(&self.feedback).forget(&self.tensor, self.elements),
            _ => return self.give_back(),
        }
        Ok(())
    }

    /// Returns the content to the residual, because it was not applied and never will be. Consumes itself, so
    /// this happens once.
    pub fn give_back(self) -> Result<()> {
        let Self { isa, feedback, tensor, elements, codec, body } = self;
        lock(&feedback).give_back(isa, &tensor, elements.start, codec, body.as_ref(), elements.len())
    }
}
