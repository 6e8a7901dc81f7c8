//! The calls of a client: the requests of each verb to the links, and the handling of their answers.

mod assign;
pub(crate) mod checkpoint;
mod groups;
mod portions;
mod pull;
mod push;
mod receipts;
mod register;
mod reservations;
mod small;
mod spaces;
mod sparse;
mod submit;
mod vectors;
mod verbs;
