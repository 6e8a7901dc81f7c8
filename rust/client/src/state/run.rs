//! The name space of a run: the prefix of its tensors, groups and portions on the servers.

use fastps_core::error::{Error, Kind, Result};
use fastps_core::tensor::TensorSpec;

/// Start of every name of a run; the run's name follows, and a slash.
const MARK: &str = "run:";
/// Longest name of a run, in bytes.
const MAX_RUN: usize = 64;

/// A prefix that servers see and the client's user does not; empty without a run.
#[derive(Debug, Default)]
pub(crate) struct RunNames {
    prefix: String,
}

impl RunNames {
    /// The name space of the run of this name, or of none.
    pub(crate) fn new(name: Option<&str>) -> Result<Self> {
        let Some(name) = name else { return Ok(Self::default()) };
        let allowed = |c: char| c.is_ascii_alphanumeric() || matches!(c, '.' | '_' | '-');
        if name.is_empty() || name.len() > MAX_RUN || !name.chars().all(allowed) {
            return Err(Error::new(Kind::Config, "invalid namespace").expected(
                format!("1 to {MAX_RUN} of the characters a-z, A-Z, 0-9, '.', '_' and '-'"),
                format!("{name:?}"),
            ));
        }
        Ok(Self { prefix: format!("{MARK}{name}/") })
    }

    /// The prefix of all names.
    pub(crate) fn prefix(&self) -> &str {
        &self.prefix
    }

    /// The full name on the servers.
    pub(crate) fn there(&self, name: &str) -> String {
        format!("{}{name}", self.prefix)
    }

    /// A name as users know it; `None` if it is not of this run.
    pub(crate) fn here(&self, name: &str) -> Option<String> {
        name.strip_prefix(&self.prefix).map(str::to_owned)
    }

    /// The spec with the full names of the tensor and its group.
    pub(crate) fn spec_there(&self, spec: &TensorSpec) -> TensorSpec {
        TensorSpec {
            name: self.there(&spec.name).into(),
            group: self.there(&spec.group).into(),
            ..spec.clone()
        }
    }

    /// A tensor as users know it; `None` if it is not of this run.
    pub(crate) fn spec_here(&self, spec: TensorSpec) -> Option<TensorSpec> {
        let name = spec.name.strip_prefix(&self.prefix)?.into();
        let group = spec.group.strip_prefix(&self.prefix).map_or_else(|| spec.group.clone(), Into::into);
        Some(TensorSpec { name, group, ..spec })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_runs_are_checked() {
        for name in ["a", "exp-1.b_C", &"x".repeat(MAX_RUN)] {
            assert!(RunNames::new(Some(name)).is_ok(), "{name}");
        }
        for name in ["", "a/b", "run:a", "ä", "a b", &"x".repeat(MAX_RUN + 1)] {
            assert_eq!(RunNames::new(Some(name)).unwrap_err().kind, Kind::Config, "{name}");
        }
    }

    #[test]
    fn a_run_has_names_of_its_own() {
        let (none, run) = (RunNames::default(), RunNames::new(Some("a")).unwrap());
        assert_eq!((none.there("w"), run.there("w")), ("w".into(), "run:a/w".into()));
    }
}
