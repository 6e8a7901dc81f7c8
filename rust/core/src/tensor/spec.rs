//! The spec of a tensor, and its division into slices. The division depends only on shape and dtype, never on
//! the number of shards.

use crate::base::dtype::DType;
use crate::base::error::{Error, Kind, Result, check_printable};
use crate::base::text;
use crate::kernel::ema::Ema;
use crate::kernel::optim::Optimizer;
use crate::kernel::rounding::Rounding;
use serde::{Deserialize, Serialize};
use std::fmt;
use std::ops::Range;
use std::sync::Arc;

/// How concurrent pushes to one slice are applied.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Apply {
    /// One push at a time per slice; every pull of a slice is one whole version.
    #[default]
    Exact,
    /// Without locks (Niu et al. 2011): values never tear, but racing pushes to the same element may
    /// overwrite each other.
    Hogwild,
}

impl Apply {
    /// The name in Python and in messages.
    pub fn name(self) -> &'static str {
        match self {
            Self::Exact => "exact",
            Self::Hogwild => "hogwild",
        }
    }
}

/// Identifies a slice in its cluster; an identifier is never reused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SliceId(pub u64);

/// Longest tensor or group name, in bytes.
pub const MAX_NAME: usize = 1024;
/// Most dimensions of a shape.
pub const MAX_DIMS: usize = 32;

/// The spec of a tensor. Two registrations match if all fields are equal.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct TensorSpec {
    /// Its name.
    pub name: Arc<str>,
    /// Row-major shape; empty = a scalar.
    pub shape: Vec<u64>,
    /// Element type.
    pub dtype: DType,
    /// How concurrent pushes are applied.
    pub apply: Apply,
    /// The group, to which mode, quota and cuts belong.
    pub group: Arc<str>,
    /// The optimizer that applies gradients.
    pub optimizer: Optimizer,
    /// The average of the values that steps update, if there is one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub average: Option<Ema>,
    /// How steps round values: of a bfloat16 tensor, and of no other.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rounding: Option<Rounding>,
}

impl TensorSpec {
    /// A float32 tensor of the group `"default"` that applies one push at a time.
    pub fn new(name: impl Into<Arc<str>>, shape: impl Into<Vec<u64>>, optimizer: Optimizer) -> TensorSpec {
        TensorSpec {
            name: name.into(),
            shape: shape.into(),
            dtype: DType::Float32,
            apply: Apply::Exact,
            group: "default".into(),
            optimizer,
            average: None,
            rounding: None,
        }
    }

    /// Checks everything that does not depend on a store.
    pub fn validate(&self) -> Result<()> {
        let fail = |error: Error| Err(error.tensor(self.name.clone()));
        for (what, name) in [("name", &self.name), ("group", &self.group)] {
            if name.is_empty() || name.len() > MAX_NAME {
                return fail(
                    Error::new(Kind::Config, format!("invalid tensor {what}"))
                        .expected(format!("1 to {MAX_NAME} bytes"), format!("{} bytes", name.len())),
                );
            }
        }
        if self.shape.len() > MAX_DIMS {
            return fail(
                Error::new(Kind::Shape, "too many dimensions")
                    .expected(format!("at most {MAX_DIMS}"), self.shape.len()),
            );
        }
        self.checked_elements()?;
        self.optimizer.validate().or_else(fail)?;
        self.check_average().or_else(fail)?;
        match self.dtype {
            DType::Float32 => self.check_no_rounding().or_else(fail),
            DType::Float64 => self.check_no_rounding().and_then(|()| self.check_float64()).or_else(fail),
            DType::BFloat16 => self.check_bfloat16().or_else(fail),
        }
    }

    /// Names of the state tensors, in storage order: the optimizer's, and that of the average.
    pub fn slots(&self) -> Vec<&'static str> {
        self.optimizer.slots().into_iter().chain(self.average.map(|_| Ema::SLOT)).collect()
    }

    /// Returns whether it keeps an average, beside its optimizer's state or in it.
    pub fn has_average(&self) -> bool {
        self.average.is_some() || self.optimizer.keeps_average()
    }

    /// Fails unless such a tensor can keep its average.
    fn check_average(&self) -> Result<()> {
        self.average.map_or(Ok(()), |average| average.validate())?;
        if !self.has_average() {
            return Ok(());
        }
        if let (Some(average), true) = (self.average, self.optimizer.keeps_average()) {
            let why = format!("{} keeps an average of its own", self.optimizer.title());
            return Err(Error::new(Kind::Config, why).expected("average=None", average));
        }
        if self.apply == Apply::Hogwild {
            let why = "a hogwild tensor keeps no average: racing steps would lose updates of it";
            return Err(Error::new(Kind::Config, why).expected("apply=\"exact\"", "apply=\"hogwild\""));
        }
        if self.dtype.computed() != DType::Float32 {
            let why = "only a float32 or bfloat16 tensor keeps an average; convert the values";
            return Err(Error::new(Kind::DType, why).expected("float32 or bfloat16", self.dtype.name()));
        }
        Ok(())
    }

    /// Fails, naming the tensor, unless its average can be pulled.
    pub fn need_average(&self) -> Result<()> {
        if self.has_average() {
            return Ok(());
        }
        let why = "the tensor keeps no average";
        Err(Error::new(Kind::Precondition, why).tensor(self.name.clone()).expected(
            "a tensor registered with average=fastps.EMA(...), or a Schedule-Free optimizer",
            self.optimizer,
        ))
    }

    /// Fails, with the reason, if a step must change untouched rows.
    pub fn check_sparse(&self) -> Result<()> {
        let Some(average) = self.average else { return self.optimizer.check_sparse() };
        let why = "the tensor takes no sparse pushes: its average moves in all rows at each step";
        Err(Error::new(Kind::Precondition, why).expected("a tensor without average", average))
    }

    /// Fails unless its names may be new.
    pub fn check_new_names(&self) -> Result<()> {
        check_printable("tensor name", &self.name)
            .and_then(|()| check_printable("tensor group", &self.group))
            .map_err(|error| error.tensor(self.name.clone()))
    }

    /// Fails unless what the tensor is registered with supports float64.
    fn check_float64(&self) -> Result<()> {
        if self.apply == Apply::Hogwild {
            let why =
                "a hogwild tensor has float32 values; convert them, or register it with apply=\"exact\"";
            return Err(Error::new(Kind::DType, why).expected("float32", "float64"));
        }
        self.optimizer.check_float64()
    }

    /// Fails unless what the tensor is registered with supports bfloat16.
    fn check_bfloat16(&self) -> Result<()> {
        if self.apply == Apply::Hogwild {
            let why =
                "a hogwild tensor has float32 values; convert them, or register it with apply=\"exact\"";
            return Err(Error::new(Kind::DType, why).expected("float32", "bfloat16"));
        }
        if self.rounding.is_none() {
            let error = Error::new(Kind::Config, "a bfloat16 tensor needs a rounding");
            return Err(error.expected("stochastic or nearest", "none"));
        }
        Ok(())
    }

    /// Fails if the tensor has a rounding: its type has none.
    fn check_no_rounding(&self) -> Result<()> {
        let Some(rounding) = self.rounding else { return Ok(()) };
        let why = format!("the values of a {} tensor are not rounded", self.dtype.name());
        Err(Error::new(Kind::Config, why).expected("a rounding for dtype=\"bfloat16\" only", rounding))
    }

    /// Fails, naming the tensor, unless its gradients are float32, which `what` needs.
    pub fn need_float32(&self, what: &str) -> Result<()> {
        if self.dtype.computed() == DType::Float32 {
            return Ok(());
        }
        Err(Error::new(Kind::DType, format!("{what} needs a float32 or bfloat16 tensor"))
            .tensor(self.name.clone())
            .expected("float32 or bfloat16", self.dtype.name()))
    }

    /// The first difference to another spec of the same name: the setting, its value here, and the other's.
    pub fn difference(&self, other: &Self) -> Option<(String, String, String)> {
        let text = |what: &str, a: String, b: String| (a != b).then(|| (what.to_owned(), a, b));
        let (mut a, mut b) = (self.optimizer, other.optimizer);
        text("shape", text::shape(&self.shape), text::shape(&other.shape))
            .or_else(|| text("dtype", self.dtype.name().into(), other.dtype.name().into()))
            .or_else(|| text("apply", self.apply.name().into(), other.apply.name().into()))
            .or_else(|| text("group", self.group.to_string(), other.group.to_string()))
            .or_else(|| text("optimizer", a.title().into(), b.title().into()))
            .or_else(|| text("average", shown(self.average), shown(other.average)))
            .or_else(|| text("rounding", shown(self.rounding), shown(other.rounding)))
            .or_else(|| {
                let mut pairs = a.settings().into_iter().zip(b.settings());
                pairs.find_map(|(x, y)| {
                    (x.value != y.value)
                        .then(|| (x.name.to_owned(), x.value.to_string(), y.value.to_string()))
                })
            })
    }

    /// Number of elements. As in NumPy, the other dimensions of an empty tensor must have a product, too.
    fn checked_elements(&self) -> Result<usize> {
        self.shape
            .iter()
            .filter(|d| **d != 0)
            .try_fold(1_u64, |n, d| n.checked_mul(*d))
            .filter(|n| *n <= (isize::MAX as u64) / 64)
            .map(|n| if self.shape.contains(&0) { 0 } else { n as usize })
            .ok_or_else(|| {
                Error::new(Kind::Shape, "the shape has too many elements")
                    .tensor(self.name.clone())
                    .expected("fewer than 2^57 elements", text::shape(&self.shape))
            })
    }

    /// Bytes of this many values and of their state.
    pub fn bytes_with_state(&self, elements: usize) -> usize {
        elements * (self.dtype.size() + self.dtype.computed().size() * self.slots().len())
    }

    /// Number of elements of a validated spec.
    pub fn elements(&self) -> usize {
        self.checked_elements().unwrap_or(0)
    }

    /// Elements of a row, which is one index of the first dimension.
    pub fn row_width(&self) -> usize {
        self.shape.iter().skip(1).product::<u64>() as usize
    }

    /// Number of slices; an empty tensor has one empty slice.
    pub fn slice_count(&self) -> usize {
        self.elements().div_ceil(self.dtype.slice_len()).max(1)
    }

    /// The elements of slice `index`.
    pub fn slice_range(&self, index: usize) -> Range<usize> {
        let (n, len) = (self.elements(), self.dtype.slice_len());
        let len =
            if crate::base::fault::fault("slice_border") { len - crate::base::block::BLOCK } else { len };
        (index * len).min(n)..((index + 1) * len).min(n)
    }

    /// The elements of all slices, in order.
    pub fn slices(&self) -> impl Iterator<Item = Range<usize>> + '_ {
        (0..self.slice_count()).map(|k| self.slice_range(k))
    }
}

fn shown(setting: Option<impl fmt::Display>) -> String {
    setting.map_or_else(|| "None".into(), |setting| setting.to_string())
}

impl fmt::Display for TensorSpec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { shape, dtype, apply, group, optimizer, average, rounding, .. } = self;
        write!(f, "{} {} {} group {group:?} {optimizer}", dtype.name(), text::shape(shape), apply.name())?;
        average.map_or(Ok(()), |average| write!(f, " average {average}"))?;
        rounding.map_or(Ok(()), |rounding| write!(f, " rounding {rounding}"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernel::optim::Sgd;

    fn spec(shape: &[u64]) -> TensorSpec {
        TensorSpec::new("w", shape.to_vec(), Optimizer::Sgd(Sgd::default()))
    }

    #[test]
    fn slices_cover_the_tensor_once() {
        assert_eq!(DType::Float32.slice_len(), 63 * 4096);
        for n in [0_u64, 1, 258_047, 258_048, 258_049, 3 * 258_048 + 5] {
            let spec = spec(&[n]);
            let mut next = 0;
            for range in spec.slices() {
                assert_eq!(range.start, next);
                next = range.end;
            }
            assert_eq!(next as u64, n);
        }
        assert_eq!(spec(&[0]).slice_count(), 1);
        assert_eq!(spec(&[]).elements(), 1);
    }

    #[test]
    fn absurd_shapes_are_refused() {
        assert_eq!(spec(&[1 << 60]).validate().unwrap_err().kind, Kind::Shape);
        assert_eq!(spec(&[1 << 40, 1 << 40]).validate().unwrap_err().kind, Kind::Shape);
        assert_eq!(spec(&[1; 33]).validate().unwrap_err().kind, Kind::Shape);
        for rows in [&[0, 1 << 62][..], &[1 << 62, 0], &[0, 1 << 40, 1 << 40], &[0, u64::MAX]] {
            assert_eq!(spec(rows).validate().unwrap_err().kind, Kind::Shape, "{rows:?}");
        }
        let empty = spec(&[0, 1 << 40]);
        assert!(empty.validate().is_ok());
        assert_eq!((empty.elements(), empty.row_width()), (0, 1 << 40));
    }
}
