//! A push as its caller sees it: checked before anything moves, and its answers collected into receipts or an
//! error.

#[cfg(not(loom))]
pub mod check;
pub(crate) mod held;
#[cfg(not(loom))]
pub mod outcome;
pub mod sparse;
