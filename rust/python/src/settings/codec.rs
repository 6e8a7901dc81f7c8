//! Codecs: the frozen dataclasses of `fastps.codecs`.

use super::{FLAG, field, kind};
use crate::errors::config;
use fastps_core::codec::Codec;
use pyo3::prelude::*;

/// The classes of `fastps.codecs`.
const CODECS: [&str; 5] = ["Float32", "BFloat16", "Int8", "FourBit", "OneBit"];

/// Reads a codec; None is float32.
pub(crate) fn read_codec(object: Option<&Bound<'_, PyAny>>) -> PyResult<Codec> {
    let Some(object) = object else { return Ok(Codec::Float32) };
    let py = object.py();
    let only = |block: u64| match field::<u64>(object, "block", &block.to_string())? {
        given if given == block => Ok(()),
        given => Err(config(py, "invalid block", &block.to_string(), given)),
    };
    match kind(object, "codec", &CODECS, "fastps.Int8()")?.as_str() {
        "float32" => Ok(Codec::Float32),
        "bfloat16" => Ok(Codec::BFloat16),
        "int8" => {
            only(64)?;
            let seed = field::<u64>(object, "seed", "an integer from 0 to 2**64 - 1")?;
            let stochastic = field::<bool>(object, "stochastic", FLAG)?;
            Ok(Codec::Int8 { seed: stochastic.then_some(seed) })
        }
        "fourbit" => only(64).map(|()| Codec::FourBit),
        "onebit" => only(1024).map(|()| Codec::OneBit),
        _ => Err(config(py, "invalid codec", "an object such as fastps.Int8()", object.repr()?)),
    }
}

/// Raises `ConfigError` unless the settings are valid.
#[pyfunction]
pub(crate) fn check_codec(codec: &Bound<'_, PyAny>) -> PyResult<()> {
    read_codec(Some(codec)).map(drop)
}
