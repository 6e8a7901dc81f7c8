//! Tensor specs and optimizer settings on the wire.

use super::request::unknown;
use fastps_core::dtype::DType;
use fastps_core::error::{Error, Kind, Result};
use fastps_core::optim::{Adadelta, Adagrad, Adam, AdamW, EpsMode, Ftrl, Optimizer, Rmsprop, Sgd};
use fastps_core::tensor::{Apply, TensorSpec};
use fastps_proto::v1 as pb;
use std::collections::HashMap;

/// One setting of an optimizer: torch's name of the argument, and where the value lies.
enum Setting<'a> {
    Number(&'a mut f64),
    Flag(&'a mut bool),
}

use Setting::{Flag, Number};

fn name(optimizer: &Optimizer) -> &'static str {
    match optimizer {
        Optimizer::Sgd(_) => "sgd",
        Optimizer::Adagrad(_) => "adagrad",
        Optimizer::Rmsprop(_) => "rmsprop",
        Optimizer::Adadelta(_) => "adadelta",
        Optimizer::Adam(_) => "adam",
        Optimizer::AdamW(_) => "adamw",
        Optimizer::Ftrl(_) => "ftrl",
    }
}

fn by_name(name: &str) -> Option<Optimizer> {
    Some(match name {
        "sgd" => Optimizer::Sgd(Sgd::default()),
        "adagrad" => Optimizer::Adagrad(Adagrad::default()),
        "rmsprop" => Optimizer::Rmsprop(Rmsprop::default()),
        "adadelta" => Optimizer::Adadelta(Adadelta::default()),
        "adam" => Optimizer::Adam(Adam::default()),
        "adamw" => Optimizer::AdamW(AdamW::default()),
        "ftrl" => Optimizer::Ftrl(Ftrl::default()),
        _ => return None,
    })
}

/// The settings of an optimizer by their names on the wire: the one table, read and written through.
fn settings(optimizer: &mut Optimizer) -> Vec<(&'static str, Setting<'_>)> {
    match optimizer {
        Optimizer::Sgd(o) => vec![
            ("lr", Number(&mut o.lr)),
            ("momentum", Number(&mut o.momentum)),
            ("dampening", Number(&mut o.dampening)),
            ("weight_decay", Number(&mut o.weight_decay)),
            ("nesterov", Flag(&mut o.nesterov)),
            ("maximize", Flag(&mut o.maximize)),
        ],
        Optimizer::Adagrad(o) => vec![
            ("lr", Number(&mut o.lr)),
            ("lr_decay", Number(&mut o.lr_decay)),
            ("weight_decay", Number(&mut o.weight_decay)),
            ("initial_accumulator_value", Number(&mut o.initial_accumulator_value)),
            ("eps", Number(&mut o.eps)),
            ("maximize", Flag(&mut o.maximize)),
        ],
        Optimizer::Rmsprop(o) => vec![
            ("lr", Number(&mut o.lr)),
            ("alpha", Number(&mut o.alpha)),
            ("eps", Number(&mut o.eps)),
            ("weight_decay", Number(&mut o.weight_decay)),
            ("momentum", Number(&mut o.momentum)),
            ("centered", Flag(&mut o.centered)),
            ("maximize", Flag(&mut o.maximize)),
        ],
        Optimizer::Adadelta(o) => vec![
            ("lr", Number(&mut o.lr)),
            ("rho", Number(&mut o.rho)),
            ("eps", Number(&mut o.eps)),
            ("weight_decay", Number(&mut o.weight_decay)),
            ("maximize", Flag(&mut o.maximize)),
        ],
        Optimizer::Adam(o) | Optimizer::AdamW(AdamW(o)) => vec![
            ("lr", Number(&mut o.lr)),
            ("beta1", Number(&mut o.beta1)),
            ("beta2", Number(&mut o.beta2)),
            ("eps", Number(&mut o.eps)),
            ("weight_decay", Number(&mut o.weight_decay)),
            ("amsgrad", Flag(&mut o.amsgrad)),
            ("maximize", Flag(&mut o.maximize)),
        ],
        Optimizer::Ftrl(o) => vec![
            ("lr", Number(&mut o.lr)),
            ("beta", Number(&mut o.beta)),
            ("l1", Number(&mut o.l1)),
            ("l2", Number(&mut o.l2)),
            ("maximize", Flag(&mut o.maximize)),
        ],
    }
}

/// Where `eps` stands, for the optimizers that let one choose.
fn eps_mode(optimizer: &mut Optimizer) -> Option<&mut EpsMode> {
    match optimizer {
        Optimizer::Adagrad(o) => Some(&mut o.eps_mode),
        Optimizer::Rmsprop(o) => Some(&mut o.eps_mode),
        _ => None,
    }
}

/// An optimizer as it travels: every setting is written, so that defaults may differ between the two ends.
pub fn optimizer_to_wire(optimizer: &Optimizer) -> pb::Optimizer {
    let mut copy = *optimizer;
    let mode = match eps_mode(&mut copy) {
        Some(EpsMode::Inside) => "inside",
        Some(EpsMode::Both) => "both",
        Some(EpsMode::Outside) | None => "",
    };
    let values = settings(&mut copy).into_iter().map(|(name, setting)| {
        let value = match setting {
            Number(v) => *v,
            Flag(v) => f64::from(u8::from(*v)),
        };
        (name.to_owned(), value)
    });
    pb::Optimizer { name: name(optimizer).to_owned(), settings: values.collect(), eps_mode: mode.to_owned() }
}

/// An optimizer as it arrived; what it does not set has torch's default.
pub fn optimizer_from_wire(wire: &pb::Optimizer) -> Result<Optimizer> {
    let mut optimizer = by_name(&wire.name).ok_or_else(|| {
        Error::new(Kind::Config, "unknown optimizer")
            .expected("sgd, adagrad, rmsprop, adadelta, adam, adamw or ftrl", format!("{:?}", wire.name))
    })?;
    {
        let mut known: HashMap<_, _> = settings(&mut optimizer).into_iter().collect();
        for (name, value) in &wire.settings {
            match known.get_mut(name.as_str()) {
                Some(Number(v)) => **v = *value,
                Some(Flag(v)) if *value == 0.0 || *value == 1.0 => **v = *value == 1.0,
                Some(Flag(_)) => {
                    return Err(Error::new(Kind::Config, format!("invalid {name}")).expected("0 or 1", value));
                }
                None => {
                    let mut names: Vec<_> = known.keys().copied().collect();
                    names.sort_unstable();
                    return Err(Error::new(Kind::Config, format!("{} has no such setting", wire.name))
                        .expected(format!("one of {}", names.join(", ")), format!("{name:?}")));
                }
            }
        }
    }
    let mode = match wire.eps_mode.as_str() {
        "" | "outside" => EpsMode::Outside,
        "inside" => EpsMode::Inside,
        "both" => EpsMode::Both,
        other => {
            return Err(Error::new(Kind::Config, "invalid eps_mode")
                .expected("outside, inside or both", format!("{other:?}")));
        }
    };
    match eps_mode(&mut optimizer) {
        Some(place) => *place = mode,
        None if mode == EpsMode::Outside => {}
        None => {
            return Err(Error::new(Kind::Config, format!("{} has no eps_mode", wire.name))
                .expected("outside", format!("{:?}", wire.eps_mode)));
        }
    }
    Ok(optimizer)
}

pub(super) fn dtype_to_wire(dtype: DType) -> pb::DType {
    match dtype {
        DType::Float32 => pb::DType::DtypeFloat32,
    }
}

pub(super) fn dtype_from_wire(dtype: i32) -> Result<DType> {
    match pb::DType::try_from(dtype) {
        Ok(pb::DType::DtypeFloat32) => Ok(DType::Float32),
        Ok(other) => {
            Err(Error::new(Kind::DType, "unsupported dtype").expected("DTYPE_FLOAT32", other.as_str_name()))
        }
        Err(_) => Err(Error::new(Kind::DType, "unknown value of dtype").expected("DTYPE_FLOAT32", dtype)),
    }
}

/// A spec as it travels.
pub fn spec_to_wire(spec: &TensorSpec) -> pb::TensorSpec {
    pb::TensorSpec {
        name: spec.name.to_string(),
        shape: spec.shape.clone(),
        dtype: dtype_to_wire(spec.dtype).into(),
        apply: match spec.apply {
            Apply::Exact => pb::Apply::Exact,
            Apply::Hogwild => pb::Apply::Hogwild,
        }
        .into(),
        group: spec.group.to_string(),
        optimizer: Some(optimizer_to_wire(&spec.optimizer)),
    }
}

/// A spec as it arrived, validated.
pub fn spec_from_wire(wire: Option<&pb::TensorSpec>) -> Result<TensorSpec> {
    let wire = wire.ok_or_else(|| Error::new(Kind::Config, "the tensor spec is missing"))?;
    let named = |error: Error| {
        if wire.name.len() > 1024 { error } else { error.tensor(wire.name.as_str()) }
    };
    let optimizer = wire
        .optimizer
        .as_ref()
        .ok_or_else(|| Error::new(Kind::Config, "the optimizer is missing"))
        .and_then(optimizer_from_wire)
        .map_err(named)?;
    let apply = match pb::Apply::try_from(wire.apply) {
        Ok(pb::Apply::Exact) => Apply::Exact,
        Ok(pb::Apply::Hogwild) => Apply::Hogwild,
        Ok(pb::Apply::Unspecified) => {
            return Err(named(Error::new(Kind::Config, "invalid apply").expected("1 or 2", wire.apply)));
        }
        Err(_) => return Err(named(unknown("apply", "1 or 2", wire.apply))),
    };
    let spec = TensorSpec {
        name: wire.name.as_str().into(),
        shape: wire.shape.clone(),
        dtype: dtype_from_wire(wire.dtype).map_err(named)?,
        apply,
        group: wire.group.as_str().into(),
        optimizer,
    };
    spec.validate()?;
    Ok(spec)
}

/// What differs first between the registered spec and another one of the same name: (what, registered,
/// other).
pub fn spec_difference(registered: &TensorSpec, other: &TensorSpec) -> Option<(String, String, String)> {
    let text = |what: &str, a: String, b: String| (a != b).then(|| (what.to_owned(), a, b));
    let (mut a, mut b) = (registered.optimizer, other.optimizer);
    text("shape", format!("{:?}", registered.shape), format!("{:?}", other.shape))
        .or_else(|| text("dtype", registered.dtype.name().into(), other.dtype.name().into()))
        .or_else(|| text("apply", format!("{:?}", registered.apply), format!("{:?}", other.apply)))
        .or_else(|| text("group", registered.group.to_string(), other.group.to_string()))
        .or_else(|| text("optimizer", name(&a).into(), name(&b).into()))
        .or_else(|| {
            let pairs = settings(&mut a).into_iter().zip(settings(&mut b));
            pairs.into_iter().find_map(|((name, x), (_, y))| match (x, y) {
                (Number(x), Number(y)) if x != y => Some((name.to_owned(), x.to_string(), y.to_string())),
                (Flag(x), Flag(y)) if x != y => Some((name.to_owned(), x.to_string(), y.to_string())),
                _ => None,
            })
        })
        .or_else(|| {
            (registered != other).then(|| {
                ("eps_mode".to_owned(), format!("{:?}", eps_mode(&mut a)), format!("{:?}", eps_mode(&mut b)))
            })
        })
}

#[cfg(test)]
mod tests {
    use super::*;

    type Spoil = fn(&mut pb::TensorSpec);

    fn all() -> [Optimizer; 7] {
        ["sgd", "adagrad", "rmsprop", "adadelta", "adam", "adamw", "ftrl"].map(|n| by_name(n).unwrap())
    }

    #[test]
    fn every_setting_survives_both_ways() {
        for optimizer in all() {
            let count = settings(&mut { optimizer }).len();
            for index in 0..count {
                let mut changed = optimizer;
                match &mut settings(&mut changed)[index].1 {
                    Number(v) => **v = 0.125,
                    Flag(v) => **v = !**v,
                }
                assert_ne!(changed, optimizer);
                let wire = optimizer_to_wire(&changed);
                assert_eq!(wire.settings.len(), count);
                assert_eq!(optimizer_from_wire(&wire).unwrap(), changed);
            }
            let empty = pb::Optimizer { name: name(&optimizer).into(), ..Default::default() };
            assert_eq!(optimizer_from_wire(&empty).unwrap(), optimizer);
        }
    }

    #[test]
    fn what_is_not_known_is_named() {
        let refuse = |name: &str, setting: &str, value: f64, mode: &str| {
            let settings = [(setting.to_owned(), value)].into_iter().filter(|s| !s.0.is_empty()).collect();
            let wire = pb::Optimizer { name: name.into(), settings, eps_mode: mode.into() };
            let error = optimizer_from_wire(&wire).unwrap_err();
            assert_eq!(error.kind, Kind::Config);
            error.to_string()
        };
        assert!(refuse("lion", "", 0.0, "").contains("lion"));
        assert!(refuse("sgd", "beta1", 0.9, "").contains("beta1"));
        assert!(refuse("sgd", "nesterov", 2.0, "").contains("nesterov"));
        assert!(refuse("adagrad", "", 0.0, "above").contains("above"));
        assert!(refuse("sgd", "", 0.0, "inside").contains("eps_mode"));
    }

    #[test]
    fn a_spec_survives_both_ways() {
        for optimizer in all() {
            for apply in [Apply::Exact, Apply::Hogwild] {
                let spec = TensorSpec {
                    name: "ω".into(),
                    shape: vec![3, 0, 5],
                    dtype: DType::Float32,
                    apply,
                    group: "g".into(),
                    optimizer,
                };
                assert_eq!(spec_from_wire(Some(&spec_to_wire(&spec))).unwrap(), spec);
                assert_eq!(spec_difference(&spec, &spec.clone()), None);
                let other = TensorSpec { shape: vec![1], ..spec.clone() };
                assert_eq!(spec_difference(&spec, &other).unwrap().0, "shape");
            }
        }
    }

    #[test]
    fn a_bad_spec_is_refused() {
        let good = pb::TensorSpec {
            name: "w".into(),
            shape: vec![2],
            dtype: 1,
            apply: 1,
            group: "default".into(),
            optimizer: Some(pb::Optimizer { name: "sgd".into(), ..Default::default() }),
        };
        assert!(spec_from_wire(Some(&good)).is_ok());
        let bad: [(Kind, Spoil); 9] = [
            (Kind::Config, |s| s.name.clear()),
            (Kind::Config, |s| s.name = "x".repeat(1025)),
            (Kind::Shape, |s| s.shape = vec![1 << 60]),
            (Kind::DType, |s| s.dtype = 2),
            (Kind::DType, |s| s.dtype = 77),
            (Kind::Config, |s| s.apply = 0),
            (Kind::Frame, |s| s.apply = 77),
            (Kind::Config, |s| s.group.clear()),
            (Kind::Config, |s| s.optimizer = None),
        ];
        for (kind, spoil) in bad {
            let mut spec = good.clone();
            spoil(&mut spec);
            assert_eq!(spec_from_wire(Some(&spec)).unwrap_err().kind, kind);
        }
        assert!(spec_from_wire(None).is_err());
    }
}
