//! [`Snapshot`], the result of a pull: the bytes of one slice at one version, which stay unchanged while it
//! lives.

use crate::base::dtype::DType;
use crate::base::error::Result;
use crate::base::isa::Isa;
use crate::base::sync::{Arc, Counted};
use crate::kernel::codec::CodecId;
use crate::kernel::rounding;
use crate::memory::{Buffer, Charge, ExposedFile, Meter, Purpose};

/// Values or state of one slice at one version; an `exact` slice's values are pinned, not copied.
#[derive(Clone, Debug)]
pub struct Snapshot {
    /// Type of the values.
    pub dtype: DType,
    /// Coding of the bytes: the plain one of that type, or bfloat16.
    pub codec: CodecId,
    /// The slice's version.
    pub version: u64,
    /// How many of the changes up to that version were the pulling client's own.
    pub own: u64,
    /// Optimizer steps taken.
    pub step: u64,
    pub(super) bytes: Bytes,
}

#[derive(Clone, Debug)]
pub(super) enum Bytes {
    Pinned(Counted<Buffer>),
    Copied(Arc<Copied>),
}

/// A reader's own copy, charged while it lives.
#[derive(Debug)]
pub(super) struct Copied {
    bytes: Vec<u8>,
    _charge: Option<Charge>,
}

impl Copied {
    /// Copies the `len` bytes that `fill` appends, and fails if the meter has no room for them; without a
    /// meter they are not charged.
    pub(super) fn take(
        meter: Option<&Arc<Meter>>,
        len: usize,
        fill: impl FnOnce(&mut Vec<u8>),
    ) -> Result<Bytes> {
        let charge = meter.map(|meter| meter.take(Purpose::Copies, len as u64)).transpose()?;
        let mut bytes = Vec::with_capacity(len);
        fill(&mut bytes);
        Ok(Bytes::Copied(Arc::new(Self { bytes, _charge: charge })))
    }
}

impl Snapshot {
    /// Values of rows, possibly of several slices; the caller keeps the versions.
    pub fn of_rows((dtype, codec): (DType, CodecId), bytes: Vec<u8>, charge: Charge) -> Self {
        let bytes = Bytes::Copied(Arc::new(Copied { bytes, _charge: Some(charge) }));
        Self { dtype, codec, version: 0, own: 0, step: 0, bytes }
    }

    /// A copy of float32 values in bfloat16, rounded to nearest even. Fails if the meter has no room for it.
    pub(super) fn rounded(self, isa: Isa, meter: &Arc<Meter>) -> Result<Self> {
        let len = CodecId::BFloat16.body_len(self.elements());
        let round = |to: &mut Vec<u8>| rounding::append_nearest(isa, self.as_ref(), to);
        let bytes = Copied::take(Some(meter), len, round)?;
        Ok(Self { codec: CodecId::BFloat16, bytes, ..self })
    }

    /// Number of values.
    pub fn elements(&self) -> usize {
        self.as_ref().len() / self.codec.body_len(1)
    }

    /// File and offset of the bytes in the shard's [`Exposed`](crate::shard::Exposed) memory, if that contains
    /// them.
    pub fn exposed_at(&self) -> Option<(&ExposedFile, u64)> {
        match &self.bytes {
            Bytes::Pinned(buffer) => buffer.exposed_at(),
            Bytes::Copied(_) => None,
        }
    }
}

impl AsRef<[u8]> for Snapshot {
    fn as_ref(&self) -> &[u8] {
        match &self.bytes {
            Bytes::Pinned(buffer) => buffer.bytes(),
            Bytes::Copied(copied) => &copied.bytes,
        }
    }
}
