//! Element types of parameters, and values of one type. Everything that carries values, from a caller's array
//! to a slice's memory, names its type here. A new type is a variant of these three enums; the compiler then
//! reports every place that must handle it.

use crate::base::error::{Error, Kind, Result};
use serde::{Deserialize, Serialize};
use std::ops::Range;

/// The element type of a tensor's parameters.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum DType {
    /// IEEE single precision.
    Float32,
    /// IEEE double precision, for tensors that are `exact` and have SGD.
    Float64,
    /// The upper half of a float32, for tensors that are `exact`.
    BFloat16,
}

impl DType {
    /// Bytes of one element.
    pub const fn size(self) -> usize {
        match self {
            Self::Float32 => 4,
            Self::Float64 => 8,
            Self::BFloat16 => 2,
        }
    }

    /// NumPy's name.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Float32 => "float32",
            Self::Float64 => "float64",
            Self::BFloat16 => "bfloat16",
        }
    }

    /// The type of what belongs to values of this type: gradients, optimizer state, averages and sums.
    pub const fn computed(self) -> Self {
        match self {
            Self::BFloat16 => Self::Float32,
            same => same,
        }
    }

    /// Elements of a full slice: the largest multiple of 4096 that fits, with its header, one 1 MiB HTTP/2
    /// frame.
    pub const fn slice_len(self) -> usize {
        let itemsize = if self.size() < 4 { 4 } else { self.size() };
        4096 * (252 / itemsize)
    }
}

/// The value with the bits of a bfloat16, exactly.
#[inline(always)]
pub const fn widened(bits: u16) -> f32 {
    f32::from_bits((bits as u32) << 16)
}

/// Row-major values of one type, borrowed.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum View<'a> {
    /// Values of [`DType::Float32`].
    Float32(&'a [f32]),
    /// Values of [`DType::Float64`].
    Float64(&'a [f64]),
    /// The bits of values of [`DType::BFloat16`].
    BFloat16(&'a [u16]),
}

impl<'a> View<'a> {
    /// The element type.
    pub fn dtype(self) -> DType {
        match self {
            Self::Float32(_) => DType::Float32,
            Self::Float64(_) => DType::Float64,
            Self::BFloat16(_) => DType::BFloat16,
        }
    }

    /// Number of elements.
    pub fn len(self) -> usize {
        match self {
            Self::Float32(values) => values.len(),
            Self::Float64(values) => values.len(),
            Self::BFloat16(values) => values.len(),
        }
    }

    /// Returns whether there are no elements.
    pub fn is_empty(self) -> bool {
        self.len() == 0
    }

    /// The elements of a range; empty if the range is out of bounds.
    pub fn get(self, range: Range<usize>) -> Self {
        match self {
            Self::Float32(values) => Self::Float32(values.get(range).unwrap_or_default()),
            Self::Float64(values) => Self::Float64(values.get(range).unwrap_or_default()),
            Self::BFloat16(values) => Self::BFloat16(values.get(range).unwrap_or_default()),
        }
    }

    /// The bytes of the values: the body of the type's plain codec.
    pub fn bytes(self) -> &'a [u8] {
        match self {
            Self::Float32(values) => bytemuck::cast_slice(values),
            Self::Float64(values) => bytemuck::cast_slice(values),
            Self::BFloat16(values) => bytemuck::cast_slice(values),
        }
    }

    /// The values of float32; fails for another type.
    pub fn float32s(self) -> Result<&'a [f32]> {
        match self {
            Self::Float32(values) => Ok(values),
            Self::Float64(_) | Self::BFloat16(_) => Err(Error::new(Kind::DType, "float32 values are needed")
                .expected(DType::Float32.name(), self.dtype().name())),
        }
    }

    /// An owned copy.
    pub fn to_array(self) -> Array {
        match self {
            Self::Float32(values) => Array::Float32(values.to_vec()),
            Self::Float64(values) => Array::Float64(values.to_vec()),
            Self::BFloat16(values) => Array::BFloat16(values.to_vec()),
        }
    }
}

/// Row-major values of one type, owned.
#[derive(Clone, Debug, PartialEq)]
pub enum Array {
    /// Values of [`DType::Float32`].
    Float32(Vec<f32>),
    /// Values of [`DType::Float64`].
    Float64(Vec<f64>),
    /// The bits of values of [`DType::BFloat16`].
    BFloat16(Vec<u16>),
}

impl Array {
    /// `len` zeros.
    pub fn zeros(dtype: DType, len: usize) -> Self {
        match dtype {
            DType::Float32 => Self::Float32(vec![0.0; len]),
            DType::Float64 => Self::Float64(vec![0.0; len]),
            DType::BFloat16 => Self::BFloat16(vec![0; len]),
        }
    }

    /// The values.
    pub fn view(&self) -> View<'_> {
        match self {
            Self::Float32(values) => View::Float32(values),
            Self::Float64(values) => View::Float64(values),
            Self::BFloat16(values) => View::BFloat16(values),
        }
    }

    /// Number of elements.
    pub fn len(&self) -> usize {
        self.view().len()
    }

    /// Returns whether there are no elements.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Writes the bytes of whole elements from element `first` on; false if they do not fit.
    pub fn write(&mut self, first: usize, bytes: &[u8]) -> bool {
        let target = match self {
            Self::Float32(values) => values.get_mut(first..).map(bytemuck::cast_slice_mut),
            Self::Float64(values) => values.get_mut(first..).map(bytemuck::cast_slice_mut),
            Self::BFloat16(values) => values.get_mut(first..).map(bytemuck::cast_slice_mut),
        };
        let target: Option<&mut [u8]> =
            target.and_then(|bytes_left: &mut [u8]| bytes_left.get_mut(..bytes.len()));
        target.is_some_and(|target| {
            target.copy_from_slice(bytes);
            true
        })
    }
}

impl From<Vec<f32>> for Array {
    fn from(values: Vec<f32>) -> Self {
        Self::Float32(values)
    }
}

impl From<Vec<f64>> for Array {
    fn from(values: Vec<f64>) -> Self {
        Self::Float64(values)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn arrays_take_whole_elements_that_fit() {
        let mut array = Array::zeros(DType::Float32, 3);
        let two = View::Float32(&[1.0, 2.0]).bytes();
        assert!(array.write(1, two));
        assert!(!array.write(2, two) && !array.write(4, &[]));
        assert_eq!(array, Array::Float32(vec![0.0, 1.0, 2.0]));
        assert_eq!(array.view().get(1..2), View::Float32(&[1.0]));
        assert!(array.view().get(2..4).is_empty());
    }
}
