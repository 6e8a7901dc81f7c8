//! The report of the worker that a client belongs to, until a renewal of the lease has sent it.

use crate::state::runtime::lock;
use fastps_core::verbs::WorkerReport;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};

/// The newest report of a worker.
#[derive(Debug, Default)]
pub(crate) struct Reports {
    newest: Mutex<Option<WorkerReport>>,
    unsent: AtomicBool,
}

impl Reports {
    /// Replaces the report.
    pub(crate) fn set(&self, report: WorkerReport) {
        *lock(&self.newest) = Some(report);
        self.unsent.store(true, Ordering::Release);
    }

    /// Returns whether the newest report has not been sent.
    pub(crate) fn is_unsent(&self) -> bool {
        self.unsent.load(Ordering::Acquire)
    }

    /// The newest report, to be sent now.
    pub(crate) fn take(&self) -> Option<WorkerReport> {
        self.unsent.store(false, Ordering::Release);
        lock(&self.newest).clone()
    }
}
