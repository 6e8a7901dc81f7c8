//! Error feedback (Seide et al. 2014; Karimireddy et al. 2019): the part of a gradient that a body cannot
//! express is kept as a residual and added to the next gradient, so that nothing is lost over time. This file
//! has the residuals of one worker, and how what was not applied returns to them.

use super::{Body, CodecId, WithBody};
use crate::base::block::{Block, blocks};
use crate::base::error::{Error, Kind, Result};
use crate::base::isa::{Isa, Kernel};
use std::collections::BTreeMap;
use std::ops::Range;

/// Undoes the encoding of `values`: restores the residual, up to the rounding of the sums. Works for codecs
/// whose bodies mark blocks that are not finite.
pub(crate) fn take_back(isa: Isa, codec: CodecId, values: &[f32], body: &[u8], residual: &mut [f32]) {
    let Some(block) = codec.marked() else { return };
    let mut decoded = Block::ZERO;
    for (k, (e, g)) in residual.chunks_mut(block).zip(values.chunks(block)).enumerate() {
        if codec.block_was_finite(body, k) {
            let decoded = &mut decoded.0[..e.len()];
            codec.decode_block(isa, body, values.len(), k * block, decoded);
            for ((e, d), g) in e.iter_mut().zip(decoded).zip(g) {
                *e = *e + *d - g;
            }
        }
    }
}

/// The residuals of one worker (or one bound list), one per tensor. They are part of its state: after they
/// are saved and loaded, training continues bit for bit.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ErrorFeedback {
    residuals: BTreeMap<Box<str>, Vec<f32>>,
}

impl ErrorFeedback {
    /// No residuals yet.
    pub fn new() -> Self {
        Self::default()
    }

    /// The residual of a tensor of `len` elements; zeros at first use. Fails if the tensor had another length
    /// before: a residual belongs to particular elements, and it is unknown which of them are still the same.
    pub fn residual(&mut self, name: &str, len: usize) -> Result<&mut [f32]> {
        // Two lookups, because an entry would need an owned name at every push.
        if !self.residuals.contains_key(name) {
            self.residuals.insert(name.into(), vec![0.0; len]);
        }
        let residual = self.existing(name)?;
        if residual.len() != len {
            return Err(Error::new(Kind::Shape, "the residual of error feedback has another length")
                .tensor(name)
                .expected(format!("{} elements", residual.len()), format!("{len} elements")));
        }
        Ok(residual)
    }

    /// Adds a refused or fenced body back to the residual, so that a later push carries it. The body holds
    /// `n` elements of the tensor from `first_element` on. On an error the residual is unchanged.
    pub fn give_back(
        &mut self,
        isa: Isa,
        name: &str,
        first_element: usize,
        codec: CodecId,
        body: &[u8],
        n: usize,
    ) -> Result<()> {
        codec.validate(isa, body, n).map_err(|e| e.tensor(name))?;
        if crate::base::fault::fault("residual_lost") {
            return Ok(());
        }
        let residual = self.existing(name)?;
        let len = residual.len();
        let Some(part) = first_element.checked_add(n).and_then(|end| residual.get_mut(first_element..end))
        else {
            return Err(Error::new(Kind::Shape, "a returned body exceeds its tensor")
                .tensor(name)
                .expected(format!("{len} elements"), format!("{n} elements from {first_element} on")));
        };
        // Two passes, because an overflow must be found before the residual changes.
        if isa.run(GiveBack { codec, body, residual: part, store: false }) {
            isa.run(GiveBack { codec, body, residual: part, store: true });
            return Ok(());
        }
        Err(Error::new(Kind::NonFinite, "the residual of error feedback overflows").tensor(name))
    }

    /// Clears some elements of a residual, whose gradient's step overflows: its rounding errors may be as
    /// large.
    pub fn forget(&mut self, name: &str, elements: Range<usize>) {
        let part = self.residuals.get_mut(name).and_then(|residual| residual.get_mut(elements));
        part.unwrap_or_default().fill(0.0);
    }

    /// All residuals in the order of their names, for saving.
    pub fn entries(&self) -> impl Iterator<Item = (&str, &[f32])> {
        self.residuals.iter().map(|(name, residual)| (&**name, &**residual))
    }

    /// Sets a saved residual, and replaces the present one if there is one.
    pub fn load(&mut self, name: &str, values: Vec<f32>) -> Result<()> {
        if let Some(i) = values.iter().position(|x| !x.is_finite()) {
            return Err(Error::new(
                Kind::NonFinite,
                format!("element {i} of a saved residual is not finite"),
            )
            .tensor(name)
            .expected("a finite value", values[i]));
        }
        self.residuals.insert(name.into(), values);
        Ok(())
    }

    /// Drops all residuals, for example after the model was loaded from elsewhere.
    pub fn clear(&mut self) {
        self.residuals.clear();
    }

    fn existing(&mut self, name: &str) -> Result<&mut Vec<f32>> {
        self.residuals
            .get_mut(name)
            .ok_or_else(|| Error::new(Kind::UnknownTensor, "the tensor has no residual").tensor(name))
    }
}

/// Returns whether all sums of residual and body are finite; with `store`, also stores them.
struct GiveBack<'a> {
    codec: CodecId,
    body: &'a [u8],
    residual: &'a mut [f32],
    store: bool,
}

impl Kernel for GiveBack<'_> {
    type Out = bool;
    #[inline(always)]
    fn run(self) -> bool {
        let Self { codec, body, .. } = self;
        codec.select(body, self.residual.len(), self)
    }
}

impl WithBody for GiveBack<'_> {
    type Out = bool;
    #[inline(always)]
    fn run_with(self, body: impl Body) -> bool {
        let Self { residual, store, .. } = self;
        let mut decoded = Block::ZERO;
        let decoded = &mut decoded.0;
        let mut finite = true;
        for (at, len) in blocks(residual.len()) {
            body.decode(at, &mut decoded[..len]);
            for (e, d) in residual[at..at + len].iter_mut().zip(&*decoded) {
                let sum = *e + d;
                finite &= sum.is_finite();
                *e = if store { sum } else { *e };
            }
        }
        finite
    }
}
