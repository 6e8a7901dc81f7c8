//! Seeded faults: `make mutants` turns on one at a time and expects the test suite to notice. Compiled in by
//! the cargo feature `mutants` alone, which no release has; chosen by `FASTPS_MUTANT`. The models of `make
//! loom` choose theirs at run time, one per model.

/// Whether the fault of this name is on.
#[cfg(all(feature = "mutants", not(loom)))]
pub fn fault(name: &str) -> bool {
    static CHOSEN: std::sync::OnceLock<String> = std::sync::OnceLock::new();
    CHOSEN.get_or_init(|| std::env::var("FASTPS_MUTANT").unwrap_or_default()) == name
}

/// Never: this build has no faults.
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
        /// A model's threads are all played by the thread that checks it.
        static CHOSEN: Cell<&'static str> = const { Cell::new("") };
    }

    /// Turns on the fault of this name in the models that this thread checks.
    pub fn choose(name: &'static str) {
        CHOSEN.set(name);
    }

    /// Whether the fault of this name is on.
    pub fn fault(name: &str) -> bool {
        CHOSEN.get() == name
    }
}
