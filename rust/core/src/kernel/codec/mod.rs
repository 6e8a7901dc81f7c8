//! Codecs turn the gradient of one slice into bytes and back. The bytes are a contract that is the same in
//! every language (`protos/README.md`). There is one file per codec; this one names them and holds what they
//! share.

mod bfloat16;
mod encode;
mod error_feedback;
mod float32;
mod float64;
mod int8;
mod onebit;
mod philox;

pub(crate) use bfloat16::BFloat16Body;
pub use error_feedback::ErrorFeedback;
pub(crate) use error_feedback::take_back;
pub(crate) use float32::Float32Body;
pub(crate) use float64::lanes as float64_lanes;
pub(crate) use int8::Int8Body;
pub(crate) use onebit::OneBitBody;

use crate::base::block::Lane;
use crate::base::dtype::DType;
use crate::base::error::{Error, Kind, Result};
use crate::base::isa::Isa;
use std::ops::Range;

/// A codec as the wire identifies it: what a decoder needs to know.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum CodecId {
    /// IEEE single precision, little-endian.
    Float32 = 1,
    /// The upper half of a float32, rounded to nearest even.
    BFloat16 = 2,
    /// One signed byte per element, one power-of-two scale byte per 64 elements.
    Int8 = 3,
    /// One sign bit per element, two means per 1024 elements.
    OneBit = 4,
    /// IEEE double precision, little-endian: only for tensors of float64, which have no other codec.
    Float64 = 5,
}

impl CodecId {
    /// All codecs.
    pub const ALL: [Self; 5] = [Self::Float32, Self::BFloat16, Self::Int8, Self::OneBit, Self::Float64];

    /// The name in Python and in messages.
    pub fn name(self) -> &'static str {
        match self {
            Self::Float32 => "Float32",
            Self::BFloat16 => "BFloat16",
            Self::Int8 => "Int8",
            Self::OneBit => "OneBit",
            Self::Float64 => "Float64",
        }
    }

    /// The codec that stores values of this type unchanged.
    pub fn plain(dtype: DType) -> Self {
        match dtype {
            DType::Float32 => Self::Float32,
            DType::Float64 => Self::Float64,
        }
    }

    /// The type of the tensors whose gradients it encodes.
    pub fn dtype(self) -> DType {
        match self {
            Self::Float32 | Self::BFloat16 | Self::Int8 | Self::OneBit => DType::Float32,
            Self::Float64 => DType::Float64,
        }
    }

    /// Returns whether the `n` values of a body were finite, as far as the body marks that.
    pub(crate) fn was_finite(self, body: &[u8], n: usize) -> bool {
        self.telling().is_none_or(|block| (0..n.div_ceil(block)).all(|k| self.block_was_finite(body, k)))
    }

    /// Elements per block, if the codec marks blocks that are not finite; `None` if it does not.
    pub(crate) fn telling(self) -> Option<usize> {
        match self {
            Self::Float32 | Self::BFloat16 | Self::Float64 => None,
            Self::Int8 => Some(int8::BLOCK),
            Self::OneBit => Some(onebit::BLOCK),
        }
    }

    /// Returns whether the values of a block were finite, as far as the body marks that.
    fn block_was_finite(self, body: &[u8], block: usize) -> bool {
        match self {
            Self::Float32 | Self::BFloat16 | Self::Float64 => true,
            Self::Int8 => int8::was_finite(body, block),
            Self::OneBit => onebit::was_finite(body, block),
        }
    }

    /// Bytes of a body of `n` elements.
    pub fn body_len(self, n: usize) -> usize {
        match self {
            Self::Float32 => 4 * n,
            Self::Float64 => 8 * n,
            Self::BFloat16 => 2 * n,
            Self::Int8 => n.div_ceil(int8::BLOCK) + n,
            Self::OneBit => 8 * n.div_ceil(onebit::BLOCK) + n.div_ceil(8),
        }
    }

    /// Checks a body from outside: exact length, finite, canonical. This must precede any decoding. Returns
    /// the largest magnitude of its elements, or a bound of it.
    pub fn validate(self, isa: Isa, body: &[u8], n: usize) -> Result<f64> {
        let expected = self.body_len(n);
        if body.len() != expected {
            return Err(Error::new(Kind::Frame, format!("the body of {n} elements has the wrong length"))
                .expected(format!("{expected} bytes"), format!("{} bytes", body.len())));
        }
        match self {
            Self::Float32 => float32::validate(isa, body),
            Self::Float64 => float64::validate(isa, body),
            Self::BFloat16 => bfloat16::validate(isa, body),
            Self::Int8 => int8::validate(isa, body, n),
            Self::OneBit => onebit::validate(body, n),
        }
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
        let Self { codec, body, n, at, out } = self;
        match codec {
            CodecId::Float32 => Float32Body::new(body, n).decode(at, out),
            CodecId::Float64 => no_float32s(),
            CodecId::BFloat16 => BFloat16Body::new(body, n).decode(at, out),
            CodecId::Int8 => Int8Body::new(body, n).decode(at, out),
            CodecId::OneBit => OneBitBody::new(body, n).decode(at, out),
        }
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
        let n = self.out.len();
        match self.codec {
            CodecId::Float32 => whole(Float32Body::new(self.body, n), self.out),
            CodecId::Float64 => no_float32s(),
            CodecId::BFloat16 => whole(BFloat16Body::new(self.body, n), self.out),
            CodecId::Int8 => whole(Int8Body::new(self.body, n), self.out),
            CodecId::OneBit => whole(OneBitBody::new(self.body, n), self.out),
        }
    }
}

#[inline(always)]
fn whole<B: Body>(body: B, out: &mut [f32]) {
    for (at, len) in crate::base::block::blocks(out.len()) {
        body.decode(at, &mut out[at..at + len]);
    }
}

/// For a body of float64 where only float32 can be: [`crate::frame::Push`] admits it only to slices of
/// float64, which decode it themselves.
#[cold]
pub(crate) fn no_float32s() -> ! {
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
        }
    }
}
