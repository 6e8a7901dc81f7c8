//! Checks of a registration of many tensors, shared by the in-process store and the network client: both find
//! what is wrong before they register the first.

use crate::base::error::{Error, Kind, Result};
use crate::base::isa::Isa;
use crate::push::outgoing;
use crate::verbs::NewTensor;
use foldhash::fast::RandomState;
use std::collections::HashSet;

/// Checks the specs and values of tensors, which must have different names.
pub fn check(isa: Isa, tensors: &[NewTensor<'_>]) -> Result<()> {
    let mut names = HashSet::with_capacity_and_hasher(tensors.len(), RandomState::default());
    for NewTensor { spec, values } in tensors {
        spec.validate()?;
        if !names.insert(&*spec.name) {
            let error = Error::new(Kind::Config, "a tensor is named twice in one registration");
            return Err(error.tensor(spec.name.clone()));
        }
        outgoing::check_values(isa, *values, spec)?;
    }
    Ok(())
}

/// Adds to the error of a registration of `all` tensors how many of them exist, and of how many it is not
/// known.
pub fn tell(mut error: Error, all: usize, exist: usize, unknown: usize) -> Error {
    if all < 2 {
        return error;
    }
    let absent = all - exist - unknown;
    let known = format!("of the {all} tensors of this call, {exist} are registered and {absent} are not");
    let rest = match unknown {
        0 => String::new(),
        unknown => format!(", and of {unknown} it is not known: register them again"),
    };
    error.message = format!("{}; {known}{rest}", error.message);
    error
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_error_tells_the_fate_of_every_tensor() {
        let late = || Error::new(Kind::Deadline, "late");
        let told = |all, exist, unknown| tell(late(), all, exist, unknown).message.clone();
        assert_eq!(told(1, 0, 1), "late");
        assert_eq!(told(9, 2, 0), "late; of the 9 tensors of this call, 2 are registered and 7 are not");
        let unknown = ", and of 3 it is not known: register them again";
        assert!(told(9, 2, 3).ends_with(&format!("2 are registered and 4 are not{unknown}")));
    }
}
