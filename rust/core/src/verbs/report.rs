//! A worker's description of its training, which servers show to people.

use crate::base::error::{Error, Kind, Result, check_printable};

/// A worker's description of its training, for people.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct WorkerReport {
    /// The worker's rank, if it has one.
    pub rank: Option<u32>,
    /// The host of its process.
    pub host: String,
    /// Steps taken.
    pub steps: u64,
    /// Loss of the last step that had one.
    pub loss: Option<f64>,
    /// Pushes acknowledged.
    pub pushes: u64,
    /// Bytes of gradients sent, as encoded.
    pub bytes: u64,
    /// Staleness that half of the pushes do not exceed.
    pub staleness_p50: Option<u64>,
    /// Staleness that 99 % of the pushes do not exceed.
    pub staleness_p99: Option<u64>,
    /// Share of the time since the report before that it spent waiting for servers and other workers.
    pub waited: Option<f64>,
    /// Pushes dropped as too stale or not finite.
    pub rejected: u64,
    /// Pushes applied with a smaller rate because they were stale.
    pub scaled: u64,
    /// The mode.
    pub mode: String,
    /// The codec.
    pub codec: String,
    /// Mean seconds of a step since the report before.
    pub step_seconds: Option<f64>,
    /// The worker's name; empty: that of its client.
    pub name: String,
    /// Smallest momentum of the steps by its latest push.
    pub momentum: Option<f64>,
}

impl WorkerReport {
    /// Fails if it has numbers or names that nothing can show.
    pub fn check(&self) -> Result<()> {
        for (what, text) in
            [("name", &self.name), ("host", &self.host), ("mode", &self.mode), ("codec", &self.codec)]
        {
            check_printable(&format!("{what} in a worker's report"), text)?;
        }
        if let Some(loss) = self.loss.filter(|loss| !loss.is_finite()) {
            let error = Error::new(Kind::Config, "the loss in a worker's report is not finite");
            return Err(error.expected("a finite number", loss));
        }
        if let Some(seconds) = self.step_seconds.filter(|seconds| !seconds.is_finite() || *seconds < 0.0) {
            let error = Error::new(Kind::Config, "the time of a step in a worker's report is not a time");
            return Err(error.expected("seconds, at least 0", seconds));
        }
        if let Some(momentum) = self.momentum.filter(|momentum| !(0.0..=1.0).contains(momentum)) {
            let error = Error::new(Kind::Config, "the momentum in a worker's report is not one");
            return Err(error.expected("0 to 1", momentum));
        }
        if let Some(waited) = self.waited.filter(|waited| !(0.0..=1.0).contains(waited)) {
            let error = Error::new(Kind::Config, "the waiting in a worker's report is not a share of time");
            return Err(error.expected("0 to 1", waited));
        }
        Ok(())
    }
}
