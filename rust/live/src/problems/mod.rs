//! Problems to minimize: functions of two variables, and the digits.

mod archive;
pub(crate) mod digits;
mod toys;

pub(crate) use toys::{TOYS, Toy};

/// A problem by its number.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Problem {
    /// A function of two variables.
    Toy(&'static Toy),
    /// A net on handwritten digits.
    Digits,
}

impl Problem {
    /// Number of problems.
    pub(crate) const COUNT: usize = TOYS.len() + 1;

    /// The problem with a number; the digits are the last one.
    pub(crate) fn of(number: usize) -> Self {
        TOYS.get(number).map_or(Self::Digits, Self::Toy)
    }
}
