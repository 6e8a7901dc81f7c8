//! Frames: how one thing lies in a log or in a list of slices. A mark, a length, a checksum, and what they are about.

use crate::catalog::Event;
use crate::files::checksum::crc32c;
use fastps_core::codec::CodecId;
use fastps_core::error::{Error, Kind, Result};
use fastps_core::frame::{Action, Applied, Base, Identity};
use fastps_core::identity::Remembered;
use fastps_core::record::{Identities, Record};
use fastps_core::rows::Indices;
use fastps_core::slice::Standing;
use fastps_core::tensor::{Apply, SliceId};

/// Begins every frame.
pub(crate) const MARK: [u8; 4] = *b"fpsR";
/// Mark, length and checksum.
pub(crate) const HEADER: usize = 12;
/// Longest content of a frame.
pub(crate) const MAX_CONTENT: usize = 64 << 20;
/// The format that this version writes.
pub(crate) const FORMAT: u32 = 2;
/// The oldest that it reads. Files of format 1 do not tell which server wrote them.
pub(crate) const OLDEST: u32 = 1;

const SEGMENT: u8 = 1;
const PUSH: u8 = 2;
const FENCE: u8 = 3;
const EVENT: u8 = 4;
const DURABLE: u8 = 5;
const END: u8 = 6;
const SLICE: u8 = 7;

const HAS_ROWS: u8 = 1;
const HAS_BASE: u8 = 2;
const HAS_OWN: u8 = 4;
const ONCE: u8 = 8;
const HOGWILD: u8 = 16;
const SHARED: u8 = 32;
const KNOWN_FLAGS: u8 = 63;

/// In an outcome: staleness that is not known.
const UNKNOWN: u64 = u64::MAX;

/// Where a file belongs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Origin {
    /// Random; the same in all files of one directory.
    pub(crate) id: u64,
    pub(crate) shard: u32,
    pub(crate) shards: u32,
}

/// Which server wrote a file.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Author {
    /// Drawn at its start; 0: unknown.
    pub(crate) incarnation: u64,
    /// The server whose files it went on from; 0: unknown.
    pub(crate) predecessor: u64,
}

/// Fails where this version does not read a file's format; `name` is for people.
pub(crate) fn check_format(format: u32, name: &str) -> Result<()> {
    if (OLDEST..=FORMAT).contains(&format) {
        return Ok(());
    }
    Err(Error::new(Kind::Config, format!("{name} is of another version"))
        .expected(format!("format {OLDEST} to {FORMAT}"), format))
}

/// What a frame says.
#[derive(Debug)]
pub(crate) enum Content<'a> {
    /// Begins a segment of the log.
    Segment {
        format: u32,
        number: u64,
        after_hole: bool,
        origin: Origin,
        author: Author,
    },
    Push(Record<'a>),
    Fence(SliceId, Identity),
    Event(Event),
    /// All before this offset was durable when this frame was written.
    Durable(u64),
    /// Ends a segment whose continuation is the one of this number.
    End(u64),
    Slice(Piece),
}

/// A slice in a snapshot: where its arrays lie, and all else that it is.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Piece {
    pub(crate) slice: u64,
    pub(crate) values: Place,
    pub(crate) state: Place,
    pub(crate) standing: Standing,
}

/// Bytes of a file.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Place {
    pub(crate) offset: u64,
    pub(crate) bytes: u64,
    pub(crate) crc32c: u32,
}

/// Appends a frame with the content that `write` appends; its checksum is for [`seal`]. False: it is too long, and nothing was
/// appended.
fn frame(to: &mut Vec<u8>, write: impl FnOnce(&mut Vec<u8>)) -> bool {
    let start = to.len();
    to.extend_from_slice(&[0; HEADER]);
    write(to);
    let length = to.len() - start - HEADER;
    if length > MAX_CONTENT {
        to.truncate(start);
        return false;
    }
    let length = (length as u32).to_le_bytes();
    to[start..start + 4].copy_from_slice(&MARK);
    to[start + 4..start + 8].copy_from_slice(&length);
    true
}

/// Puts in the checksums of frames that lie one after the other: not where a frame is made, since that holds up a slice.
pub(crate) fn seal(mut frames: &mut [u8]) {
    while let Some((header, rest)) = frames.split_first_chunk_mut::<HEADER>() {
        let length = [header[4], header[5], header[6], header[7]];
        let Some((content, rest)) = rest.split_at_mut_checked(u32::from_le_bytes(length) as usize) else {
            return;
        };
        header[8..].copy_from_slice(&sum(length, content).to_le_bytes());
        frames = rest;
    }
}

/// The length is part of what is summed; its own place in the frame is before the sum.
fn sum(length: [u8; 4], content: &[u8]) -> u32 {
    crc32c(content) ^ crc32c(&length)
}

fn put(to: &mut Vec<u8>, numbers: &[u64]) {
    for number in numbers {
        to.extend_from_slice(&number.to_le_bytes());
    }
}

pub(crate) fn segment(to: &mut Vec<u8>, number: u64, after_hole: bool, origin: Origin, author: Author) {
    frame(to, |to| {
        to.push(SEGMENT);
        to.extend_from_slice(&FORMAT.to_le_bytes());
        put(to, &[number, origin.id, u64::from(origin.shard), u64::from(origin.shards)]);
        to.push(u8::from(after_hole));
        put(to, &[author.incarnation, author.predecessor]);
    });
}

pub(crate) fn push(to: &mut Vec<u8>, record: &Record<'_>) -> bool {
    let (action, step) = match record.action {
        Action::Gradient => (0, 0),
        Action::Assign => (1, 0),
        Action::AssignState { step } => (2, step),
    };
    let base = record.base.unwrap_or(Base { version: 0, own: None });
    let flag = |set: bool, flag: u8| if set { flag } else { 0 };
    let flags = flag(record.indices.is_some(), HAS_ROWS)
        | flag(record.base.is_some(), HAS_BASE)
        | flag(base.own.is_some(), HAS_OWN)
        | flag(record.once, ONCE)
        | flag(record.apply == Apply::Hogwild, HOGWILD)
        | flag(!record.shared_by.is_empty(), SHARED);
    let rows = record.indices.map_or(&[][..], Indices::bytes);
    frame(to, |to| {
        to.extend_from_slice(&[PUSH, action, record.codec as u8, flags]);
        let Identity { client, sequence } = record.identity;
        let own = base.own.unwrap_or(0);
        put(to, &[record.slice.0, record.version, client, sequence, step, base.version, own]);
        put(to, &[record.lr.to_bits(), record.momentum.to_bits()]);
        to.extend_from_slice(&record.scale.to_bits().to_le_bytes());
        to.extend_from_slice(&(rows.len() as u32).to_le_bytes());
        to.extend_from_slice(rows);
        if !record.shared_by.is_empty() {
            let identities = record.shared_by.bytes();
            to.extend_from_slice(&(identities.len() as u32).to_le_bytes());
            to.extend_from_slice(identities);
        }
        to.extend_from_slice(record.body);
    })
}

pub(crate) fn fence(to: &mut Vec<u8>, slice: SliceId, identity: Identity) {
    frame(to, |to| {
        to.push(FENCE);
        put(to, &[slice.0, identity.client, identity.sequence]);
    });
}

pub(crate) fn event(to: &mut Vec<u8>, event: &Event) -> bool {
    let Ok(json) = serde_json::to_vec(event) else { return false };
    frame(to, |to| {
        to.push(EVENT);
        to.extend_from_slice(&json);
    })
}

pub(crate) fn durable(to: &mut Vec<u8>, offset: u64) {
    frame(to, |to| {
        to.push(DURABLE);
        put(to, &[offset]);
    });
}

pub(crate) fn end(to: &mut Vec<u8>, next: u64) {
    frame(to, |to| {
        to.push(END);
        put(to, &[next]);
    });
}

pub(crate) fn slice(to: &mut Vec<u8>, piece: &Piece) -> bool {
    let Piece { slice, values, state, standing } = piece;
    frame(to, |to| {
        to.push(SLICE);
        put(to, &[*slice, standing.version, standing.step, standing.assigns]);
        for place in [values, state] {
            put(to, &[place.offset, place.bytes, u64::from(place.crc32c)]);
        }
        put(to, &[standing.clients.len() as u64]);
        for Remembered { client, own, assigned: _, forgotten, outcomes } in &standing.clients {
            put(to, &[*client, *own, *forgotten, outcomes.len() as u64]);
            for (sequence, applied) in outcomes {
                to.push(u8::from(applied.is_some()));
                put(to, &[*sequence]);
                if let Some(applied) = applied {
                    put(to, &[applied.version, applied.own, applied.staleness.unwrap_or(UNKNOWN)]);
                    to.extend_from_slice(&applied.scale.to_bits().to_le_bytes());
                }
            }
        }
        let assigned = || standing.clients.iter().map(|remembered| remembered.assigned);
        if assigned().any(|count| count > 0) {
            assigned().for_each(|count| put(to, &[count]));
        }
    })
}

/// The first frame of `bytes`: its content, and the bytes behind it. `None`: there is no whole frame.
pub(crate) fn split(bytes: &[u8]) -> Option<(&[u8], &[u8])> {
    let (header, content, rest) = divide(bytes)?;
    header.fits(content).then_some((content, rest))
}

/// The same of bytes whose checksums were compared already.
pub(crate) fn split_whole(bytes: &[u8]) -> Option<(&[u8], &[u8])> {
    divide(bytes).map(|(_, content, rest)| (content, rest))
}

/// How many bytes of whole frames there are, before anything else.
pub(crate) fn whole(bytes: &[u8]) -> usize {
    let mut rest = bytes;
    while let Some((_, behind)) = split(rest) {
        rest = behind;
    }
    bytes.len() - rest.len()
}

fn divide(bytes: &[u8]) -> Option<(Header, &[u8], &[u8])> {
    let (header, rest) = bytes.split_first_chunk::<HEADER>()?;
    let header = Header::read(header)?;
    let (content, rest) = rest.split_at_checked(header.length)?;
    Some((header, content, rest))
}

/// The beginning of a frame.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Header {
    pub(crate) length: usize,
    crc: u32,
}

impl Header {
    /// `None`: no frame begins like this.
    pub(crate) fn read(bytes: &[u8; HEADER]) -> Option<Self> {
        Reader(bytes).header()
    }

    pub(crate) fn fits(self, content: &[u8]) -> bool {
        content.len() == self.length && sum((self.length as u32).to_le_bytes(), content) == self.crc
    }
}

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

struct Reader<'a>(&'a [u8]);

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

    fn header(&mut self) -> Option<Header> {
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
