//! The link to one shard: its queue of frames, and the connections that take them there one after another.
//!
//! `session` drives a link: it opens a `stream` on a `route`, sends what the `queue` has, and hands what
//! comes back to `answer`. `unary` makes control calls.

mod answer;
pub(crate) mod call;
pub(crate) mod deadlines;
mod incarnation;
pub(crate) mod payload;
pub(crate) mod places;
pub(crate) mod queue;
pub(crate) mod refresh;
pub(crate) mod route;
mod send;
pub(crate) mod session;
pub(crate) mod state;
mod stream;
pub(crate) mod unary;
