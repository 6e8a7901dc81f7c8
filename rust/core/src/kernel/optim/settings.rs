//! The table of an optimizer's settings: their names, types, defaults and ranges.
//!
//! [`settings!`] generates the struct, its defaults and its table from one list. The wire and the Python
//! binding read and write settings through the table; only Python's public dataclasses repeat the names.

use super::EpsMode;
use crate::base::error::{Error, Kind, Result};
use std::fmt::{self, Display};

/// One setting of an optimizer: its name, a reference to its value, and its valid range.
#[derive(Debug)]
pub struct Setting<'a> {
    /// torch's name of the argument; `beta1` and `beta2` for the pair `betas`.
    pub name: &'static str,
    /// The value.
    pub value: Value<'a>,
    /// The valid numbers.
    pub(super) range: Range,
}

/// Access to an optimizer's settings; [`settings!`] implements it.
pub(crate) trait SettingsTable {
    /// The table of settings, for reading and writing.
    fn settings(&mut self) -> Vec<Setting<'_>>;
    /// Checks every setting as torch does; the error names the argument.
    fn validate(&self) -> Result<()>;
    /// The learning rate.
    fn lr(&self) -> f64;
}

/// A reference to a setting's value, by type.
#[derive(Debug, PartialEq)]
pub enum Value<'a> {
    /// A number.
    Number(&'a mut f64),
    /// A switch.
    Flag(&'a mut bool),
    /// A position of `eps`.
    EpsMode(&'a mut EpsMode),
}

/// The numbers that a setting takes.
#[derive(Clone, Copy, Debug)]
pub(super) enum Range {
    /// All finite numbers.
    Finite,
    /// At least 0 and finite, also when rounded to float32.
    NonNegative,
    /// From 0 to 1.
    UpToOne,
    /// From 0 to less than 1.
    BelowOne,
}

impl<'a> From<&'a mut f64> for Value<'a> {
    fn from(place: &'a mut f64) -> Self {
        Self::Number(place)
    }
}

impl<'a> From<&'a mut bool> for Value<'a> {
    fn from(place: &'a mut bool) -> Self {
        Self::Flag(place)
    }
}

impl<'a> From<&'a mut EpsMode> for Value<'a> {
    fn from(place: &'a mut EpsMode) -> Self {
        Self::EpsMode(place)
    }
}

impl fmt::Display for Value<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Number(value) => value.fmt(f),
            Self::Flag(value) => value.fmt(f),
            Self::EpsMode(mode) => mode.name().fmt(f),
        }
    }
}

impl Setting<'_> {
    /// Fails unless the value is in range.
    pub(super) fn check(&self) -> Result<()> {
        let Value::Number(value) = &self.value else { return Ok(()) };
        let (valid, expected) = match self.range {
            Range::Finite => (value.is_finite(), "a finite number"),
            Range::NonNegative => {
                ((**value as f32).is_finite() && **value >= 0.0, "a finite number >= 0 (as float32)")
            }
            Range::UpToOne => ((0.0..=1.0).contains(*value), "a number from 0 to 1"),
            Range::BelowOne => ((0.0..1.0).contains(*value), "a number >= 0 and < 1"),
        };
        if valid { Ok(()) } else { Err(invalid(self.argument(), expected, value)) }
    }

    /// The argument that this setting comes from.
    fn argument(&self) -> &'static str {
        match self.name {
            "beta1" => "betas[0]",
            "beta2" => "betas[1]",
            name => name,
        }
    }
}

impl EpsMode {
    const NAMES: [(Self, &'static str); 3] =
        [(Self::Outside, "outside"), (Self::Inside, "inside"), (Self::Both, "both")];

    /// The name in settings.
    pub fn name(self) -> &'static str {
        Self::NAMES[self as usize].1
    }

    /// The mode of this name.
    pub fn by_name(name: &str) -> Option<Self> {
        Self::NAMES.iter().find(|(_, known)| *known == name).map(|(mode, _)| *mode)
    }
}

/// An error about one argument.
pub(super) fn invalid(argument: &str, expected: &str, got: impl Display) -> Error {
    Error::new(Kind::Config, format!("invalid {argument}")).expected(expected, got)
}

/// Generates the settings of an optimizer: `field: type = default, range;`. Flags and modes have no range. A
/// method of the struct, named after the struct's list, checks conditions on several settings.
macro_rules! settings {
    (
        $(#[$attribute:meta])*
        pub struct $name:ident {
            $($(#[$doc:meta])* $field:ident: $type:ty = $default:expr $(, $range:ident)?;)*
        }
        $(checked together by $together:ident)?
    ) => {
        $(#[$attribute])*
        #[derive(Clone, Copy, Debug, PartialEq, serde::Serialize, serde::Deserialize)]
        pub struct $name {
            $($(#[$doc])* pub $field: $type,)*
        }

        impl Default for $name {
            fn default() -> Self {
                Self { $($field: $default,)* }
            }
        }

        impl $crate::kernel::optim::settings::SettingsTable for $name {
            fn validate(&self) -> $crate::base::error::Result<()> {
                { *self }.settings().iter().try_for_each($crate::kernel::optim::Setting::check)?;
                $(self.$together()?;)?
                Ok(())
            }

            fn settings(&mut self) -> Vec<$crate::kernel::optim::Setting<'_>> {
                use $crate::kernel::optim::Setting;
                vec![$(
                    Setting {
                        name: stringify!($field),
                        value: (&mut self.$field).into(),
                        range: settings!(@range $($range)?),
                    },
                )*]
            }

            fn lr(&self) -> f64 {
                self.lr
            }
        }
    };
    (@range) => { $crate::kernel::optim::settings::Range::Finite };
    (@range $range:ident) => { $crate::kernel::optim::settings::Range::$range };
}
pub(super) use settings;
