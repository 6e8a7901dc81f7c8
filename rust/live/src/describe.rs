//! Names, numbers and defaults of everything that a caller may set, as JSON.

use crate::problems::{Problem, TOYS};
use crate::settings::{self, CODECS, DURATIONS, FIELDS, LENGTH, MODES, defaults};
use fastps_core::optim::{Optimizer, Value};

/// The version of the calls.
pub(crate) const ABI: i32 = 1;

/// The whole text.
pub(crate) fn describe() -> String {
    let fields = FIELDS.iter().enumerate();
    let fields = list(fields.map(|(k, (name, _))| format!(r#"{{"index": {k}, "name": "{name}"}}"#)));
    format!(
        concat!(
            r#"{{"abi": {}, "length": {}, "defaults": {}, "fields": {}, "problems": {}, "#,
            r#""optimizers": {}, "codecs": {}, "modes": {}, "durations": {}}}"#
        ),
        ABI,
        LENGTH,
        numbers(&defaults()),
        fields,
        problems(),
        optimizers(),
        named(&CODECS),
        named(&MODES),
        named(&DURATIONS),
    )
}

fn list(of: impl Iterator<Item = String>) -> String {
    format!("[{}]", of.collect::<Vec<_>>().join(", "))
}

fn numbers(of: &[f64]) -> String {
    // JSON has no NaN.
    list(of.iter().map(|x| if x.is_finite() { x.to_string() } else { "null".to_owned() }))
}

fn named(of: &[&str]) -> String {
    list(of.iter().enumerate().map(|(k, name)| format!(r#"{{"id": {k}, "name": "{name}"}}"#)))
}

fn problems() -> String {
    let toys = TOYS.iter().enumerate().map(|(k, toy)| {
        format!(
            concat!(
                r#"{{"id": {}, "name": "{}", "formula": "{}", "polynomial": {}, "toy": true, "view": {}, "#,
                r#""start": {}, "minima": {}, "least": {}, "noise": {}, "lr": {}}}"#
            ),
            k,
            toy.name,
            toy.formula,
            toy.polynomial,
            numbers(&toy.view),
            numbers(&toy.start),
            list(toy.minima.iter().map(|point| numbers(point))),
            toy.least,
            toy.noise,
            toy.lr,
        )
    });
    let digits = format!(
        concat!(
            r#"{{"id": {}, "name": "Digits", "formula": "a net of 64, 32 and 10 units on 1,442 images", "#,
            r#""polynomial": false, "toy": false, "view": null, "start": null, "minima": [], "least": 0, "#,
            r#""noise": 0, "lr": 0.1}}"#
        ),
        Problem::COUNT - 1
    );
    list(toys.chain([digits]))
}

fn optimizers() -> String {
    let one = |(k, mut optimizer): (usize, Optimizer)| {
        let title = optimizer.title();
        let settings = list(optimizer.settings().into_iter().map(|setting| {
            let (kind, default) = match setting.value {
                Value::Number(value) => ("number", value.to_string()),
                Value::Flag(value) => ("flag", u8::from(*value).to_string()),
                Value::EpsMode(value) => ("eps_mode", (*value as u8).to_string()),
            };
            format!(r#"{{"name": "{}", "kind": "{kind}", "default": {default}}}"#, setting.name)
        }));
        format!(r#"{{"id": {k}, "name": "{title}", "settings": {settings}}}"#)
    };
    list(settings::optimizers().into_iter().enumerate().map(one))
}
