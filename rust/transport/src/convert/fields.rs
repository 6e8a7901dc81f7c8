//! Values of single fields: codecs, element types, corrections, kinds of reads; and the errors for bad ones.

use fastps_core::codec::CodecId;
use fastps_core::correction::Correction;
use fastps_core::dtype::DType;
use fastps_core::error::{Error, Kind, Result};
use fastps_proto::v1 as pb;

/// Part of a slice that a client reads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Read {
    /// The values.
    Values,
    /// Their average.
    Average,
    /// The optimizer state.
    State,
    /// Only the version.
    Version,
}

/// The codec's number, which is its value of `pb::PayloadCodec`.
pub(super) fn codec_to_wire(codec: CodecId) -> i32 {
    codec as i32
}

pub(super) fn codec_from_wire(codec: i32) -> Result<CodecId> {
    CodecId::by_number(codec).ok_or_else(|| unknown("codec", &format!("1 to {}", CodecId::ALL.len()), codec))
}

pub(super) fn malformed(message: impl Into<String>) -> Error {
    Error::new(Kind::Frame, message)
}

/// Error for an enum's value that this version does not know.
pub(super) fn unknown(field: &str, expected: &str, value: i32) -> Error {
    malformed(format!("unknown value of {field}")).expected(expected, value)
}

pub(super) fn correction_from_wire(correction: &pb::Correction) -> Correction {
    let pb::Correction { delay_adaptive, max_staleness, reject, momentum_matching } = *correction;
    Correction { delay_adaptive, max_staleness, reject, momentum_matching }
}

pub(super) fn correction_to_wire(correction: Correction) -> pb::Correction {
    let Correction { delay_adaptive, max_staleness, reject, momentum_matching } = correction;
    pb::Correction { delay_adaptive, max_staleness, reject, momentum_matching }
}

const SUPPORTED: &str = "DTYPE_FLOAT32, DTYPE_FLOAT64 or DTYPE_BFLOAT16";

pub(super) fn dtype_to_wire(dtype: DType) -> pb::DType {
    match dtype {
        DType::Float32 => pb::DType::DtypeFloat32,
        DType::Float64 => pb::DType::DtypeFloat64,
        DType::BFloat16 => pb::DType::DtypeBfloat16,
    }
}

pub(super) fn dtype_from_wire(dtype: i32) -> Result<DType> {
    match pb::DType::try_from(dtype) {
        Ok(pb::DType::DtypeFloat32) => Ok(DType::Float32),
        Ok(pb::DType::DtypeFloat64) => Ok(DType::Float64),
        Ok(pb::DType::DtypeBfloat16) => Ok(DType::BFloat16),
        Ok(other) => {
            Err(Error::new(Kind::DType, "unsupported dtype").expected(SUPPORTED, other.as_str_name()))
        }
        Err(_) => Err(Error::new(Kind::DType, "unknown value of dtype").expected(SUPPORTED, dtype)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_codec_has_one_number() {
        for codec in CodecId::ALL {
            assert_eq!(codec_from_wire(codec_to_wire(codec)).unwrap(), codec);
            let name = pb::PayloadCodec::try_from(codec_to_wire(codec)).unwrap().as_str_name();
            assert_eq!(name, format!("CODEC_{}", codec.name().to_uppercase()));
        }
        for bad in [0, 7, -1, i32::MAX] {
            let error = codec_from_wire(bad).unwrap_err();
            assert_eq!((error.kind, error.got.clone()), (Kind::Frame, Some(bad.to_string())));
        }
    }
}
