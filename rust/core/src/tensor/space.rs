//! Spaces: names and contents of a set of named vectors over some tensors.

use super::spec::{Apply, MAX_NAME, TensorSpec};
use crate::base::dtype::DType;
use crate::base::error::{Error, Kind, Result};
use std::collections::HashSet;
use std::sync::Arc;

/// Most vectors of a space, without the tensor itself.
pub const MAX_VECTORS: usize = 64;
/// Most bytes of the names of a space's tensors and vectors together.
const MAX_NAMES: usize = 1 << 20;
/// The name of the tensor itself among the vectors of a space.
pub const TENSOR_NAME: &str = "w";

/// Identifies one opening of a space. Never reused, so a request for a closed space does not reach its
/// successor of the same name.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SpaceId(pub u64);

/// A space in a slice: its vectors, all of the slice's length and type.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Space {
    /// Its identifier.
    pub id: SpaceId,
    /// Its name.
    pub name: Arc<str>,
    /// The names of its vectors: vector k + 1 of a program is `vectors[k]`.
    pub vectors: Vec<Arc<str>>,
}

impl Space {
    /// Fails unless the names are valid.
    pub fn check(&self) -> Result<()> {
        if self.name.is_empty() || self.name.len() > MAX_NAME {
            return Err(Error::new(Kind::Config, "invalid name of a space")
                .expected(format!("1 to {MAX_NAME} bytes"), format!("{} bytes", self.name.len())));
        }
        let fail = |expected: String, got: String| {
            let message = format!("invalid vectors of space {:?}", self.name);
            Err(Error::new(Kind::Config, message).expected(expected, got))
        };
        if self.vectors.is_empty() || self.vectors.len() > MAX_VECTORS {
            return fail(format!("1 to {MAX_VECTORS} vectors"), self.vectors.len().to_string());
        }
        for (k, name) in self.vectors.iter().enumerate() {
            if name.is_empty() || name.len() > MAX_NAME {
                return fail(format!("names of 1 to {MAX_NAME} bytes"), format!("{} bytes", name.len()));
            }
            if **name == *TENSOR_NAME || self.vectors[..k].contains(name) {
                let expected = format!("different names other than {TENSOR_NAME:?}");
                return fail(expected, format!("{name:?}"));
            }
        }
        Ok(())
    }
}

/// Fails unless these tensors can have vectors together.
pub fn check_tensors(specs: &[Arc<TensorSpec>]) -> Result<()> {
    if specs.is_empty() {
        return Err(Error::new(Kind::Config, "a space without tensors").expected("1 or more names", "none"));
    }
    let bytes = specs.iter().map(|spec| spec.name.len()).sum::<usize>();
    if bytes > MAX_NAMES {
        let error = Error::new(Kind::Config, "the names of a space's tensors are too long together");
        return Err(error.expected(format!("at most {MAX_NAMES} bytes"), format!("{bytes} bytes")));
    }
    let mut names = HashSet::new();
    for spec in specs {
        let fail = |kind, message: &str| Err(Error::new(kind, message).tensor(spec.name.clone()));
        if !names.insert(&spec.name) {
            return fail(Kind::Config, "a space names the tensor twice");
        }
        if spec.apply != Apply::Exact {
            return fail(Kind::Config, "a hogwild tensor has no vectors; register it with apply=\"exact\"");
        }
        if spec.dtype == DType::BFloat16 {
            let error =
                Error::new(Kind::DType, "a bfloat16 tensor has no vectors: their steps would be rounded");
            return Err(error.tensor(spec.name.clone()).expected("float32 or float64", spec.dtype.name()));
        }
        if spec.dtype != specs[0].dtype {
            let error = Error::new(Kind::DType, "the tensors of a space have one dtype");
            return Err(error.tensor(spec.name.clone()).expected(specs[0].dtype.name(), spec.dtype.name()));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_checked() {
        let space = |name: &str, vectors: &[&str]| Space {
            id: SpaceId(1),
            name: name.into(),
            vectors: vectors.iter().map(|name| Arc::from(*name)).collect(),
        };
        space("mine", &["g", "p"]).check().unwrap();
        let many: Vec<_> = (0..=MAX_VECTORS).map(|k| k.to_string()).collect();
        let many: Vec<_> = many.iter().map(String::as_str).collect();
        space("mine", &many[1..]).check().unwrap();
        for bad in [
            space("", &["g"]),
            space("mine", &[]),
            space("mine", &["g", ""]),
            space("mine", &["g", "g"]),
            space("mine", &["w"]),
            space("mine", &many),
            space(&"n".repeat(MAX_NAME + 1), &["g"]),
        ] {
            assert_eq!(bad.check().unwrap_err().kind, Kind::Config);
        }
    }
}
