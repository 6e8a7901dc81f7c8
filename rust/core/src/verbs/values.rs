//! The verbs that an in-process store and a cluster of servers have in common, and what they take and give.

use crate::base::correction::Correction;
use crate::base::dtype::{Array, View};
use crate::base::error::{Error, Result};
use crate::kernel::codec::{Codec, ErrorFeedback};
use crate::slice::frame::Applied;
use crate::tensor::Versions;
use std::fmt;
use std::ops::Range;
use std::sync::{Arc, Mutex};
use std::time::Duration;

/// Values of a caller, kept alive and unchanged by it until the push that reads them is done.
pub trait Values: Send + Sync {
    /// The values.
    fn view(&self) -> View<'_>;

    /// The rows that they are for, in any order, repeats included; `None`: they are for the whole tensor.
    fn indices(&self) -> Option<&[i64]> {
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
    /// The shape of `values`, to be compared with the registered one.
    pub shape: Vec<u64>,
    /// Row-major values.
    pub values: Arc<dyn Values>,
}

/// A gradient whose memory outlives the call: what a push that ends before it returns needs.
#[derive(Clone, Copy, Debug)]
pub struct GradientRef<'a> {
    /// The tensor's name.
    pub name: &'a str,
    /// The shape of `values`.
    pub shape: &'a [u64],
    /// Row-major values.
    pub values: View<'a>,
    /// The rows that they are for; `None`: the whole tensor.
    pub indices: Option<&'a [i64]>,
}

/// Values for some rows of a tensor: a sparse gradient. Their shape is the tensor's, but for the number of
/// rows.
#[derive(Clone, Debug)]
pub struct SparseValues<V> {
    /// The rows.
    pub indices: Vec<i64>,
    /// Their values, one row after the other.
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

/// Rows of a tensor, to be pulled.
#[derive(Clone, Debug)]
pub struct Rows {
    /// The tensor's name.
    pub name: Arc<str>,
    /// The rows, in any order, repeats included.
    pub indices: Vec<i64>,
}

impl Gradient {
    /// The same gradient, borrowed.
    pub fn borrow(&self) -> GradientRef<'_> {
        let (values, indices) = (self.values.view(), self.values.indices());
        GradientRef { name: &self.name, shape: &self.shape, values, indices }
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

/// How a push is made; one value for all its tensors.
#[derive(Clone, Debug)]
pub struct PushOptions {
    /// The codec of every gradient.
    pub codec: Codec,
    /// Learning rate in place of the optimizers'.
    pub lr: Option<f64>,
    /// Factor on the gradients.
    pub scale: Option<f32>,
    /// What the gradients are based on: as an earlier pull of the same client returned it.
    pub based_on: Option<Arc<Versions>>,
    /// What is to become of gradients that are stale.
    pub correction: Option<Correction>,
    /// Residuals; mandatory for [`Codec::OneBit`]. Content that a server refused or fenced is given back to
    /// them, but not what was too stale.
    pub feedback: Option<Arc<Mutex<ErrorFeedback>>>,
    /// A sparse gradient goes to slices with none of its rows, too: a version of several workers waits for
    /// each of them.
    pub every_slice: bool,
    /// Scan all values before anything is sent or changed.
    pub check_finite: bool,
    /// When the call gives up.
    pub timeout: Duration,
}

impl Default for PushOptions {
    fn default() -> Self {
        Self {
            codec: Codec::Float32,
            lr: None,
            scale: None,
            based_on: None,
            correction: None,
            feedback: None,
            every_slice: false,
            check_finite: true,
            timeout: Duration::from_secs(30),
        }
    }
}

/// What became of one tensor of a push: always "applied".
#[derive(Clone, Debug, PartialEq)]
pub struct Receipt {
    /// Smallest version of its slices.
    pub version: u64,
    /// Largest staleness of its slices; `None` when no base was known.
    pub staleness: Option<u64>,
    /// Some slice had been applied before.
    pub duplicate: bool,
    /// How many had.
    pub duplicates: u64,
    /// Smallest factor that was put on the gradient.
    pub scale: f32,
    /// Bytes of all bodies as sent.
    pub bytes: u64,
}

impl Receipt {
    /// The receipt of a tensor whose slices were all applied.
    pub fn merge(slices: impl IntoIterator<Item = Applied>, bytes: u64) -> Self {
        let mut merged = Self::of_nothing(bytes);
        slices.into_iter().for_each(|slice| merged.add(&slice));
        merged.done()
    }

    /// To be filled by [`Receipt::add`].
    pub fn of_nothing(bytes: u64) -> Self {
        let (version, scale) = (u64::MAX, f32::INFINITY);
        Self { version, staleness: None, duplicate: false, duplicates: 0, scale, bytes }
    }

    /// With all slices added. A sparse gradient without rows changes none; its receipt says version 0.
    pub fn done(self) -> Self {
        if self.version == u64::MAX {
            return Self { version: 0, scale: 1.0, ..self };
        }
        self
    }

    /// Adds one slice's answer.
    pub fn add(&mut self, slice: &Applied) {
        self.version = self.version.min(slice.version);
        self.staleness = self.staleness.max(slice.staleness);
        self.duplicate |= slice.duplicate;
        self.duplicates += u64::from(slice.duplicate);
        self.scale = self.scale.min(slice.scale);
    }
}

/// How a slice of a failed push stands once it is known.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fate {
    /// It was applied.
    Applied {
        /// At this version.
        version: u64,
    },
    /// It was not applied and never will be.
    Fenced,
    /// Nobody can tell any more.
    Unknown,
}

/// A slice whose answer is missing.
pub trait InDoubt: Send + Sync + fmt::Debug {
    /// The tensor.
    fn tensor(&self) -> &Arc<str>;
    /// The shard that has not answered.
    fn shard(&self) -> u32;
    /// The elements of the tensor.
    fn elements(&self) -> Range<usize>;
    /// Waits until the server tells.
    fn result(&self, timeout: Duration) -> Result<Fate>;
}

/// A push that did not wholly succeed.
#[derive(Clone, Debug)]
pub struct PartialPush {
    /// Why; the first refusal, or what cut the call short.
    pub error: Error,
    /// Receipts of the tensors that were applied whole.
    pub receipts: Vec<(Arc<str>, Receipt)>,
    /// Slices that were refused, with their reasons.
    pub refused: Vec<(Arc<str>, Range<usize>, Error)>,
    /// Slices that were applied, of tensors that were not applied whole.
    pub applied: Vec<(Arc<str>, Range<usize>, Applied)>,
    /// Slices whose answer is missing.
    pub in_doubt: Vec<Arc<dyn InDoubt>>,
}

/// Why a push failed.
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

/// Whoever waits for a call.
pub trait Caller {
    /// Takes pulled values: the index of the name in the call, the index of the first element, the values'
    /// bytes (little-endian, whole elements). Called in any order, each element once.
    fn take(&mut self, tensor: usize, first_element: usize, values: &[u8]);

    /// Asked now and then in a long wait. A caller that waits no longer says what shall be done when the
    /// call, which then goes on by itself, has ended; nothing more is handed to it.
    fn leaves(&mut self) -> Option<Box<dyn FnOnce() + Send>> {
        None
    }
}

impl<F: FnMut(usize, usize, &[u8])> Caller for F {
    fn take(&mut self, tensor: usize, first_element: usize, values: &[u8]) {
        self(tensor, first_element, values);
    }
}

/// A caller that waits for nothing but the end.
#[derive(Clone, Copy, Debug)]
pub struct Patient;

impl Caller for Patient {
    fn take(&mut self, _tensor: usize, _first_element: usize, _values: &[u8]) {}
}

/// A tensor's optimizer state.
#[derive(Clone, Debug, PartialEq)]
pub struct State {
    /// Steps taken, per slice.
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

/// Something under way.
pub trait Ticket<T>: Send + Sync {
    /// Whether `wait` would return at once.
    fn is_done(&self) -> bool;
    /// Waits; `None` after the timeout (the work goes on, `wait` again).
    fn wait(&self, timeout: Duration) -> Option<T>;
    /// Calls back once when done, at once if it is; from any thread.
    fn on_done(&self, callback: Box<dyn FnOnce() + Send>);
}

/// A ticket of work that was done at once.
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

/// Counters by name.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Stats {
    /// Per shard, in index order: its address (empty in process) and its counters.
    pub shards: Vec<(String, Vec<(String, u64)>)>,
    /// This client's own counters.
    pub client: Vec<(String, u64)>,
}
