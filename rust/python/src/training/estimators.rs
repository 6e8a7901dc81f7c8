//! The trainers of `fastps.hogwild`: they read NumPy's arrays in place and train without the GIL.

use crate::call::{SLICE, is_main};
use crate::errors::{OrRaise, config, raise};
use fastps_core::error::{Error, Kind};
use fastps_core::factorize::{Epoch, FactorRule, Factors, Order, Ratings};
use fastps_core::linear::{Csr, Examples, FeatureRows, Linear, Loss, Schedule, Settings, Stop, shuffle};
use numpy::{Element, PyArray1, PyArray2, PyArrayMethods, PyReadonlyArray1, PyReadonlyArray2};
use numpy::{PyUntypedArrayMethods, ndarray::Dimension};
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyTuple};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError, TryLockError};
use std::thread;
use std::time::Instant;

/// A linear model in training on one set of examples. `rows` is a float32 matrix or (data, indices, indptr)
/// of a CSR matrix, both of whose index arrays are int32 or int64. They must not change while it lives.
#[pyclass(frozen, module = "fastps._fastps")]
pub(crate) struct LinearTrainer {
    rows: Matrix,
    targets: Py<PyArray1<f32>>,
    weights: Option<Py<PyArray1<f32>>>,
    threads: usize,
    state: Mutex<State<Linear, Vec<u32>>>,
}

/// The factors of a matrix in training on one set of ratings: users, items (int32), values (float32). Factors
/// are matrices with a row for each user or item; biases have an element for each.
#[pyclass(frozen, module = "fastps._fastps")]
pub(crate) struct FactorTrainer {
    users: Py<PyArray1<i32>>,
    items: Py<PyArray1<i32>>,
    values: Py<PyArray1<f32>>,
    threads: usize,
    state: Mutex<State<Factors, Order>>,
}

/// State that passes change.
struct State<M, O> {
    model: M,
    order: O,
}

enum Matrix {
    Dense(Py<PyArray2<f32>>),
    Csr32(CsrArrays<i32>),
    Csr64(CsrArrays<i64>),
}

struct CsrArrays<I> {
    values: Py<PyArray1<f32>>,
    columns: Py<PyArray1<I>>,
    starts: Py<PyArray1<I>>,
}

/// A matrix that is being read.
enum Reading<'py> {
    Dense(PyReadonlyArray2<'py, f32>),
    Csr32(ReadingSparse<'py, i32>),
    Csr64(ReadingSparse<'py, i64>),
}

type ReadingSparse<'py, I> = (PyReadonlyArray1<'py, f32>, PyReadonlyArray1<'py, I>, PyReadonlyArray1<'py, I>);

/// Result of `LinearTrainer.average_coef`: coefficients and intercept.
type Averaged<'py> = Option<(Bound<'py, PyArray1<f32>>, f64)>;

impl Matrix {
    fn extract(rows: &Bound<'_, PyAny>) -> PyResult<Self> {
        let Ok(parts) = rows.cast::<PyTuple>() else { return Ok(Self::Dense(rows.extract()?)) };
        Ok(match CsrArrays::extract(parts) {
            Ok(sparse) => Self::Csr32(sparse),
            Err(_) => Self::Csr64(CsrArrays::extract(parts)?),
        })
    }

    fn read<'py>(&self, py: Python<'py>) -> Reading<'py> {
        match self {
            Self::Dense(values) => Reading::Dense(values.bind(py).readonly()),
            Self::Csr32(sparse) => Reading::Csr32(sparse.read(py)),
            Self::Csr64(sparse) => Reading::Csr64(sparse.read(py)),
        }
    }
}

impl<I: Element> CsrArrays<I> {
    fn extract(parts: &Bound<'_, PyTuple>) -> PyResult<Self> {
        let (values, columns, starts) = parts.extract()?;
        Ok(Self { values, columns, starts })
    }

    fn read<'py>(&self, py: Python<'py>) -> ReadingSparse<'py, I> {
        let (values, columns, starts) = (self.values.bind(py), self.columns.bind(py), self.starts.bind(py));
        (values.readonly(), columns.readonly(), starts.readonly())
    }
}

fn slice<'a, T: Element, D: Dimension>(
    py: Python<'_>,
    array: &'a numpy::PyReadonlyArray<'_, T, D>,
) -> PyResult<&'a [T]> {
    array.as_slice().map_err(|_| config(py, "an array is not contiguous", "C order", "other strides"))
}

fn csr<'a, I: Element>(py: Python<'_>, parts: &'a ReadingSparse<'_, I>) -> PyResult<Csr<'a, I>> {
    Ok(Csr { values: slice(py, &parts.0)?, columns: slice(py, &parts.1)?, starts: slice(py, &parts.2)? })
}

impl Reading<'_> {
    fn rows(&self, py: Python<'_>) -> PyResult<FeatureRows<'_>> {
        Ok(match self {
            Self::Dense(values) => FeatureRows::Dense(slice(py, values)?),
            Self::Csr32(parts) => FeatureRows::Csr32(csr(py, parts)?),
            Self::Csr64(parts) => FeatureRows::Csr64(csr(py, parts)?),
        })
    }
}

/// Never waits: the thread that holds the lock may be waiting for the GIL.
fn state<'a, S>(py: Python<'_>, state: &'a Mutex<S>) -> PyResult<MutexGuard<'a, S>> {
    match state.try_lock() {
        Ok(state) => Ok(state),
        Err(TryLockError::Poisoned(poisoned)) => Ok(poisoned.into_inner()),
        Err(TryLockError::WouldBlock) => {
            Err(config(py, "a trainer makes one pass at a time", "one thread", "another one"))
        }
    }
}

/// Works without the GIL. Before each block the main thread, which also works, checks whether a signal's
/// handler raises: then the work stops, its result is kept, and the exception is raised.
fn interruptible<T: Send>(
    py: Python<'_>,
    work: impl FnOnce(Stop<'_>) -> Result<T, Error> + Send,
) -> PyResult<T> {
    let main = is_main(py)?.then(|| thread::current().id());
    let stopped = AtomicBool::new(false);
    let seen = Mutex::new((Instant::now(), Ok(())));
    let look = || {
        let (looked, signal) = &mut *seen.lock().unwrap_or_else(PoisonError::into_inner);
        if signal.is_ok() && looked.elapsed() >= SLICE {
            // The method itself has one lifetime, and this is called with any.
            #[allow(clippy::redundant_closure_for_method_calls)]
            let found = Python::attach(|py| py.check_signals());
            stopped.store(found.is_err(), Ordering::Relaxed);
            (*looked, *signal) = (Instant::now(), found);
        }
    };
    let stop = || {
        if main == Some(thread::current().id()) {
            look();
        }
        stopped.load(Ordering::Relaxed)
    };
    let result = py.detach(|| work(&stop)).or_raise(py);
    seen.into_inner().unwrap_or_else(PoisonError::into_inner).1.and(result)
}

/// A setting by its name.
fn setting<'py, T: FromPyObjectOwned<'py>>(settings: &Bound<'py, PyDict>, name: &str) -> PyResult<T> {
    let missing = || config(settings.py(), "a setting is missing", name, "nothing");
    settings.get_item(name)?.ok_or_else(missing)?.extract().map_err(Into::into)
}

fn read_settings(py: Python<'_>, from: &Bound<'_, PyDict>) -> PyResult<Settings> {
    let loss: String = setting(from, "loss")?;
    let schedule: String = setting(from, "learning_rate")?;
    Ok(Settings {
        loss: Loss::parse(&loss, setting(from, "epsilon")?).or_raise(py)?,
        alpha: setting(from, "alpha")?,
        l1_ratio: setting(from, "l1_ratio")?,
        penalty: setting(from, "penalty")?,
        schedule: Schedule::parse(&schedule).or_raise(py)?,
        eta0: setting(from, "eta0")?,
        power_t: setting(from, "power_t")?,
        fit_intercept: setting(from, "fit_intercept")?,
        intercept_decay: setting(from, "intercept_decay")?,
        average: setting(from, "average")?,
        weight_pos: setting(from, "weight_pos")?,
        weight_neg: setting(from, "weight_neg")?,
    })
}

#[pymethods]
impl LinearTrainer {
    /// Checks everything once: `order` lists the rows to learn from.
    #[new]
    #[allow(clippy::too_many_arguments)]
    fn new(
        py: Python<'_>,
        rows: &Bound<'_, PyAny>,
        targets: Py<PyArray1<f32>>,
        weights: Option<Py<PyArray1<f32>>>,
        order: PyReadonlyArray1<'_, u32>,
        coef: PyReadonlyArray1<'_, f32>,
        intercept: f64,
        t: u64,
        average: Option<(PyReadonlyArray1<'_, f32>, f64)>,
        threads: usize,
        settings: &Bound<'_, PyDict>,
    ) -> PyResult<Self> {
        let rows = Matrix::extract(rows)?;
        let (coef, order) = (slice(py, &coef)?, slice(py, &order)?.to_vec());
        let count = targets.bind(py).len();
        let reading = rows.read(py);
        let checked = reading.rows(py)?;
        py.detach(|| checked.check(count, coef.len())).or_raise(py)?;
        let weighted = weights.as_ref().is_none_or(|weights| weights.bind(py).len() == count);
        if !weighted || order.iter().any(|i| *i as usize >= count) {
            let error = Error::new(Kind::Shape, "rows, targets, weights and order do not fit together");
            return Err(raise(py, &error));
        }
        let mut model = Linear::new(read_settings(py, settings)?, coef, intercept, t).or_raise(py)?;
        if let Some((coef, intercept)) = average {
            model = model.with_average(slice(py, &coef)?, intercept);
        }
        drop(reading);
        Ok(Self {
            rows,
            targets,
            weights,
            threads: threads.max(1),
            state: Mutex::new(State { model, order }),
        })
    }

    /// One pass, in a new order if there is a seed; `eta` replaces the step of a constant schedule. Returns
    /// the sum of losses (0 unless requested) and the number of examples learned from.
    fn epoch(
        &self,
        py: Python<'_>,
        seed: Option<u64>,
        eta: Option<f64>,
        want_loss: bool,
    ) -> PyResult<(f64, usize)> {
        let mut state = state(py, &self.state)?;
        let State { model, order } = &mut *state;
        let (rows, targets) = (self.rows.read(py), self.targets.bind(py).readonly());
        let weights = self.weights.as_ref().map(|weights| weights.bind(py).readonly());
        let rows = rows.rows(py)?;
        let targets = slice(py, &targets)?;
        let weights = weights.as_ref().map(|weights| slice(py, weights)).transpose()?;
        if let Some(eta) = eta {
            model.set_eta(eta);
        }
        let pass = interruptible(py, |stop| {
            if let Some(seed) = seed {
                shuffle(order, seed);
            }
            model.pass(Examples { rows, targets, weights, order }, self.threads, want_loss, stop)
        })?;
        Ok((pass.loss, pass.examples))
    }

    /// Continues from other coefficients.
    fn assign(&self, py: Python<'_>, coef: PyReadonlyArray1<'_, f32>, intercept: f64) -> PyResult<()> {
        let mut state = state(py, &self.state)?;
        let (coef, own) = (slice(py, &coef)?, state.model.coefficients().len());
        if coef.len() != own {
            return Err(config(py, "these are not as many coefficients", &own.to_string(), coef.len()));
        }
        state.model.assign(coef, intercept);
        Ok(())
    }

    /// The current coefficients.
    fn coef<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyArray1<f32>>> {
        Ok(PyArray1::from_vec(py, state(py, &self.state)?.model.coefficients()))
    }

    /// The sum of the coefficients' squares and the sum of their magnitudes; not finite if a coefficient is
    /// not.
    fn norms(&self, py: Python<'_>) -> PyResult<(f64, f64)> {
        Ok(state(py, &self.state)?.model.norms())
    }

    /// The current intercept.
    fn intercept(&self, py: Python<'_>) -> PyResult<f64> {
        Ok(state(py, &self.state)?.model.intercept())
    }

    /// Mean coefficients and intercept, if the average has begun.
    fn average<'py>(&self, py: Python<'py>) -> PyResult<Averaged<'py>> {
        let average = state(py, &self.state)?.model.average();
        Ok(average.map(|(coef, intercept)| (PyArray1::from_vec(py, coef), intercept)))
    }

    /// The count of the next example, beginning with 1.
    fn t(&self, py: Python<'_>) -> PyResult<u64> {
        Ok(state(py, &self.state)?.model.t())
    }
}

#[pymethods]
impl FactorTrainer {
    /// Checks everything once.
    #[new]
    #[allow(clippy::too_many_arguments)]
    fn new(
        py: Python<'_>,
        users: Py<PyArray1<i32>>,
        items: Py<PyArray1<i32>>,
        values: Py<PyArray1<f32>>,
        user_factors: PyReadonlyArray2<'_, f32>,
        user_biases: PyReadonlyArray1<'_, f32>,
        item_factors: PyReadonlyArray2<'_, f32>,
        item_biases: PyReadonlyArray1<'_, f32>,
        threads: usize,
    ) -> PyResult<Self> {
        let rank = user_factors.shape()[1];
        let of_users = (slice(py, &user_factors)?, slice(py, &user_biases)?);
        let of_items = (slice(py, &item_factors)?, slice(py, &item_biases)?);
        let model = Factors::new(rank, of_users, of_items).or_raise(py)?;
        u32::try_from(values.bind(py).len())
            .map_err(|_| config(py, "too many ratings", "fewer than 2^32", values.bind(py).len()))?;
        let threads = threads.max(1);
        let order = reading(py, [&users, &items], &values, |ratings| {
            let (users, items) = model.counts();
            ratings.check(users, items).or_raise(py)?;
            Ok(Order::new(ratings, users, threads))
        })?;
        Ok(Self { users, items, values, threads, state: Mutex::new(State { model, order }) })
    }

    /// Passes in a new order if there is a seed, else in the last one, with a step of this length. After
    /// each, `then` receives the sum of squared errors and the number of ratings learned from; it returns
    /// seed and step of the next one, or None at the end.
    fn train(
        &self,
        py: Python<'_>,
        seed: Option<u64>,
        lr: f64,
        regularization: f64,
        biases: bool,
        then: Py<PyAny>,
    ) -> PyResult<()> {
        let epoch = |(seed, lr)| Epoch { seed, rule: FactorRule { lr, regularization, biases } };
        let ask = |squares, learned| {
            Python::attach(|py| {
                let answer: Option<(Option<u64>, f64)> = then.call1(py, (squares, learned))?.extract(py)?;
                Ok(answer.map(epoch))
            })
        };
        let state = &mut *state(py, &self.state)?;
        let State { model, order } = state;
        let mut answered = Ok(());
        reading(py, [&self.users, &self.items], &self.values, |ratings| {
            interruptible(py, |stop| {
                let mut next = |squares, learned| {
                    if stop() {
                        return None;
                    }
                    ask(squares, learned).unwrap_or_else(|error: PyErr| {
                        answered = Err(error);
                        None
                    })
                };
                model.train(ratings, order, epoch((seed, lr)), self.threads, stop, &mut next)
            })
        })?;
        answered
    }

    /// Factors (flat, row by row) and biases of the users, then those of the items.
    #[allow(clippy::type_complexity)]
    fn parts<'py>(&self, py: Python<'py>) -> PyResult<[Bound<'py, PyArray1<f32>>; 4]> {
        let state = state(py, &self.state)?;
        let ((users, user_biases), (items, item_biases)) = (state.model.users(), state.model.items());
        Ok([users, user_biases, items, item_biases].map(|values| PyArray1::from_vec(py, values)))
    }
}

/// Lends ratings.
fn reading<T>(
    py: Python<'_>,
    [users, items]: [&Py<PyArray1<i32>>; 2],
    values: &Py<PyArray1<f32>>,
    work: impl FnOnce(Ratings<'_>) -> PyResult<T>,
) -> PyResult<T> {
    let (users, items) = (users.bind(py).readonly(), items.bind(py).readonly());
    let values = values.bind(py).readonly();
    work(Ratings { users: slice(py, &users)?, items: slice(py, &items)?, values: slice(py, &values)? })
}
