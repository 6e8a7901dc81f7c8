//! Reading what frames say.

use crate::files::output::Place;
use crate::frame::content::{
    Content, DURABLE, END, EVENT, FENCE, HAS_BASE, HAS_OWN, HAS_ROWS, HOGWILD, KNOWN_FLAGS, ONCE, PUSH,
    Piece, SEGMENT, SHARED, SLICE, UNKNOWN,
};
use crate::frame::origin::{Author, Origin};
use crate::frame::{FORMAT, Header, MARK, MAX_CONTENT};
use fastps_core::codec::CodecId;
use fastps_core::frame::{Action, Applied, Base, Identity};
use fastps_core::identity::Remembered;
use fastps_core::record::{Identities, Record};
use fastps_core::rows::Indices;
use fastps_core::slice::Standing;
use fastps_core::tensor::{Apply, SliceId};

/// What a whole frame says; `None`: nothing that this version knows.
pub(crate) fn read(content: &[u8]) -> Option<Content<'_>> {
    let mut from = Reader(content);
    let read = match from.byte()? {
        SEGMENT => {
            let format = from.u32()?;
            let number = from.u64()?;
            let id = from.u64()?;
            let (shard, shards) = (u32::try_from(from.u64()?).ok()?, u32::try_from(from.u64()?).ok()?);
            let after_hole = from.byte()? != 0;
            let author = if format < 2 {
                Author::default()
            } else {
                Author { incarnation: from.u64()?, predecessor: from.u64()? }
            };
            if format > FORMAT {
                // It may have more, which is a later version's; that it is one is what the reader has to know.
                from.0 = &[];
            }
            let origin = Origin { id, shard, shards };
            Content::Segment { format, number, after_hole, origin, author }
        }
        PUSH => return from.push(),
        FENCE => {
            let (slice, client, sequence) = (from.u64()?, from.u64()?, from.u64()?);
            Content::Fence(SliceId(slice), Identity { client, sequence })
        }
        EVENT => return serde_json::from_slice(from.0).ok().map(Content::Event),
        DURABLE => Content::Durable(from.u64()?),
        END => Content::End(from.u64()?),
        SLICE => Content::Slice(from.slice()?),
        _ => return None,
    };
    from.0.is_empty().then_some(read)
}

pub(super) struct Reader<'a>(pub(super) &'a [u8]);

impl<'a> Reader<'a> {
    fn take(&mut self, n: usize) -> Option<&'a [u8]> {
        let (taken, rest) = self.0.split_at_checked(n)?;
        self.0 = rest;
        Some(taken)
    }

    fn byte(&mut self) -> Option<u8> {
        self.take(1).map(|bytes| bytes[0])
    }

    fn u32(&mut self) -> Option<u32> {
        self.take(4)?.try_into().ok().map(u32::from_le_bytes)
    }

    fn u64(&mut self) -> Option<u64> {
        self.take(8)?.try_into().ok().map(u64::from_le_bytes)
    }

    pub(super) fn header(&mut self) -> Option<Header> {
        let marked = self.take(4)? == MARK;
        let (length, crc) = (self.u32()? as usize, self.u32()?);
        (marked && length <= MAX_CONTENT).then_some(Header { length, crc })
    }

    fn push(mut self) -> Option<Content<'a>> {
        let (action, codec, flags) = (self.byte()?, self.byte()?, self.byte()?);
        let (slice, version, client, sequence) = (self.u64()?, self.u64()?, self.u64()?, self.u64()?);
        let (step, base, own) = (self.u64()?, self.u64()?, self.u64()?);
        let (lr, momentum) = (f64::from_bits(self.u64()?), f64::from_bits(self.u64()?));
        let (scale, rows) = (f32::from_bits(self.u32()?), self.u32()? as usize);
        let rows = self.take(rows)?;
        let is = |flag: u8| flags & flag != 0;
        if flags & !KNOWN_FLAGS != 0 || !rows.len().is_multiple_of(4) || (!is(HAS_ROWS) && !rows.is_empty()) {
            return None;
        }
        let shared_by = if is(SHARED) {
            let bytes = self.u32()? as usize;
            Identities::new(self.take(bytes)?)?
        } else {
            Identities::default()
        };
        let action = match action {
            0 => Action::Gradient,
            1 => Action::Assign,
            2 => Action::AssignState { step },
            _ => return None,
        };
        Some(Content::Push(Record {
            slice: SliceId(slice),
            apply: if is(HOGWILD) { Apply::Hogwild } else { Apply::Exact },
            version,
            identity: Identity { client, sequence },
            base: is(HAS_BASE).then_some(Base { version: base, own: is(HAS_OWN).then_some(own) }),
            once: is(ONCE),
            action,
            indices: is(HAS_ROWS).then(|| Indices::new(rows)),
            codec: CodecId::from_wire(u32::from(codec)).ok()?,
            body: self.0,
            lr,
            scale,
            momentum,
            shared_by,
        }))
    }

    fn place(&mut self) -> Option<Place> {
        let (offset, bytes) = (self.u64()?, self.u64()?);
        Some(Place { offset, bytes, crc32c: u32::try_from(self.u64()?).ok()? })
    }

    fn slice(&mut self) -> Option<Piece> {
        let (slice, version, step, assigns) = (self.u64()?, self.u64()?, self.u64()?, self.u64()?);
        let (values, state) = (self.place()?, self.place()?);
        // Memory is taken as entries come, never for a number that is only claimed.
        let mut clients = Vec::new();
        for _ in 0..self.u64()? {
            let (client, own, forgotten) = (self.u64()?, self.u64()?, self.u64()?);
            let mut outcomes = Vec::new();
            for _ in 0..self.u64()? {
                let applied = self.byte()?;
                let sequence = self.u64()?;
                let outcome = match applied {
                    0 => None,
                    1 => {
                        let (version, own, staleness) = (self.u64()?, self.u64()?, self.u64()?);
                        let (staleness, scale) =
                            ((staleness != UNKNOWN).then_some(staleness), f32::from_bits(self.u32()?));
                        Some(Applied { version, own, staleness, scale, duplicate: false })
                    }
                    _ => return None,
                };
                outcomes.push((sequence, outcome));
            }
            clients.push(Remembered { client, own, assigned: 0, forgotten, outcomes });
        }
        if !self.0.is_empty() {
            for remembered in &mut clients {
                remembered.assigned = self.u64()?;
            }
        }
        let standing = Standing { version, step, assigns, clients };
        Some(Piece { slice, values, state, standing })
    }
}
