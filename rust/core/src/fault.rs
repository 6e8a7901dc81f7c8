//! Seeded faults: `make mutants` turns on one at a time and expects the test suite to notice. Compiled in by the cargo
//! feature `mutants` alone, which no release has; chosen by `FASTPS_MUTANT`.

/// Whether the fault of this name is on.
#[cfg(feature = "mutants")]
pub fn fault(name: &str) -> bool {
    static CHOSEN: std::sync::OnceLock<String> = std::sync::OnceLock::new();
    CHOSEN.get_or_init(|| std::env::var("FASTPS_MUTANT").unwrap_or_default()) == name
}

/// Never: this build has no faults.
#[cfg(not(feature = "mutants"))]
#[inline(always)]
pub const fn fault(_name: &str) -> bool {
    false
}
