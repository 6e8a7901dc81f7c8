//! Codecs turn the gradient of one slice into bytes and back. The bytes are a contract that is the same in
//! every language (`protos/README.md`). There is one file per codec; this one names them and holds what they
//! share.

mod bfloat16;
mod bodies;
mod encode;
mod error_feedback;
mod float32;
mod float64;
mod fourbit;
mod int8;
mod list;
mod onebit;
pub(super) mod philox;

use bfloat16::BFloat16Body;
pub(crate) use bfloat16::widen as widen_bfloat16;
pub use bodies::Bodies;
pub use error_feedback::ErrorFeedback;
pub(crate) use error_feedback::take_back;
pub(crate) use float32::Float32Body;
pub(crate) use float64::lanes as float64_lanes;
use fourbit::FourBitBody;
use int8::Int8Body;
use onebit::OneBitBody;

use crate::base::block::Lane;
use crate::base::dtype::DType;
use crate::base::error::{Error, Kind, Result};
use crate::base::isa::Isa;
use std::ops::Range;

list::codecs! {
    /// IEEE single precision, little-endian.
    Float32 = 1, float32, Float32Body;
    /// The upper half of a float32, rounded to nearest even.
    BFloat16 = 2, bfloat16, BFloat16Body;
    /// One signed byte per element, one power-of-two scale byte per 64 elements.
    Int8 = 3, int8, Int8Body;
    /// One sign bit per element, two means per 1024 elements.
    OneBit = 4, onebit, OneBitBody;
    /// One sign and one of seven powers of two per element, one scale byte per 64 elements.
    FourBit = 6, fourbit, FourBitBody;
}

impl CodecId {
    /// The codec with this number on the wire and in files.
    pub fn by_number(number: i32) -> Option<Self> {
        Self::ALL.into_iter().find(|codec| *codec as i32 == number)
    }

    /// The codec that stores values of this type unchanged.
    pub fn plain(dtype: DType) -> Self {
        match dtype {
            DType::Float32 => Self::Float32,
            DType::Float64 => Self::Float64,
            DType::BFloat16 => Self::BFloat16,
        }
    }

    /// The type of the gradients that it encodes.
    pub fn dtype(self) -> DType {
        if self == Self::Float64 { DType::Float64 } else { DType::Float32 }
    }

    /// True if the `n` values of a body were finite, as far as the body marks that.
    pub(crate) fn was_finite(self, body: &[u8], n: usize) -> bool {
        self.marked().is_none_or(|block| (0..n.div_ceil(block)).all(|k| self.block_was_finite(body, k)))
    }

    /// Checks a body from outside: exact length, finite, canonical. This must precede any decoding. Returns
    /// the largest magnitude of its elements, or a bound of it.
    pub fn validate(self, isa: Isa, body: &[u8], n: usize) -> Result<f64> {
        let expected = self.body_len(n);
        if body.len() != expected {
            return Err(Error::new(Kind::Frame, format!("the body of {n} elements has the wrong length"))
                .expected(format!("{expected} bytes"), format!("{} bytes", body.len())));
        }
        self.validate_elements(isa, body, n)
    }

    /// Decodes a whole validated body of float32 values; `out.len()` is the element count. For tests,
    /// residuals and state dictionaries; the store decodes block by block.
    pub fn decode(self, isa: Isa, body: &[u8], out: &mut [f32]) {
        isa.run(WholeDecode { codec: self, body, out });
    }

    /// Decodes the elements `at..at + out.len()` of a validated body of `n` elements, as [`Body::decode`]
    /// does.
    pub(crate) fn decode_block(self, isa: Isa, body: &[u8], n: usize, at: usize, out: &mut [f32]) {
        isa.run(BlockDecode { codec: self, body, n, at, out });
    }
}

/// Code that is compiled once per codec of float32 values.
pub(crate) trait WithBody {
    /// The result.
    type Out;
    /// Runs with a body.
    fn run_with(self, body: impl Body) -> Self::Out;
}

struct BlockDecode<'a> {
    codec: CodecId,
    body: &'a [u8],
    n: usize,
    at: usize,
    out: &'a mut [f32],
}

impl crate::base::isa::Kernel for BlockDecode<'_> {
    type Out = ();
    #[inline(always)]
    fn run(self) {
        let Self { codec, body, n, .. } = self;
        codec.select(body, n, self);
    }
}

impl WithBody for BlockDecode<'_> {
    type Out = ();
    #[inline(always)]
    fn run_with(self, body: impl Body) {
        body.decode(self.at, self.out);
    }
}

struct WholeDecode<'a> {
    codec: CodecId,
    body: &'a [u8],
    out: &'a mut [f32],
}

impl crate::base::isa::Kernel for WholeDecode<'_> {
    type Out = ();
    #[inline(always)]
    fn run(self) {
        let Self { codec, body, .. } = self;
        codec.select(body, self.out.len(), self);
    }
}

impl WithBody for WholeDecode<'_> {
    type Out = ();
    #[inline(always)]
    fn run_with(self, body: impl Body) {
        for (at, len) in crate::base::block::blocks(self.out.len()) {
            body.decode(at, &mut self.out[at..at + len]);
        }
    }
}

/// For a body of float64 where only float32 can be: [`crate::frame::Push`] admits it only to slices of
/// float64, which decode it themselves.
#[cold]
fn no_float32s() -> ! {
    unreachable!("a body of float64 is never decoded to float32")
}

/// A validated body that is decoded block by block.
pub(crate) trait Body: Copy {
    /// The stored form of one element, if the body stores elements separately.
    type Lane: Lane;
    /// The value of [`Kernel::WIDE`](crate::base::isa::Kernel::WIDE) for a step on this body.
    const WIDE: bool = false;
    /// The elements `range` in their stored form; `None` if they must be decoded by block.
    fn lanes(&self, range: Range<usize>) -> Option<&[Self::Lane]>;
    /// Decodes the elements `at..at + out.len()`; `at` is a multiple of 64 and the range is within one
    /// [`crate::base::block::BLOCK`] of the body.
    fn decode(&self, at: usize, out: &mut [f32]);
}

/// A codec with its settings: what an encoder needs to know.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Codec {
    /// See [`CodecId::Float32`].
    Float32,
    /// See [`CodecId::BFloat16`].
    BFloat16,
    /// See [`CodecId::Int8`].
    Int8 {
        /// `Some(seed)`: stochastic rounding with Philox4x32-10 under this key.
        seed: Option<u64>,
    },
    /// See [`CodecId::OneBit`]. Requires error feedback.
    OneBit,
    /// See [`CodecId::FourBit`].
    FourBit,
}

/// The position of a body in its tensor and in its client's pushes: the counter of stochastic rounding.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Position {
    /// Index in the tensor of the body's first element; a multiple of 8.
    pub first_element: u64,
    /// The push's sequence number.
    pub sequence: u64,
}

impl Codec {
    /// The identifier on the wire.
    pub fn id(self) -> CodecId {
        match self {
            Self::Float32 => CodecId::Float32,
            Self::BFloat16 => CodecId::BFloat16,
            Self::Int8 { .. } => CodecId::Int8,
            Self::OneBit => CodecId::OneBit,
            Self::FourBit => CodecId::FourBit,
        }
    }

    /// Appends the body of `values` to `out`. With a residual, encodes `values + residual` and leaves in
    /// `residual` what the body cannot express (error feedback; Seide et al. 2014). Callers must check with
    /// [`crate::kernel::finite::check`] that every value, and every sum with the residual, is finite, or
    /// afterwards check the body's marks: the residual of a block that was not finite stays unchanged.
    pub fn encode(
        self,
        isa: Isa,
        values: &[f32],
        residual: Option<&mut [f32]>,
        position: Position,
        out: &mut Vec<u8>,
    ) {
        let start = out.len();
        out.resize(start + self.id().body_len(values.len()), 0);
        self.encode_into(isa, values, residual, position, &mut out[start..]);
    }

    /// As [`Codec::encode`], into exactly [`CodecId::body_len`] bytes.
    pub fn encode_into(
        self,
        isa: Isa,
        values: &[f32],
        residual: Option<&mut [f32]>,
        position: Position,
        body: &mut [u8],
    ) {
        match self {
            Self::Float32 => float32::encode(isa, values, residual, body),
            Self::BFloat16 => bfloat16::encode(isa, values, residual, body),
            Self::Int8 { seed } => int8::encode(isa, values, residual, seed, position, body),
            Self::OneBit => onebit::encode(isa, values, residual, body),
            Self::FourBit => fourbit::encode(isa, values, residual, body),
        }
    }
}
