//! The calls of a client: what each verb asks of the links, and what it makes of their answers.

pub(crate) mod checkpoint;
mod groups;
mod portions;
mod pull;
mod push;
mod receipts;
mod register;
mod spaces;
mod sparse;
mod submit;
mod vectors;
mod verbs;
