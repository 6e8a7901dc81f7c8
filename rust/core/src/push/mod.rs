//! A push as its caller sees it: checked before anything moves, and its answers collected into receipts or an
//! error.

#[cfg(not(loom))]
pub mod check;
#[cfg(not(loom))]
pub(crate) mod held;
#[cfg(not(loom))]
pub mod outcome;
#[cfg(not(loom))]
pub mod residue;
pub mod sparse;
