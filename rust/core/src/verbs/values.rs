//! The values that the calls of a parameter server take and return. The in-process store and the network
//! client use the same types, so callers need not know which one they have.

use crate::base::correction::Correction;
use crate::base::dtype::{Array, DType, View};
use crate::base::error::{Error, Result};
use crate::kernel::codec::{Bodies, Codec, CodecId, ErrorFeedback};
use crate::slice::frame::Applied;
use crate::tensor::Versions;
use crate::verbs::report::WorkerReport;
use std::fmt;
use std::ops::Range;
use std::sync::{Arc, Mutex};
use std::time::Duration;

/// Values of a caller, which must keep them alive and unchanged until the push that reads them is done.
pub trait Values: Send + Sync {
    /// The values.
    fn view(&self) -> View<'_>;

    /// The rows that the values are for, in any order, possibly with repeats; `None`: the whole tensor.
    fn indices(&self) -> Option<&[i64]> {
        None
    }

    /// The values as the caller has encoded them, in place of those of `view`, which are none.
    fn bodies(&self) -> Option<Bodies<'_>> {
        None
    }
}

impl Values for Vec<f32> {
    fn view(&self) -> View<'_> {
        View::Float32(self)
    }
}

impl Values for Array {
    fn view(&self) -> View<'_> {
        Self::view(self)
    }
}

/// One tensor of a push.
#[derive(Clone)]
pub struct Gradient {
    /// The tensor's name.
    pub name: Arc<str>,
    /// The shape of `values`, which must match the registered one.
    pub shape: Vec<u64>,
    /// Row-major values.
    pub values: Arc<dyn Values>,
}

/// A borrowed gradient, for a push that no longer reads the values after it returns.
#[derive(Clone, Copy, Debug)]
pub struct GradientRef<'a> {
    /// The tensor's name.
    pub name: &'a str,
    /// The shape of `values`.
    pub shape: &'a [u64],
    /// Row-major values.
    pub values: View<'a>,
    /// The rows that the values are for; `None`: the whole tensor.
    pub indices: Option<&'a [i64]>,
    /// The encoded values, in place of `values`.
    pub bodies: Option<Bodies<'a>>,
}

impl<'a> GradientRef<'a> {
    /// A gradient of the whole tensor.
    pub fn whole(name: &'a str, shape: &'a [u64], values: View<'a>) -> Self {
        Self { name, shape, values, indices: None, bodies: None }
    }
}

/// A sparse gradient: values for some rows of a tensor. Their shape is the tensor's, except for the number of
/// rows.
#[derive(Clone, Debug)]
pub struct SparseValues<V> {
    /// The rows.
    pub indices: Vec<i64>,
    /// The values of the rows, consecutively.
    pub values: V,
}

impl<V: Values> Values for SparseValues<V> {
    fn view(&self) -> View<'_> {
        self.values.view()
    }

    fn indices(&self) -> Option<&[i64]> {
        Some(&self.indices)
    }
}

/// Rows of a tensor to pull.
#[derive(Clone, Debug)]
pub struct Rows {
    /// The tensor's name.
    pub name: Arc<str>,
    /// The rows, in any order, possibly with repeats.
    pub indices: Vec<i64>,
}

impl Gradient {
    /// The same gradient, borrowed.
    pub fn borrow(&self) -> GradientRef<'_> {
        let (values, indices) = (self.values.view(), self.values.indices());
        GradientRef { name: &self.name, shape: &self.shape, values, indices, bodies: self.values.bodies() }
    }
}

impl fmt::Debug for Gradient {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Gradient")
            .field("name", &self.name)
            .field("shape", &self.shape)
            .finish_non_exhaustive()
    }
}

/// Options of a push, shared by all its tensors.
#[derive(Clone, Debug)]
pub struct PushOptions {
    /// The codec of every gradient; `None`: each is sent in its tensor's type.
    pub codec: Option<Codec>,
    /// Learning rate instead of the optimizers'.
    pub lr: Option<f64>,
    /// Factor on the gradients.
    pub scale: Option<f32>,
    /// Weight of the gradients in the mean that makes a version.
    pub weight: Option<f32>,
    /// The versions that the gradients are based on, as an earlier pull of the same client returned them.
    pub based_on: Option<Arc<Versions>>,
    /// How stale gradients are corrected.
    pub correction: Option<Correction>,
    /// What the gradients came from, for a log that keeps history: at most 64 bytes.
    pub note: Option<Arc<str>>,
    /// Residuals; mandatory for [`Codec::OneBit`]. They take back the content of bodies that were refused or
    /// fenced, except stale ones.
    pub feedback: Option<Arc<Mutex<ErrorFeedback>>>,
    /// Set if a sparse gradient also goes to slices with none of its rows: a slice whose versions are made by
    /// several workers waits for each of them.
    pub every_slice: bool,
    /// Set to check that all values are finite before anything is sent or changed.
    pub check_finite: bool,
    /// Time after which the call gives up.
    pub timeout: Duration,
}

impl Default for PushOptions {
    fn default() -> Self {
        Self {
            codec: None,
            lr: None,
            scale: None,
            weight: None,
            based_on: None,
            correction: None,
            note: None,
            feedback: None,
            every_slice: false,
            check_finite: true,
            timeout: Duration::from_secs(30),
        }
    }
}

impl PushOptions {
    /// The encoding of the gradient of a tensor of this type.
    pub fn codec_of(&self, dtype: DType) -> CodecId {
        self.codec.map_or(CodecId::plain(dtype.computed()), Codec::id)
    }

    /// The codec of gradients of float32.
    pub fn encoder(&self) -> Codec {
        self.codec.unwrap_or(Codec::Float32)
    }

    /// Returns whether gradients are sent unencoded, except for error feedback.
    pub fn is_plain(&self) -> bool {
        matches!(self.codec, None | Some(Codec::Float32))
    }
}

/// The confirmation that one tensor of a push was applied.
#[derive(Clone, Debug, PartialEq)]
pub struct Receipt {
    /// Smallest version among the tensor's slices.
    pub version: u64,
    /// Largest staleness among the tensor's slices; `None` if no base was known.
    pub staleness: Option<u64>,
    /// Set if some slice had applied the push before.
    pub duplicate: bool,
    /// Number of slices that had.
    pub duplicates: u64,
    /// Smallest factor that a slice applied to the gradient.
    pub scale: f32,
    /// Smallest momentum of a slice's step, of Adam its `beta1`; `None` if no slice told one.
    pub momentum: Option<f64>,
    /// Total bytes of the bodies as sent.
    pub bytes: u64,
}

impl Receipt {
    /// An empty receipt, to be filled by [`Receipt::add`].
    pub(crate) fn of_nothing(bytes: u64) -> Self {
        let (version, scale) = (u64::MAX, f32::INFINITY);
        Self { version, staleness: None, duplicate: false, duplicates: 0, scale, momentum: None, bytes }
    }

    /// Finishes a receipt to which all slices were added. A sparse gradient without rows changes no slice;
    /// its receipt has version 0.
    pub(crate) fn done(self) -> Self {
        if self.version == u64::MAX {
            return Self { version: 0, scale: 1.0, ..self };
        }
        self
    }

    /// Adds one slice's answer.
    pub(crate) fn add(&mut self, slice: &Applied) {
        self.version = self.version.min(slice.version);
        self.staleness = self.staleness.max(slice.staleness);
        self.duplicate |= slice.duplicate;
        self.duplicates += u64::from(slice.duplicate);
        self.scale = self.scale.min(slice.scale);
        self.momentum = self.momentum.into_iter().chain(slice.momentum).reduce(f64::min);
    }
}

/// The outcome of a slice's push that was in doubt.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fate {
    /// It was applied.
    Applied {
        /// At this version.
        version: u64,
    },
    /// It was not applied and never will be.
    Fenced,
    /// The server has lost or forgotten the outcome.
    Unknown,
}

/// A slice whose answer to a push is missing.
pub trait InDoubt: Send + Sync + fmt::Debug {
    /// The tensor.
    fn tensor(&self) -> &Arc<str>;
    /// The shard that has not answered.
    fn shard(&self) -> u32;
    /// Range of the slice's elements in the tensor.
    fn elements(&self) -> Range<usize>;
    /// Waits for the outcome, up to the timeout.
    fn result(&self, timeout: Duration) -> Result<Fate>;
}

/// A push that did not completely succeed.
#[derive(Clone, Debug)]
pub struct PartialPush {
    /// The first refusal, or the error that ended the call.
    pub error: Error,
    /// Receipts of the tensors that were completely applied.
    pub receipts: Vec<(Arc<str>, Receipt)>,
    /// Slices that were refused, with their reasons.
    pub refused: Vec<(Arc<str>, Range<usize>, Error)>,
    /// Applied slices of tensors that were not completely applied.
    pub applied: Vec<(Arc<str>, Range<usize>, Applied)>,
    /// Slices whose answer is missing.
    pub in_doubt: Vec<Arc<dyn InDoubt>>,
}

/// Error of a push.
#[derive(Clone, Debug)]
pub enum PushError {
    /// Nothing was changed anywhere.
    Refused(Error),
    /// Some slices were, or may have been, applied.
    Partial(Box<PartialPush>),
}

impl From<Error> for PushError {
    fn from(error: Error) -> Self {
        Self::Refused(error)
    }
}

/// The result of a push: one receipt per gradient, in the order given.
pub type Pushed = Result<Vec<Receipt>, PushError>;

/// The caller that waits for a call.
pub trait Caller {
    /// Takes pulled values: the index of the name in the call, the index of the first element, the values'
    /// bytes (little-endian, whole elements). Called in any order, each element once.
    fn take(&mut self, tensor: usize, first_element: usize, values: &[u8]);

    /// Polled now and then during a long wait. A caller that stops waiting returns a callback for the end of
    /// the call, which continues in the background; the caller gets no more values.
    fn leaves(&mut self) -> Option<Box<dyn FnOnce() + Send>> {
        None
    }
}

impl<F: FnMut(usize, usize, &[u8])> Caller for F {
    fn take(&mut self, tensor: usize, first_element: usize, values: &[u8]) {
        self(tensor, first_element, values);
    }
}

/// A caller that takes no values and waits until the end.
#[derive(Clone, Copy, Debug)]
pub struct Patient;

impl Caller for Patient {
    fn take(&mut self, _tensor: usize, _first_element: usize, _values: &[u8]) {}
}

/// A tensor's optimizer state.
#[derive(Clone, Debug, PartialEq)]
pub struct OptimizerState {
    /// Optimizer steps taken, per slice.
    pub steps: Vec<u64>,
    /// torch's state names and the values, row-major, in the order of
    /// [`crate::kernel::optim::Optimizer::slots`].
    pub slots: Vec<(&'static str, Array)>,
}

/// Values that a pull without a target collected.
#[derive(Clone, Debug)]
pub struct Pulled {
    /// Per name of the call, row-major.
    pub values: Vec<Array>,
    /// Their versions.
    pub versions: Versions,
}

/// A call in progress.
pub trait Ticket<T>: Send + Sync {
    /// Returns whether `wait` would return immediately.
    fn is_done(&self) -> bool;
    /// Waits for the result; `None` after the timeout. The work continues, and `wait` may be called again.
    fn wait(&self, timeout: Duration) -> Option<T>;
    /// Calls `callback` once when the work is done, immediately if it already is; from any thread.
    fn on_done(&self, callback: Box<dyn FnOnce() + Send>);
}

/// A ticket for work that is already done.
#[derive(Debug)]
pub struct Done<T>(pub T);

impl<T: Clone + Send + Sync> Ticket<T> for Done<T> {
    fn is_done(&self) -> bool {
        true
    }
    fn wait(&self, _timeout: Duration) -> Option<T> {
        Some(self.0.clone())
    }
    fn on_done(&self, callback: Box<dyn FnOnce() + Send>) {
        callback();
    }
}

/// A client's session at shard 0.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct WorkerState {
    /// Number of the session among those of its shard.
    pub session: u64,
    /// The client's name.
    pub name: String,
    /// Frames applied.
    pub applied: u64,
    /// Time since its last message.
    pub idle: Duration,
    /// Its last report, if it sent one.
    pub report: Option<WorkerReport>,
}

impl WorkerState {
    /// The worker's name, or that of its client.
    pub fn shown_name(&self) -> &str {
        let own = self.report.as_ref().map_or("", |report| &report.name);
        if own.is_empty() { &self.name } else { own }
    }
}

/// A group that has workers.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct GroupState {
    /// The group's name.
    pub name: String,
    /// Its mode, as text.
    pub mode: String,
    /// Workers present.
    pub workers: u64,
    /// The smallest clock of its workers.
    pub slowest: u64,
    /// The largest clock of its workers.
    pub fastest: u64,
}

/// Counters by name, and the clients and groups of a cluster.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Stats {
    /// Sessions of clients at shard 0; empty in process.
    pub workers: Vec<WorkerState>,
    /// Groups that have workers, at shard 0; empty in process.
    pub groups: Vec<GroupState>,
    /// Per shard, in index order: its address (empty in process) and its counters.
    pub shards: Vec<(String, Vec<(String, u64)>)>,
    /// This client's own counters.
    pub client: Vec<(String, u64)>,
}
