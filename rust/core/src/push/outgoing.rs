//! Checks of a whole push, shared by the in-process store and the network client. Both call them before they
//! change the first slice or send the first byte, so a refused push has no effect. The exception is
//! [`check_and_encode`]: without `check_finite`, the client checks encoded values slice by slice as it sends
//! them.

use crate::base::dtype::{Array, DType, View};
use crate::base::error::{Error, Kind, Result};
use crate::base::isa::Isa;
use crate::base::text;
use crate::kernel::codec::{self, Codec, ErrorFeedback, Position};
use crate::kernel::finite;
use crate::push::sparse::Gathered;
use crate::slice::frame::{check_note, check_row_assignment, check_sparse_codec};
use crate::tensor::TensorSpec;
use crate::verbs::{Gradient, GradientRef, OptimizerState, PushOptions};
use foldhash::fast::RandomState;
use std::borrow::Cow;
use std::collections::HashSet;
use std::sync::Arc;

/// Checks shapes, settings and values of a whole push; each gradient comes with its tensor's spec. Returns
/// the largest magnitude, as [`check_finite`] does.
pub fn check<'a>(
    isa: Isa,
    gradients: impl Iterator<Item = (GradientRef<'a>, &'a TensorSpec)> + Clone,
    options: &PushOptions,
    feedback: Option<&mut ErrorFeedback>,
) -> Result<f64> {
    check_form(gradients.clone(), options, feedback.is_some())?;
    check_finite(isa, gradients.map(|(gradient, _)| gradient), options, feedback)
}

/// As [`check`], except for the values.
pub fn check_form<'a>(
    gradients: impl Iterator<Item = (GradientRef<'a>, &'a TensorSpec)>,
    options: &PushOptions,
    has_feedback: bool,
) -> Result<()> {
    check_options(options, has_feedback)?;
    let (at_least, _) = gradients.size_hint();
    let mut names = HashSet::with_capacity_and_hasher(at_least, RandomState::default());
    for (gradient, spec) in gradients {
        if !names.insert(gradient.name) {
            let error = Error::new(Kind::Config, "a tensor is named twice in one push");
            return Err(error.tensor(gradient.name));
        }
        check_codec(spec, options.codec, has_feedback)?;
        check_rate(spec, options.lr)?;
        if gradient.indices.is_some() {
            check_sparse(gradient, spec, options, has_feedback)?;
        } else {
            check_shape(gradient, spec)?;
        }
    }
    Ok(())
}

/// Fails if a codec is asked for, or error feedback, that the tensor's type does not have.
pub fn check_codec(spec: &TensorSpec, codec: Option<Codec>, has_feedback: bool) -> Result<()> {
    if codec.is_some() {
        spec.need_float32("codec=")?;
    }
    if has_feedback { spec.need_float32("error feedback") } else { Ok(()) }
}

/// Fails if a step of the tensor cannot have this learning rate.
pub fn check_rate(spec: &TensorSpec, lr: Option<f64>) -> Result<()> {
    spec.optimizer.check_rate(lr).map_err(|error| error.tensor(spec.name.clone()))
}

/// Fails unless a sparse gradient can be pushed with these options, and has the dtype and row shape of its
/// tensor.
fn check_sparse(
    gradient: GradientRef<'_>,
    spec: &TensorSpec,
    options: &PushOptions,
    has_feedback: bool,
) -> Result<()> {
    let name = |error: Error| error.tensor(gradient.name);
    spec.need_float32("a sparse gradient")?;
    check_dtype(gradient.values, spec)?;
    spec.check_sparse().map_err(name)?;
    check_sparse_codec(options.codec_of(spec.dtype)).map_err(name)?;
    if has_feedback {
        let error = Error::new(Kind::Config, "a sparse gradient has no error feedback");
        return Err(name(error.expected("a push that is not bound", "one with residuals")));
    }
    check_row_shape(gradient, spec)
}

/// Fails unless the values of a sparse gradient or assignment are as many rows of the tensor as its indices.
fn check_row_shape(gradient: GradientRef<'_>, spec: &TensorSpec) -> Result<()> {
    let rows = gradient.indices.map_or(0, <[i64]>::len);
    let mut shape = spec.shape.clone();
    let Some(first) = shape.first_mut() else {
        let error = Error::new(Kind::Shape, "a scalar has no rows to be indexed");
        return Err(error.tensor(gradient.name));
    };
    *first = rows as u64;
    if gradient.shape == shape && gradient.values.len() == rows * spec.row_width() {
        return Ok(());
    }
    Err(wrong_shape(gradient, &shape))
}

/// Checks assignments, and gathers those of rows; `None`: one is of the whole tensor.
pub fn check_assigned<'a>(
    isa: Isa,
    assigned: impl Iterator<Item = (GradientRef<'a>, &'a TensorSpec)>,
) -> Result<Vec<Option<Gathered>>> {
    let (at_least, _) = assigned.size_hint();
    let mut names = HashSet::with_capacity_and_hasher(at_least, RandomState::default());
    let check = |(values, spec): (GradientRef<'a>, &TensorSpec)| {
        if !names.insert(values.name) {
            let error = Error::new(Kind::Config, "a tensor is named twice in one assignment");
            return Err(error.tensor(values.name));
        }
        assigned_rows(isa, values, spec)
    };
    assigned.map(check).collect()
}

/// Checks and gathers an assignment of rows; `None`: it is of the whole tensor, and checked.
pub fn assigned_rows(isa: Isa, values: GradientRef<'_>, spec: &TensorSpec) -> Result<Option<Gathered>> {
    let name = |error: Error| error.tensor(values.name);
    let Some(indices) = values.indices else {
        check_assigned_dtype(values.values, spec)?;
        if values.shape != spec.shape {
            return Err(wrong_shape(values, &spec.shape));
        }
        return check_values(isa, values.values, spec).map(|()| None);
    };
    check_row_assignment(spec.dtype, spec.apply).map_err(name)?;
    check_dtype(values.values, spec)?;
    check_row_shape(values, spec)?;
    let rows = values.values.float32s().map_err(name)?;
    finite::check(isa, rows, None).map_err(name)?;
    Gathered::assigned(spec, indices, rows).map(Some)
}

/// The gradients of a portion, in the order of a space's tensors; fails unless there is one dense gradient
/// for each of them, and no other.
pub fn portion_gradients<'a>(
    specs: &[Arc<TensorSpec>],
    gradients: &'a [Gradient],
) -> Result<Vec<&'a Gradient>> {
    let find = |spec: &Arc<TensorSpec>| {
        let gradient = gradient_of(gradients, &spec.name)?;
        check_shape(gradient.borrow(), spec)?;
        Ok(gradient)
    };
    let found = specs.iter().map(find).collect::<Result<Vec<_>>>()?;
    let is_extra = |gradient: &&Gradient| specs.iter().all(|spec| spec.name != gradient.name);
    match gradients.iter().find(is_extra) {
        None => Ok(found),
        Some(extra) => {
            let message = "a portion has a gradient of a tensor that is not in its space";
            Err(Error::new(Kind::Config, message).tensor(extra.name.clone()))
        }
    }
}

/// The gradient of a tensor; fails if there is none or more than one, or if it is sparse.
fn gradient_of<'a>(gradients: &'a [Gradient], name: &Arc<str>) -> Result<&'a Gradient> {
    let mut own = gradients.iter().filter(|gradient| gradient.name == *name);
    let fail = |message: &str, got: &str| {
        Err(Error::new(Kind::Config, message).tensor(name.clone()).expected("one dense gradient", got))
    };
    match (own.next(), own.next()) {
        (Some(gradient), None) if gradient.values.bodies().is_some() => {
            fail("the gradient of a portion is encoded", "an encoded one")
        }
        (Some(gradient), None) if gradient.values.indices().is_none() => Ok(gradient),
        (Some(_), None) => fail("the gradient of a portion is sparse", "a sparse one"),
        (None, _) => fail("a portion lacks the tensor's gradient", "none"),
        (Some(_), Some(_)) => fail("a portion has two gradients of the tensor", "two"),
    }
}

/// Gathers the sparse gradients of a checked push for their slices; `None` for dense ones.
pub fn gather<'a>(
    isa: Isa,
    gradients: impl Iterator<Item = (GradientRef<'a>, &'a TensorSpec)>,
    options: &PushOptions,
) -> Result<Vec<Option<Gathered>>> {
    let check = options.check_finite || !options.is_plain();
    let one = |(gradient, spec): (GradientRef<'a>, &TensorSpec)| {
        let gather = |indices| {
            let values = gradient.values.float32s()?;
            Gathered::new(isa, spec, (indices, values), check, options.every_slice)
        };
        gradient.indices.map(gather).transpose()
    };
    gradients.map(one).collect()
}

/// Checks the settings of a push.
pub fn check_options(options: &PushOptions, has_feedback: bool) -> Result<()> {
    if options.codec == Some(Codec::OneBit) && !has_feedback {
        return Err(Error::new(
            Kind::Config,
            "OneBit needs error feedback: push through a Worker or a bound list",
        ));
    }
    options.lr.map_or(Ok(()), check_lr)?;
    if let Some(scale) = options.scale.filter(|scale| !scale.is_finite()) {
        return Err(Error::new(Kind::Config, "invalid scale").expected("a finite number", scale));
    }
    if let Some(weight) = options.weight.filter(|weight| !weight.is_finite() || *weight <= 0.0) {
        return Err(Error::new(Kind::Config, "invalid weight").expected("a finite number > 0", weight));
    }
    options.note.as_deref().map_or(Ok(()), check_note)
}

/// Checks a learning rate.
pub fn check_lr(lr: f64) -> Result<()> {
    if (lr as f32).is_finite() && lr >= 0.0 {
        return Ok(());
    }
    Err(Error::new(Kind::Config, "invalid lr").expected("a finite number >= 0", lr))
}

/// Scans a whole push for NaN and infinity, and returns the largest magnitude (0 if the options turn the scan
/// off). Values that are rounded or added to a residual must be finite, even if the options turn the check
/// off. Encoded ones are checked as bytes from outside are; their shapes are right.
pub fn check_finite<'a>(
    isa: Isa,
    gradients: impl Iterator<Item = GradientRef<'a>>,
    options: &PushOptions,
    mut feedback: Option<&mut ErrorFeedback>,
) -> Result<f64> {
    let mut largest: f64 = 0.0;
    let scans = options.check_finite || !options.is_plain() || feedback.is_some();
    for GradientRef { name, shape, values, bodies, .. } in gradients {
        let checked = match (bodies, feedback.as_deref_mut()) {
            (Some(bodies), _) => bodies.check(isa, shape.iter().product::<u64>() as usize),
            (None, _) if !scans => continue,
            (None, None) => finite::check_view(isa, values),
            (None, Some(feedback)) => values.float32s().and_then(|values| {
                let residual = feedback.residual(name, values.len())?;
                finite::check(isa, values, Some(&*residual))
            }),
        };
        largest = largest.max(checked.map_err(|error| error.tensor(name))?);
    }
    Ok(largest)
}

/// As [`Codec::encode`], for unchecked values. If one is not finite, `residual` is restored, except for the
/// rounding of a sum.
pub fn check_and_encode(
    isa: Isa,
    codec: Codec,
    values: &[f32],
    mut residual: Option<&mut [f32]>,
    position: Position,
) -> Result<Vec<u8>> {
    let mut body = Vec::with_capacity(codec.id().body_len(values.len()));
    if codec.id().marked().is_none() {
        finite::check(isa, values, residual.as_deref())?;
    }
    codec.encode(isa, values, residual.as_deref_mut(), position, &mut body);
    // If the body shows whether the values were finite, one pass over them suffices.
    if !codec.id().was_finite(&body, values.len()) {
        if let Some(residual) = residual.as_deref_mut() {
            codec::take_back(isa, codec.id(), values, &body, residual);
        }
        finite::check(isa, values, residual.as_deref())?;
        return Err(Error::new(Kind::Internal, "the two checks of a gradient disagree"));
    }
    Ok(body)
}

/// Fails unless the gradient has its tensor's dtype and shape.
pub fn check_shape(gradient: GradientRef<'_>, spec: &TensorSpec) -> Result<()> {
    if gradient.indices.is_some() {
        let error = Error::new(Kind::Config, "a sparse gradient cannot be bound");
        return Err(error.tensor(gradient.name).expected("values of the whole tensor", "some rows"));
    }
    check_dtype(gradient.values, spec)?;
    if gradient.shape != spec.shape {
        return Err(wrong_shape(gradient, &spec.shape));
    }
    match gradient.bodies {
        Some(bodies) => bodies.check_len(spec.elements()).map_err(|error| error.tensor(gradient.name)),
        None if gradient.values.len() == spec.elements() => Ok(()),
        None => Err(wrong_shape(gradient, &spec.shape)),
    }
}

fn wrong_shape(gradient: GradientRef<'_>, expected: &[u64]) -> Error {
    let error = Error::new(Kind::Shape, "wrong shape").tensor(gradient.name);
    error.expected(text::shape(expected), text::shape(gradient.shape))
}

/// Fails unless values that replace a tensor's have its dtype and number of elements and are all finite.
pub fn check_values(isa: Isa, values: View<'_>, spec: &TensorSpec) -> Result<()> {
    check_assigned_dtype(values, spec)?;
    let name = |error: Error| error.tensor(spec.name.clone());
    if values.len() != spec.elements() {
        return Err(name(Error::new(Kind::Shape, "the values do not fill the shape"))
            .expected(text::shape(&spec.shape), format!("{} values", values.len())));
    }
    finite::check_view(isa, values).map(drop).map_err(name)
}

/// Fails unless gradients have the type that the tensor computes in.
fn check_dtype(values: View<'_>, spec: &TensorSpec) -> Result<()> {
    if values.dtype() == spec.dtype.computed() {
        return Ok(());
    }
    Err(wrong_dtype(values, spec, spec.dtype.computed().name()))
}

/// Fails unless assigned values have the tensor's type, or one that is rounded to it.
fn check_assigned_dtype(values: View<'_>, spec: &TensorSpec) -> Result<()> {
    if values.dtype() == spec.dtype || values.dtype() == spec.dtype.computed() {
        return Ok(());
    }
    let expected = if spec.dtype == DType::BFloat16 { "float32 or bfloat16" } else { spec.dtype.name() };
    Err(wrong_dtype(values, spec, expected))
}

fn wrong_dtype(values: View<'_>, spec: &TensorSpec, expected: &str) -> Error {
    Error::new(Kind::DType, "the dtype is not the registered one; convert the values")
        .tensor(spec.name.clone())
        .expected(expected, values.dtype().name())
}

/// The body that assigns checked values: their bytes in the tensor's type, rounded to nearest even.
pub fn assigned_body<'a>(isa: Isa, values: View<'a>, spec: &TensorSpec) -> Cow<'a, [u8]> {
    match (values, spec.dtype) {
        (View::Float32(values), DType::BFloat16) => {
            let mut body = Vec::new();
            Codec::BFloat16.encode(isa, values, None, Position::default(), &mut body);
            Cow::Owned(body)
        }
        _ => Cow::Borrowed(values.bytes()),
    }
}

/// The bodies of a state assignment, one per slice, each with all slots in order.
pub fn state_bodies(spec: &TensorSpec, state: &OptimizerState) -> Result<Vec<Vec<u8>>> {
    let name = |error: Error| error.tensor(spec.name.clone());
    let expected = spec.slots();
    let got: Vec<_> = state.slots.iter().map(|(slot, _)| *slot).collect();
    if expected != got {
        let error = Error::new(Kind::Config, "the state is not this optimizer's");
        return Err(name(error.expected(text::names(expected.iter().copied()), text::names(got))));
    }
    if state.steps.len() != spec.slice_count() {
        let error = Error::new(Kind::Shape, "the state has step counts for another number of slices");
        return Err(name(error.expected(spec.slice_count(), state.steps.len())));
    }
    let dtype = spec.dtype.computed();
    if let Some((slot, values)) = state.slots.iter().find(|(_, values)| values.view().dtype() != dtype) {
        let error = Error::new(Kind::DType, format!("state {slot}: the dtype is not that of the state"));
        return Err(name(error.expected(dtype.name(), values.view().dtype().name())));
    }
    if let Some((slot, values)) = state.slots.iter().find(|(_, values)| values.len() != spec.elements()) {
        let error = Error::new(Kind::Shape, format!("state {slot} has the wrong length"));
        return Err(name(error.expected(spec.elements(), values.len())));
    }
    let body = |range: std::ops::Range<usize>| {
        let run = |(_, values): &(&str, Array)| values.view().get(range.clone()).bytes().to_vec();
        state.slots.iter().flat_map(run).collect()
    };
    Ok(spec.slices().map(body).collect())
}
