//! Optimizers: the frozen dataclasses of `fastps.optim`, to the core and back.

use super::{field, kind};
use crate::errors::{OrRaise, config};
use fastps_core::optim::{Adadelta, Adagrad, Adam, AdamW, EpsMode, Ftrl, Optimizer, Rmsprop, Sgd};
use pyo3::prelude::*;
use pyo3::types::PyDict;

/// Reads an optimizer.
pub(crate) fn read_optimizer(object: &Bound<'_, PyAny>) -> PyResult<Optimizer> {
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

/// Raises `ConfigError` unless the settings are valid.
#[pyfunction]
pub(crate) fn check_optimizer(optimizer: &Bound<'_, PyAny>) -> PyResult<()> {
    read_optimizer(optimizer).map(drop)
}
