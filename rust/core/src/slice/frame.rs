//! [`Push`], the request to a slice, and [`Applied`], its answer. `Push::validate` checks sizes, settings and
//! body once, before anything is looked up or changed; later code relies on it.

use crate::base::correction::Correction;
use crate::base::dtype::DType;
use crate::base::error::{Error, Kind, Result, check_printable};
use crate::base::isa::Isa;
use crate::kernel::codec::CodecId;
use crate::kernel::rows::{Indices, RowLayout};
use crate::tensor::{Apply, SliceId, TensorSpec};

/// Client and sequence number of a push; a slice recognizes a repeated push by it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Identity {
    /// The client's incarnation: a random number that each client object draws for itself.
    pub client: u64,
    /// Sequence number of the client's push, from 1; equal for all slices of one push.
    pub sequence: u64,
}

/// The version that a gradient was computed from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Base {
    /// The slice's version.
    pub version: u64,
    /// How many of the changes up to that version were the pusher's own, if known.
    pub own: Option<u64>,
}

/// Effect of a push on its slice.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Action {
    /// An optimizer step.
    Gradient,
    /// Replaces the values, or those of some rows.
    Assign,
    /// Replaces the optimizer state (all slots, concatenated) and the step count.
    AssignState {
        /// The new step count.
        step: u64,
    },
}

/// Largest step count that a state may claim: float64 represents it exactly, and no run comes near it.
pub const MAX_STEP: u64 = 1 << 53;

/// Longest note of a push, in bytes.
pub const MAX_NOTE_BYTES: usize = 64;

/// Fails for a note that is too long, or that a terminal would not show as it is.
pub fn check_note(note: &str) -> Result<()> {
    if note.len() > MAX_NOTE_BYTES {
        let expected = format!("at most {MAX_NOTE_BYTES} bytes of UTF-8");
        let error = Error::new(Kind::Config, "the note of a push is too long");
        return Err(error.expected(expected, format!("{} bytes", note.len())));
    }
    check_printable("note of a push", note)
}

/// One push to one slice. The body is borrowed from the caller's array or from the received message.
#[derive(Clone, Copy, Debug)]
pub struct Push<'a> {
    /// The slice.
    pub slice: SliceId,
    /// The action on the slice.
    pub action: Action,
    /// The identity of the push.
    pub identity: Identity,
    /// The version that it is based on.
    pub base: Option<Base>,
    /// Learning rate instead of the optimizer's.
    pub lr: Option<f64>,
    /// Factor on the gradient.
    pub scale: Option<f32>,
    /// Weight of the gradient in the mean that makes a version; `None`: 1.
    pub weight: Option<f32>,
    /// Momentum instead of the optimizer's.
    pub momentum: Option<f64>,
    /// `beta1` instead of Adam's.
    pub beta1: Option<f64>,
    /// How its mode corrects a stale gradient. The slice evaluates this and puts the result into `scale`,
    /// `momentum` and `beta1`.
    pub correction: Option<Correction>,
    /// The slice's number of elements as the sender knows it; of a sparse push, the number of elements of its
    /// rows in the slice.
    pub count: u64,
    /// The rows of a sparse gradient or assignment; `None`: the whole slice.
    pub indices: Option<Indices<'a>>,
    /// The encoding of the body.
    pub codec: CodecId,
    /// The body.
    pub body: &'a [u8],
    /// The largest magnitude of the body's elements, or a bound of it. `Some`: the body is known to be finite
    /// and canonical, because it was made in this process, after the finite check.
    pub largest: Option<f64>,
    /// Set if the push is never repeated and its outcome never queried: a slice that applies it at once need
    /// not remember it.
    pub once: bool,
    /// The client has the answers to all its pushes to the slice up to this number; 0: it does not say.
    pub acknowledged: u64,
    /// What the gradient came from, in its sender's words, for a log that keeps history; may be empty.
    pub note: &'a str,
}

/// The slice, as far as the validation of a push needs it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Target<'a> {
    pub(crate) spec: &'a TensorSpec,
    pub(crate) len: usize,
    pub(crate) slots: usize,
    pub(crate) layout: RowLayout,
}

impl<'a> Push<'a> {
    /// A gradient for `count` elements of a slice, without settings: the base of every other push.
    #[inline(always)]
    pub fn gradient(slice: SliceId, identity: Identity, count: u64, codec: CodecId, body: &'a [u8]) -> Self {
        Self {
            slice,
            action: Action::Gradient,
            identity,
            base: None,
            lr: None,
            scale: None,
            weight: None,
            momentum: None,
            beta1: None,
            correction: None,
            count,
            indices: None,
            codec,
            body,
            largest: None,
            once: false,
            acknowledged: 0,
            note: "",
        }
    }
}

impl Push<'_> {
    /// Validates a push before anything is looked up or changed: its sizes against the slice's, its settings,
    /// and every byte of a body that is not known to be good. Returns the body's largest magnitude, or a
    /// bound of it.
    pub(crate) fn validate(&self, isa: Isa, target: Target<'_>) -> Result<f64> {
        let Target { spec: TensorSpec { dtype, .. }, slots, .. } = target;
        let dtype = *dtype;
        if self.codec.dtype() != dtype.computed() {
            return Err(Error::new(Kind::DType, "the codec is for tensors of another dtype")
                .expected(format!("a codec of {}", dtype.computed().name()), self.codec.name()));
        }
        let slice_len = match self.indices {
            None => target.len,
            Some(indices) => self.check_sparse(indices, target)?,
        };
        if self.count != slice_len as u64 {
            return Err(Error::new(Kind::Shape, "the frame's element count is not the slice's")
                .expected(format!("{slice_len} elements"), format!("{} elements", self.count)));
        }
        if let Some(lr) = self.lr.filter(|lr| !(*lr as f32).is_finite() || *lr < 0.0) {
            return Err(Error::new(Kind::Config, "invalid lr of a push").expected("a finite number >= 0", lr));
        }
        target.spec.optimizer.check_rate(self.lr)?;
        if let Some(scale) = self.scale.filter(|scale| !scale.is_finite()) {
            return Err(
                Error::new(Kind::Config, "invalid scale of a push").expected("a finite number", scale)
            );
        }
        if let Some(weight) = self.weight.filter(|weight| !weight.is_finite() || *weight <= 0.0) {
            return Err(
                Error::new(Kind::Config, "invalid weight of a push").expected("a finite number > 0", weight)
            );
        }
        // Only a record from a log carries a momentum or a beta1, and it replaces the optimizer's.
        if let Some(momentum) =
            self.momentum.filter(|momentum| !(*momentum as f32).is_finite() || *momentum < 0.0)
        {
            return Err(Error::new(Kind::Config, "invalid momentum of a push")
                .expected("a finite number >= 0", momentum));
        }
        if let Some(beta1) = self.beta1.filter(|beta1| !(0.0..1.0).contains(beta1)) {
            return Err(
                Error::new(Kind::Config, "invalid beta1 of a push").expected("a number >= 0 and < 1", beta1)
            );
        }
        if self.correction.is_some_and(|asked| asked.reject && asked.max_staleness.is_none()) {
            return Err(Error::new(Kind::Config, "a push that refuses stale gradients needs their limit")
                .expected("max_staleness", "nothing"));
        }
        check_note(self.note)?;
        if let Action::AssignState { step } = self.action
            && step > MAX_STEP
        {
            return Err(Error::new(Kind::Config, "invalid step").expected("at most 2^53", step));
        }
        let plain = match self.action {
            Action::Gradient | Action::AssignState { .. } => CodecId::plain(dtype.computed()),
            Action::Assign => CodecId::plain(dtype),
        };
        if self.action != Action::Gradient && self.codec != plain {
            return Err(Error::new(Kind::Frame, "an assignment is not compressed")
                .expected(plain.name(), self.codec.name()));
        }
        let elements = match self.action {
            Action::Gradient | Action::Assign => slice_len,
            Action::AssignState { .. } => slice_len * slots,
        };
        if crate::base::fault::fault("frame_length_trusted") {
            return Ok(0.0);
        }
        if let Some(largest) = self.largest
            && self.body.len() == self.codec.body_len(elements)
        {
            return Ok(largest);
        }
        match self.action {
            // Finite gradients can drive the state to infinity (see `optim`), so a state is restored with any
            // values.
            Action::AssignState { .. } if self.body.len() == plain.body_len(elements) => Ok(0.0),
            _ => self.codec.validate(isa, self.body, elements),
        }
    }

    /// Fails unless the push may be sparse; returns the number of its elements.
    fn check_sparse(&self, indices: Indices<'_>, target: Target<'_>) -> Result<usize> {
        match self.action {
            Action::Gradient => {
                target.spec.need_float32("a sparse gradient")?;
                check_sparse_codec(self.codec)?;
                target.spec.check_sparse()?;
            }
            Action::Assign => check_row_assignment(target.spec.dtype, target.spec.apply)?,
            Action::AssignState { .. } => {
                return Err(Error::new(Kind::Frame, "an assignment of state names no rows"));
            }
        }
        target.layout.elements(indices)
    }
}

/// Fails unless rows of such a tensor can be assigned.
pub(crate) fn check_row_assignment(dtype: DType, apply: Apply) -> Result<()> {
    if apply != Apply::Exact {
        let error = Error::new(Kind::Precondition, "rows of this tensor cannot be assigned");
        return Err(error.expected("apply=\"exact\"", format!("apply={:?}", apply.name())));
    }
    if dtype.computed() != DType::Float32 {
        let error = Error::new(Kind::DType, "rows of this tensor cannot be assigned");
        return Err(error.expected("float32 or bfloat16", dtype.name()));
    }
    Ok(())
}

/// Fails for a codec that sparse pushes do not support.
pub(crate) fn check_sparse_codec(codec: CodecId) -> Result<()> {
    if codec != CodecId::OneBit {
        return Ok(());
    }
    let why = "a sparse push has no error feedback, which OneBit needs: a residual would wait for rows that may never come again";
    Err(Error::new(Kind::Config, why).expected("Float32, BFloat16, Int8 or FourBit", "OneBit"))
}

/// The answer of a slice that applied a push.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Applied {
    /// The slice's version right after the push.
    pub version: u64,
    /// How many changes up to that version were the pusher's own.
    pub own: u64,
    /// Changes by others between the base and this push; `None` when the base is unknown.
    pub staleness: Option<u64>,
    /// The factor that the slice applied to the gradient.
    pub scale: f32,
    /// The momentum of the step, of Adam its `beta1`; `None` without one, for rows, and for a repeat.
    pub momentum: Option<f64>,
    /// Set if the slice had applied the push before; then it changed nothing now.
    pub duplicate: bool,
}
