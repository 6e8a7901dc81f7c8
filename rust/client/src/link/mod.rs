//! The link to one shard: its queue of frames, and the successive connections that carry them.
//!
//! `session` drives a link: it opens a `stream` on a `route`, sends the frames of the `queue`, and hands the
//! answers to `answer`, which delivers them to the `call` that a thread `wait`s for. `unary` makes control
//! calls, and `find` looks for a shard that has moved.

mod answer;
pub(crate) mod call;
pub(crate) mod deadlines;
mod find;
mod frames;
mod incarnation;
pub(crate) mod memberships;
pub(crate) mod pending;
pub(crate) mod queue;
pub(crate) mod refresh;
pub(crate) mod route;
mod send;
pub(crate) mod session;
pub(crate) mod state;
mod stream;
pub(crate) mod unary;
pub(crate) mod wait;
