//! Seeded faults: `make mutants` enables one at a time with `FASTPS_MUTANT` and expects the test suite to
//! notice. They are compiled in only with the cargo feature `mutants`, which no release has. The models of
//! `make loom` choose theirs at run time, one per model.

/// Returns whether the fault of this name is enabled.
#[cfg(all(feature = "mutants", not(loom)))]
pub fn fault(name: &str) -> bool {
    static CHOSEN: std::sync::OnceLock<String> = std::sync::OnceLock::new();
    CHOSEN.get_or_init(|| std::env::var("FASTPS_MUTANT").unwrap_or_default()) == name
}

/// Always false: this build has no faults.
#[cfg(not(any(feature = "mutants", loom)))]
#[inline(always)]
pub const fn fault(_name: &str) -> bool {
    false
}

#[cfg(loom)]
pub use chosen::{choose, fault};

#[cfg(loom)]
mod chosen {
    use std::cell::Cell;

    thread_local! {
        /// Thread-local, because one thread plays all threads of the model that it checks.
        static CHOSEN: Cell<&'static str> = const { Cell::new("") };
    }

    /// Enables the fault of this name in the models that this thread checks.
    pub fn choose(name: &'static str) {
        CHOSEN.set(name);
    }

    /// Returns whether the fault of this name is enabled.
    pub fn fault(name: &str) -> bool {
        CHOSEN.get() == name
    }
}
