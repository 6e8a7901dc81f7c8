//! Codecs and optimizers: from the frozen dataclasses of `fastps.codecs` and `fastps.optim`, and back.

use crate::errors::{self, OrRaise, config};
use fastps_core::codec::Codec;
use fastps_core::mode::{Mode, Quorum};
use fastps_core::optim::{Adadelta, Adagrad, Adam, AdamW, EpsMode, Ftrl, Optimizer, Rmsprop, Sgd};
use fastps_core::tensor::Apply;
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::PyDict;

fn kind(object: &Bound<'_, PyAny>, what: &str, example: &str) -> PyResult<String> {
    let py = object.py();
    match object.getattr(intern!(py, "_kind")).and_then(|k| k.extract::<String>()) {
        Ok(kind) if !object.is_instance_of::<pyo3::types::PyType>() => Ok(kind),
        Ok(_) => {
            Err(config(py, &format!("invalid {what}"), &format!("an object such as {example}"), "a class"))
        }
        Err(_) => Err(config(
            py,
            &format!("invalid {what}"),
            &format!("an object such as {example}"),
            object.get_type().name()?,
        )),
    }
}

fn field<'py, T>(object: &Bound<'py, PyAny>, name: &str, expected: &str) -> PyResult<T>
where
    T: for<'a> FromPyObject<'a, 'py>,
{
    let value = object.getattr(name)?;
    value.extract::<T>().map_err(|_| match value.repr() {
        Ok(text) => config(object.py(), &format!("invalid {name}"), expected, text),
        Err(error) => error,
    })
}

/// Reads a codec; None is float32.
pub(crate) fn codec(object: Option<&Bound<'_, PyAny>>) -> PyResult<Codec> {
    let Some(object) = object else { return Ok(Codec::Float32) };
    let py = object.py();
    let only = |block: u64| match field::<u64>(object, "block", &block.to_string())? {
        given if given == block => Ok(()),
        given => Err(config(py, "invalid block", &block.to_string(), given)),
    };
    match kind(object, "codec", "fastps.Int8()")?.as_str() {
        "float32" => Ok(Codec::Float32),
        "bfloat16" => Ok(Codec::BFloat16),
        "int8" => {
            only(64)?;
            let seed = field::<u64>(object, "seed", "an integer from 0 to 2**64 - 1")?;
            let stochastic = field::<bool>(object, "stochastic", "True or False")?;
            Ok(Codec::Int8 { seed: stochastic.then_some(seed) })
        }
        "onebit" => only(1024).map(|()| Codec::OneBit),
        _ => Err(config(py, "invalid codec", "an object such as fastps.Int8()", object.repr()?)),
    }
}

/// Reads an optimizer.
pub(crate) fn optimizer(object: &Bound<'_, PyAny>) -> PyResult<Optimizer> {
    let py = object.py();
    let number = |name| field::<f64>(object, name, "a number");
    let flag = |name| field::<bool>(object, name, "True or False");
    let eps_mode = || match field::<String>(object, "eps_mode", "a string")?.as_str() {
        "outside" => Ok(EpsMode::Outside),
        "inside" => Ok(EpsMode::Inside),
        "both" => Ok(EpsMode::Both),
        other => {
            Err(config(py, "invalid eps_mode", "\"outside\", \"inside\" or \"both\"", format!("{other:?}")))
        }
    };
    let adam = || {
        let (beta1, beta2) = field::<(f64, f64)>(object, "betas", "two numbers")?;
        Ok::<_, PyErr>(Adam {
            lr: number("lr")?,
            beta1,
            beta2,
            eps: number("eps")?,
            weight_decay: number("weight_decay")?,
            amsgrad: flag("amsgrad")?,
            maximize: flag("maximize")?,
        })
    };
    let optimizer = match kind(object, "optimizer", "fastps.Adam(lr=0.001)")?.as_str() {
        "sgd" => Optimizer::Sgd(Sgd {
            lr: number("lr")?,
            momentum: number("momentum")?,
            dampening: number("dampening")?,
            weight_decay: number("weight_decay")?,
            nesterov: flag("nesterov")?,
            maximize: flag("maximize")?,
        }),
        "adagrad" => Optimizer::Adagrad(Adagrad {
            lr: number("lr")?,
            lr_decay: number("lr_decay")?,
            weight_decay: number("weight_decay")?,
            initial_accumulator_value: number("initial_accumulator_value")?,
            eps: number("eps")?,
            eps_mode: eps_mode()?,
            maximize: flag("maximize")?,
        }),
        "rmsprop" => Optimizer::Rmsprop(Rmsprop {
            lr: number("lr")?,
            alpha: number("alpha")?,
            eps: number("eps")?,
            weight_decay: number("weight_decay")?,
            momentum: number("momentum")?,
            centered: flag("centered")?,
            eps_mode: eps_mode()?,
            maximize: flag("maximize")?,
        }),
        "adadelta" => Optimizer::Adadelta(Adadelta {
            lr: number("lr")?,
            rho: number("rho")?,
            eps: number("eps")?,
            weight_decay: number("weight_decay")?,
            maximize: flag("maximize")?,
        }),
        "adam" => Optimizer::Adam(adam()?),
        "adamw" => Optimizer::AdamW(AdamW(adam()?)),
        "ftrl" => Optimizer::Ftrl(Ftrl {
            lr: number("lr")?,
            beta: number("beta")?,
            l1: number("l1")?,
            l2: number("l2")?,
            maximize: flag("maximize")?,
        }),
        _ => {
            return Err(config(
                py,
                "invalid optimizer",
                "an object such as fastps.Adam(lr=0.001)",
                object.repr()?,
            ));
        }
    };
    optimizer.validate().or_raise(py)?;
    Ok(optimizer)
}

/// The dataclass of an optimizer.
pub(crate) fn optimizer_object<'py>(py: Python<'py>, optimizer: &Optimizer) -> PyResult<Bound<'py, PyAny>> {
    let fields = PyDict::new(py);
    let numbers =
        |pairs: &[(&str, f64)]| pairs.iter().try_for_each(|(name, value)| fields.set_item(name, value));
    let flags =
        |pairs: &[(&str, bool)]| pairs.iter().try_for_each(|(name, value)| fields.set_item(name, value));
    let eps_mode = |mode: EpsMode| {
        let name = match mode {
            EpsMode::Outside => "outside",
            EpsMode::Inside => "inside",
            EpsMode::Both => "both",
        };
        fields.set_item("eps_mode", name)
    };
    let class = match optimizer {
        Optimizer::Sgd(o) => {
            numbers(&[
                ("lr", o.lr),
                ("momentum", o.momentum),
                ("dampening", o.dampening),
                ("weight_decay", o.weight_decay),
            ])?;
            flags(&[("nesterov", o.nesterov), ("maximize", o.maximize)])?;
            "SGD"
        }
        Optimizer::Adagrad(o) => {
            numbers(&[
                ("lr", o.lr),
                ("lr_decay", o.lr_decay),
                ("weight_decay", o.weight_decay),
                ("eps", o.eps),
            ])?;
            numbers(&[("initial_accumulator_value", o.initial_accumulator_value)])?;
            flags(&[("maximize", o.maximize)])?;
            eps_mode(o.eps_mode)?;
            "Adagrad"
        }
        Optimizer::Rmsprop(o) => {
            numbers(&[("lr", o.lr), ("alpha", o.alpha), ("eps", o.eps), ("weight_decay", o.weight_decay)])?;
            numbers(&[("momentum", o.momentum)])?;
            flags(&[("centered", o.centered), ("maximize", o.maximize)])?;
            eps_mode(o.eps_mode)?;
            "RMSprop"
        }
        Optimizer::Adadelta(o) => {
            numbers(&[("lr", o.lr), ("rho", o.rho), ("eps", o.eps), ("weight_decay", o.weight_decay)])?;
            flags(&[("maximize", o.maximize)])?;
            "Adadelta"
        }
        Optimizer::Adam(o) | Optimizer::AdamW(AdamW(o)) => {
            numbers(&[("lr", o.lr), ("eps", o.eps), ("weight_decay", o.weight_decay)])?;
            fields.set_item("betas", (o.beta1, o.beta2))?;
            flags(&[("amsgrad", o.amsgrad), ("maximize", o.maximize)])?;
            if matches!(optimizer, Optimizer::Adam(_)) { "Adam" } else { "AdamW" }
        }
        Optimizer::Ftrl(o) => {
            numbers(&[("lr", o.lr), ("beta", o.beta), ("l1", o.l1), ("l2", o.l2)])?;
            flags(&[("maximize", o.maximize)])?;
            "Ftrl"
        }
    };
    py.import("fastps.optim")?.getattr(class)?.call((), Some(&fields))
}

/// Reads how pushes meet each other.
pub(crate) fn apply(py: Python<'_>, name: &str) -> PyResult<Apply> {
    match name {
        "exact" => Ok(Apply::Exact),
        "hogwild" => Ok(Apply::Hogwild),
        other => Err(errors::config(py, "invalid apply", "\"exact\" or \"hogwild\"", format!("{other:?}"))),
    }
}

/// The name of how pushes meet each other.
pub(crate) fn apply_name(apply: Apply) -> &'static str {
    match apply {
        Apply::Exact => "exact",
        Apply::Hogwild => "hogwild",
    }
}

/// Raises `ConfigError` unless the settings are valid.
#[pyfunction]
pub(crate) fn check_codec(codec: &Bound<'_, PyAny>) -> PyResult<()> {
    self::codec(Some(codec)).map(drop)
}

/// Raises `ConfigError` unless the settings are valid.
#[pyfunction]
pub(crate) fn check_optimizer(optimizer: &Bound<'_, PyAny>) -> PyResult<()> {
    self::optimizer(optimizer).map(drop)
}

/// What binds a group: which mode, and its numbers and flags in the order of their names in Python.
pub(crate) type GroupMode = (String, Vec<u64>, Vec<bool>);

pub(crate) fn group_mode(py: Python<'_>, mode: &GroupMode) -> PyResult<Mode> {
    let (name, numbers, flags) = mode;
    let number = |k: usize| numbers.get(k).copied().unwrap_or(0);
    let count = |k: usize| u32::try_from(number(k)).unwrap_or(u32::MAX);
    let flag = |k: usize| flags.get(k).copied().unwrap_or(false);
    Ok(match &**name {
        "free" => Mode::Free,
        "bounded" => Mode::Bounded { staleness: number(0) },
        "warm_start" => Mode::WarmStart { steps: number(0) },
        "sync" => {
            Mode::Sync(Quorum { workers: count(0), backup: count(1), deterministic: flag(0), sum: flag(1) })
        }
        other => {
            return Err(errors::config(
                py,
                "invalid mode of a group",
                "free, bounded, sync or warm_start",
                other,
            ));
        }
    })
}
