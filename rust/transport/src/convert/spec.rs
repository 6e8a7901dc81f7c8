//! Tensor specs and optimizer settings on the wire.

use super::fields::{dtype_from_wire, dtype_to_wire, unknown};
use fastps_core::dtype::DType;
use fastps_core::ema::Ema;
use fastps_core::error::{Error, Kind, Result};
use fastps_core::optim::{EpsMode, Optimizer, Value};
use fastps_core::rounding::Rounding;
use fastps_core::tensor::{Apply, TensorSpec};
use fastps_proto::v1 as pb;

/// An optimizer in wire form: every setting is written, so that defaults may differ between the two ends.
pub fn optimizer_to_wire(optimizer: &Optimizer) -> pb::Optimizer {
    let mut wire = pb::Optimizer { name: optimizer.name().to_owned(), ..Default::default() };
    for setting in { *optimizer }.settings() {
        let value = match setting.value {
            Value::Number(value) => *value,
            Value::Flag(value) => f64::from(u8::from(*value)),
            Value::EpsMode(mode) => {
                if *mode != EpsMode::Outside {
                    mode.name().clone_into(&mut wire.eps_mode);
                }
                continue;
            }
        };
        wire.settings.insert(setting.name.to_owned(), value);
    }
    wire
}

/// Reads an optimizer; unset settings have torch's defaults.
pub fn optimizer_from_wire(wire: &pb::Optimizer) -> Result<Optimizer> {
    let mut optimizer = Optimizer::by_name(&wire.name).ok_or_else(|| {
        Error::new(Kind::Config, "unknown optimizer").expected(
            format!("one of {}", Optimizer::all().map(|known| known.name()).join(", ")),
            format!("{:?}", wire.name),
        )
    })?;
    let mode = match wire.eps_mode.as_str() {
        "" => EpsMode::Outside,
        name => EpsMode::by_name(name).ok_or_else(|| {
            Error::new(Kind::Config, "invalid eps_mode")
                .expected("outside, inside or both", format!("{name:?}"))
        })?,
    };
    let (modes, mut settings): (Vec<_>, Vec<_>) =
        optimizer.settings().into_iter().partition(|setting| matches!(setting.value, Value::EpsMode(_)));
    for (name, value) in &wire.settings {
        let Some(setting) = settings.iter_mut().find(|setting| setting.name == name) else {
            let mut names: Vec<_> = settings.iter().map(|setting| setting.name).collect();
            names.sort_unstable();
            return Err(Error::new(Kind::Config, format!("{} has no such setting", wire.name))
                .expected(format!("one of {}", names.join(", ")), format!("{name:?}")));
        };
        match &mut setting.value {
            Value::Number(place) => **place = *value,
            Value::Flag(place) if *value == 0.0 || *value == 1.0 => **place = *value == 1.0,
            _ => return Err(Error::new(Kind::Config, format!("invalid {name}")).expected("0 or 1", value)),
        }
    }
    if modes.is_empty() && mode != EpsMode::Outside {
        return Err(Error::new(Kind::Config, format!("{} has no eps_mode", wire.name))
            .expected("outside", format!("{:?}", wire.eps_mode)));
    }
    for setting in modes {
        if let Value::EpsMode(place) = setting.value {
            *place = mode;
        }
    }
    Ok(optimizer)
}

/// A spec in wire form.
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
        average: spec.average.map(|Ema { decay, every, start }| pb::Average { decay, every, start }),
        rounding: match spec.rounding {
            None => pb::Rounding::Unspecified,
            Some(Rounding::Stochastic { .. }) => pb::Rounding::Stochastic,
            Some(Rounding::Nearest) => pb::Rounding::Nearest,
        }
        .into(),
        seed: spec.rounding.and_then(Rounding::seed),
    }
}

/// How a tensor's steps round: as asked, and for a bfloat16 tensor stochastically unless it says otherwise.
fn rounding_from_wire(wire: &pb::TensorSpec, dtype: DType) -> Result<Option<Rounding>> {
    let stochastic =
        || Rounding::Stochastic { seed: wire.seed.unwrap_or_else(|| Rounding::seed_of(&wire.name)) };
    let rounding = match pb::Rounding::try_from(wire.rounding) {
        Ok(pb::Rounding::Unspecified) => (dtype == DType::BFloat16).then(stochastic),
        Ok(pb::Rounding::Stochastic) => Some(stochastic()),
        Ok(pb::Rounding::Nearest) => Some(Rounding::Nearest),
        Err(_) => return Err(unknown("rounding", "0 to 2", wire.rounding)),
    };
    match wire.seed {
        Some(seed) if rounding.and_then(Rounding::seed).is_none() => {
            let error = Error::new(Kind::Config, "a seed is for values that are rounded stochastically");
            Err(error.expected("no seed", seed))
        }
        _ => Ok(rounding),
    }
}

/// Reads and validates a spec.
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
    let dtype = dtype_from_wire(wire.dtype).map_err(named)?;
    let spec = TensorSpec {
        name: wire.name.as_str().into(),
        shape: wire.shape.clone(),
        dtype,
        apply,
        group: wire.group.as_str().into(),
        optimizer,
        average: wire.average.map(|pb::Average { decay, every, start }| Ema {
            decay,
            every: every.max(1),
            start,
        }),
        rounding: rounding_from_wire(wire, dtype).map_err(named)?,
    };
    spec.validate()?;
    Ok(spec)
}

#[cfg(test)]
mod tests {
    use super::*;

    type SpoilSpec = fn(&mut pb::TensorSpec);

    #[test]
    fn every_setting_survives_both_ways() {
        for optimizer in Optimizer::all() {
            let count = { optimizer }.settings().len();
            for index in 0..count {
                let mut changed = optimizer;
                match &mut changed.settings()[index].value {
                    Value::Number(v) => **v = 0.125,
                    Value::Flag(v) => **v = !**v,
                    Value::EpsMode(v) => **v = EpsMode::Both,
                }
                assert_ne!(changed, optimizer);
                let wire = optimizer_to_wire(&changed);
                let modes = usize::from(matches!(optimizer, Optimizer::Adagrad(_) | Optimizer::Rmsprop(_)));
                assert_eq!(wire.settings.len(), count - modes);
                assert_eq!(optimizer_from_wire(&wire).unwrap(), changed);
            }
            let empty = pb::Optimizer { name: optimizer.name().into(), ..Default::default() };
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
        assert!(refuse("sophia", "", 0.0, "").contains("sophia"));
        assert!(refuse("sgd", "beta1", 0.9, "").contains("beta1"));
        assert!(refuse("sgd", "nesterov", 2.0, "").contains("nesterov"));
        assert!(refuse("adagrad", "", 0.0, "above").contains("above"));
        assert!(refuse("sgd", "", 0.0, "inside").contains("eps_mode"));
    }

    #[test]
    fn a_spec_survives_both_ways() {
        for optimizer in Optimizer::all() {
            for apply in [Apply::Exact, Apply::Hogwild] {
                if apply == Apply::Hogwild && optimizer.keeps_average() {
                    continue;
                }
                let own = apply == Apply::Exact && !optimizer.keeps_average();
                let spec = TensorSpec {
                    name: "ω".into(),
                    shape: vec![3, 0, 5],
                    dtype: DType::Float32,
                    apply,
                    group: "g".into(),
                    optimizer,
                    average: own.then_some(Ema { decay: 0.5, every: 3, start: 4 }),
                    rounding: None,
                };
                assert_eq!(spec_from_wire(Some(&spec_to_wire(&spec))).unwrap(), spec);
                for rounding in
                    [Rounding::Stochastic { seed: 0 }, Rounding::Stochastic { seed: 9 }, Rounding::Nearest]
                {
                    let spec =
                        TensorSpec { dtype: DType::BFloat16, rounding: Some(rounding), ..spec.clone() };
                    let read = spec_from_wire(Some(&spec_to_wire(&spec)));
                    if apply == Apply::Exact {
                        assert_eq!(read.unwrap(), spec);
                    } else {
                        assert_eq!(read.unwrap_err().kind, Kind::DType);
                    }
                }
                assert_eq!(spec.difference(&spec.clone()), None);
                let other = TensorSpec { shape: vec![1], ..spec.clone() };
                assert_eq!(spec.difference(&other).unwrap().0, "shape");
            }
        }
    }

    #[test]
    fn a_bad_spec_is_refused() {
        const AVERAGE: pb::Average = pb::Average { decay: 0.5, every: 0, start: 0 };
        let good = pb::TensorSpec {
            name: "w".into(),
            shape: vec![2],
            dtype: 1,
            apply: 1,
            group: "default".into(),
            optimizer: Some(pb::Optimizer { name: "sgd".into(), ..Default::default() }),
            average: None,
            rounding: 0,
            seed: None,
        };
        assert!(spec_from_wire(Some(&good)).is_ok());
        let float64 = pb::TensorSpec { dtype: 2, ..good.clone() };
        assert_eq!(spec_from_wire(Some(&float64)).unwrap().dtype, DType::Float64);
        let hogwild = pb::TensorSpec { apply: 2, ..float64 };
        assert_eq!(spec_from_wire(Some(&hogwild)).unwrap_err().kind, Kind::DType);
        let averaged = pb::TensorSpec { average: Some(AVERAGE), ..good.clone() };
        assert_eq!(spec_from_wire(Some(&averaged)).unwrap().average.unwrap().every, 1);
        let bfloat16 = pb::TensorSpec { dtype: 3, ..good.clone() };
        let seed = Rounding::seed_of("w");
        let rounding = spec_from_wire(Some(&bfloat16)).unwrap().rounding;
        assert_eq!(rounding, Some(Rounding::Stochastic { seed }));
        let bad: [(Kind, SpoilSpec); 16] = [
            (Kind::Config, |s| s.name.clear()),
            (Kind::Config, |s| s.name = "x".repeat(1025)),
            (Kind::Shape, |s| s.shape = vec![1 << 60]),
            (Kind::DType, |s| s.dtype = 4),
            (Kind::Config, |s| s.rounding = 1),
            (Kind::Config, |s| s.seed = Some(1)),
            (Kind::Frame, |s| (s.dtype, s.rounding) = (3, 77)),
            (Kind::Config, |s| (s.dtype, s.rounding, s.seed) = (3, 2, Some(1))),
            (Kind::DType, |s| s.dtype = 77),
            (Kind::Config, |s| s.apply = 0),
            (Kind::Frame, |s| s.apply = 77),
            (Kind::Config, |s| s.group.clear()),
            (Kind::Config, |s| s.optimizer = None),
            (Kind::Config, |s| s.average = Some(pb::Average { decay: 1.0, ..AVERAGE })),
            (Kind::Config, |s| (s.average, s.apply) = (Some(AVERAGE), 2)),
            (Kind::DType, |s| (s.average, s.dtype) = (Some(AVERAGE), 2)),
        ];
        for (kind, spoil) in bad {
            let mut spec = good.clone();
            spoil(&mut spec);
            assert_eq!(spec_from_wire(Some(&spec)).unwrap_err().kind, kind);
        }
        assert!(spec_from_wire(None).is_err());
    }
}
