//! The list of `mod.rs`: a codec that stands in it is dispatched everywhere.

/// Generates [`super::CodecId`] from a list of `Name = number, file, Body;`. The file of a codec has
/// `MARKED`, `body_len`, `validate` and `was_finite`. Float64 is the one codec without a `Body`.
macro_rules! codecs {
    ($($(#[$doc:meta])* $name:ident = $number:literal, $file:ident, $body:ident;)*) => {
        /// A codec as the wire identifies it: what a decoder needs to know.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        #[repr(u8)]
        pub enum CodecId {
            $($(#[$doc])* $name = $number,)*
            /// IEEE double precision, little-endian: only for tensors of float64, which have no other codec.
            Float64 = 5,
        }

        impl CodecId {
            /// All codecs.
            pub const ALL: [Self; [$($number),*].len() + 1] = [$(Self::$name,)* Self::Float64];

            /// The name in Python and in messages.
            pub fn name(self) -> &'static str {
                match self {
                    $(Self::$name => stringify!($name),)*
                    Self::Float64 => "Float64",
                }
            }

            /// Elements per block, if bodies mark blocks that are not finite.
            pub(crate) fn marked(self) -> Option<usize> {
                match self {
                    $(Self::$name => $file::MARKED,)*
                    Self::Float64 => float64::MARKED,
                }
            }

            /// True if the values of a block were finite, as far as the body marks that.
            fn block_was_finite(self, body: &[u8], block: usize) -> bool {
                match self {
                    $(Self::$name => $file::was_finite(body, block),)*
                    Self::Float64 => float64::was_finite(body, block),
                }
            }

            /// Bytes of a body of `n` elements.
            pub fn body_len(self, n: usize) -> usize {
                match self {
                    $(Self::$name => $file::body_len(n),)*
                    Self::Float64 => float64::body_len(n),
                }
            }

            /// Checks the elements of a body of the right length.
            fn validate_elements(self, isa: Isa, body: &[u8], n: usize) -> Result<f64> {
                match self {
                    $(Self::$name => $file::validate(isa, body, n),)*
                    Self::Float64 => float64::validate(isa, body, n),
                }
            }

            /// Runs the code that is compiled for this codec of float32 values.
            #[inline(always)]
            pub(crate) fn select<C: WithBody>(self, body: &[u8], n: usize, code: C) -> C::Out {
                match self {
                    $(Self::$name => code.run_with($body::new(body, n)),)*
                    Self::Float64 => no_float32s(),
                }
            }
        }
    };
}
pub(super) use codecs;
