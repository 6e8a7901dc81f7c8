//! Accepts connections and serves each by the native loop or by tonic.

pub(crate) mod accept;
pub(crate) mod accepted;
pub(crate) mod admission;
mod allowance;
mod native;
pub(crate) mod not_grpc;
pub(crate) mod pending;
pub(crate) mod recovering;
pub(crate) mod reject;
pub(crate) mod spare;
pub(crate) mod trim;
