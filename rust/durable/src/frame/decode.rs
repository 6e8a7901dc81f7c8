//! Decoding frame contents. Lengths are checked before memory is allocated.

use crate::files::output::Extent;
use crate::frame::content::{
    Content, FLAG_BASE, FLAG_BETA1, FLAG_HOGWILD, FLAG_MORE, FLAG_ONCE, FLAG_OWN, FLAG_ROWS, FLAG_SHARED,
    KIND_ARRAY, KIND_DURABLE, KIND_END, KIND_EVENT, KIND_FENCE, KIND_MARK, KIND_PROGRAM, KIND_PUSH,
    KIND_SEGMENT, KIND_SLICE, KIND_SPACE, KIND_TIME, KIND_VECTORS, MORE_ACKNOWLEDGED, MORE_NOTE, Mark,
    NOBODY, RanProgram, SliceEntry, UNKNOWN_STALENESS, VectorsEntry,
};
use crate::frame::origin::{Author, Origin};
use crate::frame::{FORMAT, Header, MARK, MAX_CONTENT_BYTES};
use fastps_core::codec::CodecId;
use fastps_core::frame::{Action, Base, Identity};
use fastps_core::identity::{Remembered, Settled};
use fastps_core::program::{Command, Program};
use fastps_core::record::{Identities, Record, SumRecord};
use fastps_core::rows::Indices;
use fastps_core::slice::{Standing, VectorsStanding};
use fastps_core::tensor::{Apply, MAX_VECTORS, SliceId, Space, SpaceId};
use std::sync::Arc;

/// Decodes the content of a frame. `None`: this version does not know the content.
pub(crate) fn read(content: &[u8]) -> Option<Content<'_>> {
    let mut from = Decoder(content);
    let read = match from.byte()? {
        KIND_SEGMENT => {
            let format = from.u32()?;
            let number = from.u64()?;
            let id = from.u64()?;
            let (shard, shards) = (u32::try_from(from.u64()?).ok()?, u32::try_from(from.u64()?).ok()?);
            let after_gap = from.byte()? != 0;
            let author = if format < 2 {
                Author::default()
            } else {
                Author { incarnation: from.u64()?, predecessor: from.u64()? }
            };
            if format > FORMAT {
                // A later format may append fields. The caller needs only the format number to reject the
                // file.
                from.0 = &[];
            }
            let origin = Origin { id, shard, shards };
            Content::Segment { format, number, after_gap, origin, author }
        }
        KIND_PUSH => return from.push(),
        KIND_FENCE => {
            let (slice, client, sequence) = (from.u64()?, from.u64()?, from.u64()?);
            Content::Fence(SliceId(slice), Identity { client, sequence })
        }
        KIND_EVENT => return serde_json::from_slice(from.0).ok().map(Content::Event),
        KIND_DURABLE => Content::Durable(from.u64()?),
        KIND_END => Content::End(from.u64()?),
        KIND_SLICE => Content::Slice(from.slice()?),
        KIND_PROGRAM => return from.program(),
        KIND_SPACE => match (from.byte()?, SliceId(from.u64()?)) {
            (0, slice) => Content::SpaceClosed(slice, SpaceId(from.u64()?)),
            (1, slice) => Content::SpaceOpened(slice, from.space()?),
            _ => return None,
        },
        KIND_VECTORS => Content::Vectors(from.vectors()?),
        KIND_ARRAY => Content::Array(std::mem::take(&mut from.0)),
        KIND_TIME => Content::Time(from.u64()?),
        KIND_MARK => {
            let id = from.u64()?;
            Content::Mark(Mark { id, name: std::str::from_utf8(std::mem::take(&mut from.0)).ok()? })
        }
        _ => return None,
    };
    from.0.is_empty().then_some(read)
}

pub(super) struct Decoder<'a>(pub(super) &'a [u8]);

impl<'a> Decoder<'a> {
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
        (marked && length <= MAX_CONTENT_BYTES).then_some(Header { length, crc })
    }

    fn push(mut self) -> Option<Content<'a>> {
        let (action, codec, flags) = (self.byte()?, self.byte()?, self.byte()?);
        let (slice, version, client, sequence) = (self.u64()?, self.u64()?, self.u64()?, self.u64()?);
        let (step, base, own) = (self.u64()?, self.u64()?, self.u64()?);
        let (lr, momentum) = (f64::from_bits(self.u64()?), f64::from_bits(self.u64()?));
        let (scale, rows) = (f32::from_bits(self.u32()?), self.u32()? as usize);
        let rows = self.take(rows)?;
        let is = |flag: u8| flags & flag != 0;
        if !rows.len().is_multiple_of(4) || (!is(FLAG_ROWS) && !rows.is_empty()) {
            return None;
        }
        let shared_by = if is(FLAG_SHARED) {
            let bytes = self.u32()? as usize;
            Identities::new(self.take(bytes)?)?
        } else {
            Identities::default()
        };
        let beta1 = if is(FLAG_BETA1) { Some(f64::from_bits(self.u64()?)) } else { None };
        let (note, acknowledged) = if is(FLAG_MORE) { self.more()? } else { ("", 0) };
        let action = match action {
            0 => Action::Gradient,
            1 => Action::Assign,
            2 => Action::AssignState { step },
            _ => return None,
        };
        Some(Content::Push(Record {
            slice: SliceId(slice),
            apply: if is(FLAG_HOGWILD) { Apply::Hogwild } else { Apply::Exact },
            version,
            identity: Identity { client, sequence },
            base: is(FLAG_BASE).then_some(Base { version: base, own: is(FLAG_OWN).then_some(own) }),
            once: is(FLAG_ONCE),
            acknowledged,
            action,
            indices: is(FLAG_ROWS).then(|| Indices::new(rows)),
            codec: CodecId::by_number(codec.into())?,
            body: self.0,
            lr,
            scale,
            momentum,
            beta1,
            shared_by,
            note,
        }))
    }

    /// The note of a push, and what its client had acknowledged.
    fn more(&mut self) -> Option<(&'a str, u64)> {
        let more = self.byte()?;
        if more == 0 || more & !(MORE_NOTE | MORE_ACKNOWLEDGED) != 0 {
            return None;
        }
        let note = if more & MORE_NOTE != 0 {
            let length = self.byte()?.into();
            std::str::from_utf8(self.take(length)?).ok().filter(|note| !note.is_empty())?
        } else {
            ""
        };
        let acknowledged = if more & MORE_ACKNOWLEDGED != 0 { self.u64()? } else { 0 };
        Some((note, acknowledged))
    }

    fn extent(&mut self) -> Option<Extent> {
        let (offset, bytes) = (self.u64()?, self.u64()?);
        Some(Extent { offset, bytes, crc32c: u32::try_from(self.u64()?).ok()? })
    }

    fn slice(&mut self) -> Option<SliceEntry> {
        let (slice, version, step, assigns) = (self.u64()?, self.u64()?, self.u64()?, self.u64()?);
        let (values, state) = (self.extent()?, self.extent()?);
        // Memory grows with the entries that are read, never by a claimed count.
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
                        let (staleness, scale) = (
                            (staleness != UNKNOWN_STALENESS).then_some(staleness),
                            f32::from_bits(self.u32()?),
                        );
                        Some(Settled { version, own, staleness, scale })
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
        let nobody =
            clients.extract_if(.., |remembered| remembered.client == NOBODY).flat_map(|c| c.outcomes);
        let gradient = |(_, settled): (u64, Option<Settled>)| {
            let Settled { version, staleness, .. } = settled?;
            Some((version, u8::try_from(staleness?).ok()?))
        };
        let gradients = nobody.map(gradient).collect::<Option<_>>()?;
        let standing = Standing { version, step, assigns, clients, gradients };
        Some(SliceEntry { slice, values, state, standing })
    }

    fn text(&mut self) -> Option<Arc<str>> {
        let bytes = self.u32()? as usize;
        std::str::from_utf8(self.take(bytes)?).ok().map(Arc::from)
    }

    fn flag(&mut self) -> Option<bool> {
        match self.byte()? {
            0 => Some(false),
            1 => Some(true),
            _ => None,
        }
    }

    fn program(mut self) -> Option<Content<'a>> {
        let (slice, version) = (SliceId(self.u64()?), self.u64()?);
        let command = Command { space: SpaceId(self.u64()?), term: self.u64()?, number: self.u64()? };
        let bytes = self.u32()? as usize;
        let program = Program::from_bytes(self.take(bytes)?).ok()?;
        let sum = if self.flag()? {
            let largest = f64::from_bits(self.u64()?);
            Some(SumRecord { values: std::mem::take(&mut self.0), largest })
        } else {
            None
        };
        let ran = RanProgram { slice, version, command, program, sum };
        self.0.is_empty().then_some(Content::Program(ran))
    }

    fn space(&mut self) -> Option<Arc<Space>> {
        let (id, name, count) = (SpaceId(self.u64()?), self.text()?, self.u32()? as usize);
        let vectors = (0..count).map(|_| self.text()).take(MAX_VECTORS + 1).collect::<Option<_>>()?;
        let space = Space { id, name, vectors };
        space.check().is_ok().then(|| Arc::new(space))
    }

    fn vectors(&mut self) -> Option<VectorsEntry> {
        let (slice, space) = (self.u64()?, self.space()?);
        let (term, number, batch) = (self.u64()?, self.u64()?, self.u64()?);
        let (largest, open, has_grid) = (f64::from_bits(self.u64()?), self.flag()?, self.flag()?);
        let grid = i32::from_le_bytes(self.take(4)?.try_into().ok()?);
        if !has_grid && grid != 0 {
            return None;
        }
        let (results, rest) = self.0.as_chunks();
        self.0 = rest;
        let results = results.iter().map(|bytes| f64::from_le_bytes(*bytes)).collect();
        let grid = has_grid.then_some(grid);
        let standing = VectorsStanding { term, number, results, batch, open, largest, grid };
        Some(VectorsEntry { slice, space, standing })
    }
}
