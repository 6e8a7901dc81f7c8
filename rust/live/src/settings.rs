//! The settings of a run, as numbers from a caller, each checked.

use crate::problems::Problem;
use fastps_core::codec::Codec;
use fastps_core::correction::Correction;
use fastps_core::error::{Error, Kind, Result};
use fastps_core::mode::{Mode, Quorum};
use fastps_core::optim::{EpsMode, Optimizer, Value};

/// Number of all settings.
pub(crate) const LENGTH: usize = 56;
/// Most workers, excluding those that join late.
pub(crate) const MOST_WORKERS: u32 = 64;
/// Index of the first optimizer-specific setting.
const OPTIMIZER_AT: usize = 29;
/// Index of the first unused setting.
const UNUSED: usize = 44;
/// Largest integer up to which float64 represents all.
const LARGEST: f64 = 9_007_199_254_740_991.0;

/// Names and defaults of the settings before the optimizer-specific ones.
pub(crate) const FIELDS: [(&str, f64); OPTIMIZER_AT] = [
    ("problem", 0.0),
    ("x", 1.0),
    ("y", 1.0),
    ("workers", 8.0),
    ("durations", 1.0),
    ("mean", 1.0),
    ("spread", 1.0),
    ("straggler", 1.0),
    ("delay", 0.0),
    ("mode", 0.0),
    ("push_every", 5.0),
    ("pull_every", 5.0),
    ("local_lr", 0.01),
    ("overlap", 1.0),
    ("bound", 3.0),
    ("backup", 0.0),
    ("warm_steps", 50.0),
    ("max_staleness", -1.0),
    ("on_stale", 0.0),
    ("delay_adaptive", 1.0),
    ("momentum_matching", 0.0),
    ("codec", 0.0),
    ("error_feedback", 1.0),
    ("seed", 0.0),
    ("lease", 10.0),
    ("evaluate_every", 1.0),
    ("noise", f64::NAN),
    ("batch", 32.0),
    ("optimizer", 0.0),
];

/// Names of the distributions of durations.
pub(crate) const DURATIONS: [&str; 3] = ["Constant", "Exponential", "Pareto"];
/// Names of the modes.
pub(crate) const MODES: [&str; 5] = ["Async", "Local", "Bounded", "Sync", "WarmStart"];
/// Names of the codecs.
pub(crate) const CODECS: [&str; 5] = ["Float32", "BFloat16", "Int8", "Int8(stochastic)", "OneBit"];
const STOCHASTIC: u32 = 3;

/// All settings at their defaults.
pub(crate) fn defaults() -> [f64; LENGTH] {
    let mut all = [0.0; LENGTH];
    for (place, (_, value)) in all.iter_mut().zip(FIELDS) {
        *place = value;
    }
    all[OPTIMIZER_AT..UNUSED].fill(f64::NAN);
    all[OPTIMIZER_AT] = 0.01;
    all
}

/// Distribution of the durations of gradients.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Times {
    /// Index in [`DURATIONS`].
    pub(crate) kind: u32,
    /// Mean virtual seconds.
    pub(crate) mean: f64,
    /// The last worker's mean as a multiple of the first one's.
    pub(crate) spread: f64,
    /// Additional factor on the last worker's mean.
    pub(crate) straggler: f64,
}

/// The mode of the workers, as a caller chose it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Training {
    /// Each gradient is applied when it arrives.
    Async,
    /// Local steps between pushes and pulls.
    Local {
        /// Steps between pushes.
        push_every: u64,
        /// Steps between pulls.
        pull_every: u64,
        /// Rate of the local steps.
        lr: f64,
        /// Set when fetched values are installed one fetch later.
        overlap: bool,
    },
    /// The workers wait for each other: [`Mode::Bounded`] or [`Mode::Sync`].
    Together(Mode),
    /// Only the first worker trains for some steps.
    WarmStart(u64),
}

impl Training {
    /// The mode of the group once a warm start is over.
    pub(crate) fn group(self) -> Mode {
        match self {
            Self::Together(mode) => mode,
            _ => Mode::Free,
        }
    }

    /// Returns whether a version is made of several gradients.
    pub(crate) fn shares(self) -> bool {
        matches!(self, Self::Together(Mode::Sync(_)))
    }
}

/// The settings of a run.
#[derive(Clone, Debug)]
pub(crate) struct Settings {
    pub(crate) numbers: [f64; LENGTH],
    pub(crate) problem: Problem,
    pub(crate) start: [f64; 2],
    pub(crate) workers: u32,
    pub(crate) times: Times,
    pub(crate) delay: f64,
    pub(crate) training: Training,
    pub(crate) correction: Option<Correction>,
    pub(crate) codec: Codec,
    pub(crate) error_feedback: bool,
    pub(crate) seed: u64,
    pub(crate) lease: f64,
    pub(crate) evaluate_every: u64,
    pub(crate) noise: f64,
    pub(crate) batch: usize,
    pub(crate) optimizer: Optimizer,
}

/// Reads numbers by name.
struct Reader<'a>(&'a [f64]);

fn invalid(name: &str, expected: &str, got: f64) -> Error {
    Error::new(Kind::Config, format!("invalid {name}")).expected(expected, got)
}

impl Reader<'_> {
    fn get(&self, name: &str) -> f64 {
        FIELDS.iter().position(|(field, _)| *field == name).map_or(f64::NAN, |index| self.0[index])
    }

    /// A number from `least` to `most`, inclusive.
    fn number(&self, name: &str, least: f64, most: f64) -> Result<f64> {
        let value = self.get(name);
        if (least..=most).contains(&value) {
            return Ok(value);
        }
        let expected = if most >= f64::MAX {
            format!("a finite number >= {least}")
        } else {
            format!("a number from {least} to {most}")
        };
        Err(invalid(name, &expected, value))
    }

    fn positive(&self, name: &str) -> Result<f64> {
        let value = self.get(name);
        if value > 0.0 && value.is_finite() {
            Ok(value)
        } else {
            Err(invalid(name, "a finite number > 0", value))
        }
    }

    fn integer(&self, name: &str, least: f64, most: f64) -> Result<u64> {
        let value = self.get(name);
        if (least..=most).contains(&value) && value.fract() == 0.0 {
            return Ok(value as u64);
        }
        Err(invalid(name, &format!("an integer from {least} to {most}"), value))
    }

    fn flag(&self, name: &str) -> Result<bool> {
        let value = self.get(name);
        if value == 0.0 || value == 1.0 { Ok(value == 1.0) } else { Err(invalid(name, "0 or 1", value)) }
    }
}

impl Settings {
    /// Returns whether a run with these settings can continue with others: they differ only in these fields,
    /// or in the number at `lr`.
    pub(crate) fn continues_as(&self, other: &Self, fields: &[&str], lr: usize) -> bool {
        let same = |k: usize| self.numbers[k].to_bits() == other.numbers[k].to_bits();
        let may = |k: usize| k == lr || FIELDS.get(k).is_some_and(|(name, _)| fields.contains(name));
        (0..LENGTH).all(|k| same(k) || may(k))
    }

    /// Index of the codec in [`CODECS`].
    pub(crate) fn codec_index(&self) -> usize {
        match self.codec {
            Codec::Float32 => 0,
            Codec::BFloat16 => 1,
            Codec::Int8 { seed: None } => 2,
            Codec::Int8 { seed: Some(_) } => STOCHASTIC as usize,
            // The page does not offer `FourBit`.
            Codec::OneBit | Codec::FourBit => 4,
        }
    }

    /// Checks the numbers of a caller.
    pub(crate) fn read(numbers: &[f64]) -> Result<Self> {
        let numbers: [f64; LENGTH] = numbers.try_into().map_err(|_| {
            Error::new(Kind::Config, "wrong number of settings").expected(LENGTH, numbers.len())
        })?;
        let of = Reader(&numbers);
        let problem = Problem::of(of.integer("problem", 0.0, Problem::COUNT as f64 - 1.0)? as usize);
        let coordinate = |name| of.number(name, -1e6, 1e6);
        let noise = of.get("noise");
        let own_noise = if let Problem::Toy(toy) = problem { toy.noise } else { 0.0 };
        let workers = of.integer("workers", 1.0, f64::from(MOST_WORKERS))? as u32;
        let lease = of.get("lease");
        Ok(Self {
            problem,
            start: [coordinate("x")?, coordinate("y")?],
            workers,
            times: Times {
                kind: of.integer("durations", 0.0, DURATIONS.len() as f64 - 1.0)? as u32,
                mean: of.positive("mean")?,
                spread: of.number("spread", 1.0, 1e6)?,
                straggler: of.number("straggler", 1.0, 1e6)?,
            },
            delay: of.number("delay", 0.0, f64::MAX)?,
            training: training(&of, workers)?,
            correction: correction(&of)?,
            codec: codec(&of)?,
            error_feedback: of.flag("error_feedback")?,
            seed: of.integer("seed", 0.0, LARGEST)?,
            lease: if lease > 0.0 { lease } else { return Err(invalid("lease", "a number > 0", lease)) },
            evaluate_every: of.integer("evaluate_every", 1.0, LARGEST)?,
            noise: if noise.is_nan() { own_noise } else { of.number("noise", 0.0, 1e6)? },
            batch: of.integer("batch", 1.0, 1024.0)? as usize,
            optimizer: optimizer(&of, &numbers[OPTIMIZER_AT..UNUSED])?,
            numbers,
        })
    }
}

fn training(of: &Reader<'_>, workers: u32) -> Result<Training> {
    Ok(match of.integer("mode", 0.0, MODES.len() as f64 - 1.0)? {
        0 => Training::Async,
        1 => Training::Local {
            push_every: of.integer("push_every", 1.0, LARGEST)?,
            pull_every: of.integer("pull_every", 1.0, LARGEST)?,
            lr: of.number("local_lr", 0.0, f64::from(f32::MAX))?,
            overlap: of.flag("overlap")?,
        },
        2 => Training::Together(Mode::Bounded { staleness: of.integer("bound", 0.0, LARGEST)? }),
        3 => {
            let backup = of.integer("backup", 0.0, f64::from(workers) - 1.0)? as u32;
            let workers = workers - backup;
            Training::Together(Mode::Sync(Quorum { workers, backup, ..Quorum::default() }))
        }
        _ => Training::WarmStart(of.integer("warm_steps", 1.0, LARGEST)?),
    })
}

/// Checks the correction as `fastps.Async` does.
fn correction(of: &Reader<'_>) -> Result<Option<Correction>> {
    let reject = of.integer("on_stale", 0.0, 1.0)? == 1;
    let max_staleness = match of.get("max_staleness") {
        -1.0 if reject => {
            return Err(invalid("max_staleness", "an integer >= 0 with on_stale='reject'", -1.0));
        }
        -1.0 => None,
        // A factor of 0 would silently drop the gradient.
        _ => Some(of.integer("max_staleness", if reject { 0.0 } else { 1.0 }, LARGEST)?),
    };
    let all = optimizers();
    let optimizer = of.integer("optimizer", 0.0, all.len() as f64 - 1.0)?;
    let asked = Correction {
        delay_adaptive: of.flag("delay_adaptive")?,
        max_staleness,
        reject,
        // Only momentum that the page shows is matched: not Adam's beta1.
        momentum_matching: of.flag("momentum_matching")? && all[optimizer as usize].beta1().is_none(),
    };
    Ok((asked.delay_adaptive || asked.momentum_matching || max_staleness.is_some()).then_some(asked))
}

fn codec(of: &Reader<'_>) -> Result<Codec> {
    Ok(match of.integer("codec", 0.0, CODECS.len() as f64 - 1.0)? as u32 {
        0 => Codec::Float32,
        1 => Codec::BFloat16,
        2 => Codec::Int8 { seed: None },
        STOCHASTIC => Codec::Int8 { seed: Some(of.integer("seed", 0.0, LARGEST)?) },
        _ => Codec::OneBit,
    })
}

/// The optimizers of the page: those whose tensors may race.
pub(crate) fn optimizers() -> Vec<Optimizer> {
    Optimizer::all().into_iter().filter(|optimizer| !optimizer.keeps_average()).collect()
}

fn optimizer(of: &Reader<'_>, own: &[f64]) -> Result<Optimizer> {
    let all = optimizers();
    let mut optimizer = all[of.integer("optimizer", 0.0, all.len() as f64 - 1.0)? as usize];
    for (setting, number) in optimizer.settings().into_iter().zip(own) {
        if number.is_nan() {
            continue;
        }
        match setting.value {
            Value::Number(place) => *place = *number,
            Value::Flag(place) if *number == 0.0 || *number == 1.0 => *place = *number == 1.0,
            Value::Flag(_) => return Err(invalid(setting.name, "0 or 1", *number)),
            Value::EpsMode(place) => {
                let modes = [EpsMode::Outside, EpsMode::Inside, EpsMode::Both];
                let mode = modes.into_iter().enumerate().find(|(k, _)| *k as f64 == *number);
                *place = mode.ok_or_else(|| invalid(setting.name, "0, 1 or 2", *number))?.1;
            }
        }
    }
    optimizer.validate()?;
    Ok(optimizer)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn with(changes: &[(usize, f64)]) -> Result<Settings> {
        let mut numbers = defaults();
        for (index, value) in changes {
            numbers[*index] = *value;
        }
        Settings::read(&numbers)
    }

    #[test]
    fn the_defaults_are_valid_and_garbage_is_refused_by_name() {
        assert!(with(&[]).is_ok());
        for (index, (name, _)) in FIELDS.iter().enumerate() {
            for value in [f64::NEG_INFINITY, -1e7, 1e300] {
                match with(&[(index, value)]) {
                    Ok(_) => {
                        // Settings of other modes are ignored.
                        let of_modes = [
                            "push_every",
                            "pull_every",
                            "local_lr",
                            "overlap",
                            "bound",
                            "backup",
                            "warm_steps",
                        ];
                        let large = matches!(*name, "mean" | "delay" | "lease") && value > 0.0;
                        assert!(large || of_modes.contains(name), "{name} {value}");
                    }
                    Err(error) => {
                        assert!(error.to_string().starts_with(&format!("invalid {name}")), "{error}");
                    }
                }
            }
        }
        assert!(Settings::read(&[0.0; 3]).is_err());
        assert!(with(&[(OPTIMIZER_AT, -1.0)]).is_err());
        assert!(with(&[(OPTIMIZER_AT + 4, 0.5)]).is_err());
    }

    /// The page and the real workers share a table, whose rows are those of the core.
    #[test]
    fn the_table_of_the_page_has_the_names_and_words_of_the_core() {
        let text = include_str!("../../../lab/fastps_lab/live/page/table.js");
        let (from, to) = (text.find('[').unwrap(), text.rfind(']').unwrap());
        let rows: Vec<serde_json::Value> = serde_json::from_str(&text[from..=to]).unwrap();
        for row in rows {
            let name = row["name"].as_str().unwrap();
            assert!(
                ["lr", "momentum", "nesterov"].contains(&name) || FIELDS.iter().any(|(own, _)| *own == name),
                "{name}"
            );
            let own: &[&str] = match name {
                "durations" => &DURATIONS,
                "mode" => &MODES,
                "codec" => &CODECS,
                _ => continue,
            };
            let words = row["words"].as_array().unwrap();
            assert_eq!(words.len(), own.len(), "{name}");
            for (word, own) in words.iter().zip(own) {
                assert!(own.to_lowercase().contains(word.as_str().unwrap()), "{name} {word}");
            }
        }
    }

    #[test]
    fn modes_take_their_numbers() {
        let sync = with(&[(9, 3.0), (15, 1.0)]).unwrap();
        let quorum = Quorum { workers: 7, backup: 1, ..Quorum::default() };
        assert_eq!(sync.training, Training::Together(Mode::Sync(quorum)));
        assert!(with(&[(9, 3.0), (15, 8.0)]).is_err());
        assert!(with(&[(18, 1.0)]).is_err());
        assert!(with(&[(18, 1.0), (17, 0.0)]).is_ok());
        assert!(with(&[(17, 0.0)]).is_err());
        assert_eq!(with(&[(19, 0.0)]).unwrap().correction, None);
    }
}
