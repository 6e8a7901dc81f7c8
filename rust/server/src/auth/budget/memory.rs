//! Memory of principals: what a principal makes a shard keep is charged to it until the shard gives it up,
//! whichever of its clients has asked for it.

use super::{Budget, Spent};
use fastps_core::error::{Error, Kind, Result};
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// Memory charged to a principal; dropping it gives it back.
#[derive(Debug)]
pub(crate) struct Held {
    spent: Arc<Spent>,
    bytes: u64,
}

/// Charges memory for `what` to the principal of a budget. `None`: it has no limit.
pub(crate) fn hold(budget: Option<&Budget>, what: &str, bytes: u64) -> Result<Option<Held>> {
    let Some((budget, most)) = budget.and_then(|budget| Some((budget, budget.limits.memory?))) else {
        return Ok(None);
    };
    let add = |used: u64| used.checked_add(bytes).filter(|sum| *sum <= most);
    match budget.spent.memory.fetch_update(Ordering::Relaxed, Ordering::Relaxed, add) {
        Ok(_) => Ok(Some(Held { spent: budget.spent.clone(), bytes })),
        Err(used) => {
            let message = format!("{what} would exceed the memory of principal {:?}", budget.name);
            let error = Error::new(Kind::Capacity, message);
            Err(error.expected(format!("at most {most} bytes"), format!("{} bytes", used + bytes)))
        }
    }
}

impl Held {
    /// Gives this many bytes back.
    pub(crate) fn give_back(&mut self, bytes: u64) {
        let bytes = bytes.min(self.bytes);
        self.bytes -= bytes;
        self.spent.memory.fetch_sub(bytes, Ordering::Relaxed);
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        self.spent.memory.fetch_sub(self.bytes, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::auth::budget::Budgets;
    use crate::auth::principal::{Limits, Principal};
    use crate::auth::role::Role;
    use crate::auth::scope::Scope;

    #[test]
    fn memory_is_charged_until_it_is_given_up() {
        let budgets = Budgets::default();
        let of = |name: &str, memory| {
            let limits = Limits { memory, ..Limits::default() };
            budgets.of(&Principal { limits, ..Principal::new(name, Role::Worker, Scope::Everything) })
        };
        let small = of("small", Some(100));
        let mut first = hold(small.as_ref(), "a session", 60).unwrap();
        let error = hold(of("small", Some(100)).as_ref(), "a tensor", 41).unwrap_err();
        assert_eq!(error.kind, Kind::Capacity);
        assert_eq!(error.message, "a tensor would exceed the memory of principal \"small\"");
        assert_eq!(
            (error.expected.as_deref(), error.got.as_deref()),
            (Some("at most 100 bytes"), Some("101 bytes"))
        );
        // The limit is that of the present token file.
        assert!(hold(of("small", Some(101)).as_ref(), "a tensor", 41).unwrap().is_some());
        first.as_mut().unwrap().give_back(20);
        let second = hold(small.as_ref(), "a tensor", 60).unwrap();
        assert!(hold(small.as_ref(), "a tensor", 1).is_err());
        drop((first, second));
        assert!(hold(small.as_ref(), "a tensor", 100).unwrap().is_some());
        assert!(hold(small.as_ref(), "a tensor", u64::MAX).is_err());
        assert!(hold(of("other", None).as_ref(), "a tensor", u64::MAX).unwrap().is_none());
        assert!(hold(None, "a tensor", u64::MAX).unwrap().is_none());
    }
}
