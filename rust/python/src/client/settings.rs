//! Settings of a push: read once from Python's objects, checked by the core with the push.

use super::Client;
use crate::arguments::instance;
use crate::call::Seconds;
use crate::codecs::ErrorFeedback;
use crate::errors::OrRaise;
use crate::results::Versions;
use crate::settings::codec::read_codec;
use crate::settings::number;
use fastps_core::codec::Codec;
use fastps_core::correction::Correction;
use fastps_core::frame::check_note;
use fastps_core::verbs::{self, PushOptions};
use pyo3::prelude::*;
use std::sync::Arc;

/// Handling of stale gradients: ``(delay_adaptive, max_staleness, reject, momentum_matching)``.
type Staleness = (bool, Option<u64>, bool, bool);

/// The settings of a push; None means the default.
#[pyclass(frozen, module = "fastps._fastps", name = "PushSettings")]
#[derive(Debug)]
pub(crate) struct PushSettings {
    pub(super) codec: Option<Codec>,
    lr: Option<f64>,
    scale: Option<f32>,
    weight: Option<f32>,
    based_on: Option<Arc<verbs::Versions>>,
    timeout: Option<Seconds>,
    correction: Option<Correction>,
    note: Option<Arc<str>>,
}

#[pymethods]
impl PushSettings {
    #[new]
    #[pyo3(signature = (codec=None, lr=None, scale=None, based_on=None, timeout=None, correction=None, weight=None, note=None))]
    #[allow(clippy::too_many_arguments)]
    fn new(
        py: Python<'_>,
        codec: Option<&Bound<'_, PyAny>>,
        lr: Option<&Bound<'_, PyAny>>,
        scale: Option<&Bound<'_, PyAny>>,
        based_on: Option<&Bound<'_, PyAny>>,
        timeout: Option<Seconds>,
        correction: Option<Staleness>,
        weight: Option<f32>,
        note: Option<&str>,
    ) -> PyResult<Self> {
        let correction = correction.map(|(delay_adaptive, max_staleness, reject, momentum_matching)| {
            Correction { delay_adaptive, max_staleness, reject, momentum_matching }
        });
        let codec = codec.map(|codec| read_codec(Some(codec))).transpose()?;
        let based_on = based_on
            .map(|given| instance::<Versions>(given, "based_on", "the fastps.Versions of a pull, or None"))
            .transpose()?
            .map(|versions| versions.get().0.clone());
        let lr = lr.map(|lr| number(lr, "lr")).transpose()?;
        let scale = scale.map(|scale| number(scale, "scale")).transpose()?;
        let note = note.map(|note| check_note(note).map(|()| note.into())).transpose().or_raise(py)?;
        Ok(Self { codec, lr, scale, weight, based_on, timeout, correction, note })
    }
}

impl PushSettings {
    /// Options for the core: with a codec and its error feedback, and the client's own defaults.
    pub(super) fn options(
        &self,
        py: Python<'_>,
        client: &Client,
        codec: Option<Codec>,
        feedback: Option<&ErrorFeedback>,
    ) -> PyResult<PushOptions> {
        Ok(PushOptions {
            codec,
            lr: self.lr,
            scale: self.scale,
            weight: self.weight,
            based_on: self.based_on.clone(),
            correction: self.correction,
            note: self.note.clone(),
            feedback: feedback.map(|f| f.0.clone()),
            every_slice: false,
            check_finite: client.check_finite,
            timeout: client.timeout(py, self.timeout)?,
        })
    }
}
