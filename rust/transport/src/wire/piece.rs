//! One outgoing message: its header bytes, and its payload without a copy.

use crate::memory_budget::Busy;
use bytes::{Buf, BufMut, Bytes, BytesMut};
use fastps_proto::v1 as pb;
use prost::Message;
use prost::encoding::{WireType, encode_key, encode_varint, encoded_len_varint, key_len};
use std::fmt;
use std::io::IoSlice;

/// Field number of the payload.
const PAYLOAD_FIELD: u32 = 15;
const HEADER_FIELD: u32 = 1;
/// Length of gRPC's prefix: the flag for compression, and the length of the message.
pub(super) const PREFIX_BYTES: usize = 5;
/// Largest payload that is cheaper to copy than to send separately.
const MAX_COPIED_BYTES: usize = 8 << 10;

/// A message as `h2` sends it. It drops its payload, even an empty one, as soon as all of it is written.
pub struct Piece {
    head: Bytes,
    payload: Bytes,
    busy: Option<Busy>,
}

impl Piece {
    /// A message whose payload is sent without a copy.
    pub fn new(frame: pb::Frame) -> Self {
        let mut head = BytesMut::new();
        put_head(&frame, 0, &mut head);
        Self { head: head.freeze(), payload: frame.payload, busy: None }
    }

    /// Keeps its connection from resting until it is written.
    pub(super) fn keeping(self, busy: Option<Busy>) -> Self {
        Self { busy, ..self }
    }

    /// Returns whether a message is cheaper to copy than to send separately.
    pub(super) fn is_small(frame: &pb::Frame) -> bool {
        frame.payload.len() <= MAX_COPIED_BYTES
    }

    /// Appends a whole message.
    pub(super) fn append(frame: &pb::Frame, to: &mut BytesMut) {
        put_head(frame, frame.payload.len(), to);
        to.put_slice(&frame.payload);
    }
}

impl From<Bytes> for Piece {
    /// Whole messages.
    fn from(head: Bytes) -> Self {
        Self { head, payload: Bytes::new(), busy: None }
    }
}

/// Appends the bytes before the payload; reserves room for `more` bytes after it.
fn put_head(frame: &pb::Frame, more: usize, to: &mut BytesMut) {
    let header_len = frame.header.as_ref().map_or(0, |h| {
        let len = h.encoded_len();
        key_len(HEADER_FIELD) + encoded_len_varint(len as u64) + len
    });
    let payload_len = match frame.payload.len() {
        0 => 0,
        len => key_len(PAYLOAD_FIELD) + encoded_len_varint(len as u64) + len,
    };
    to.reserve(PREFIX_BYTES + header_len + 16 + more);
    to.put_u8(0);
    to.put_u32((header_len + payload_len) as u32);
    if let Some(header) = &frame.header {
        prost::encoding::message::encode(HEADER_FIELD, header, to);
    }
    if !frame.payload.is_empty() {
        encode_key(PAYLOAD_FIELD, WireType::LengthDelimited, to);
        encode_varint(frame.payload.len() as u64, to);
    }
}

impl Buf for Piece {
    fn remaining(&self) -> usize {
        self.head.len() + self.payload.len()
    }

    fn chunk(&self) -> &[u8] {
        if self.head.is_empty() { &self.payload } else { &self.head }
    }

    fn chunks_vectored<'a>(&'a self, into: &mut [IoSlice<'a>]) -> usize {
        let mut n = 0;
        for (part, slot) in [&self.head, &self.payload].into_iter().filter(|part| !part.is_empty()).zip(into)
        {
            *slot = IoSlice::new(part);
            n += 1;
        }
        n
    }

    fn advance(&mut self, count: usize) {
        let head = count.min(self.head.len());
        self.head.advance(head);
        self.payload.advance(count - head);
        if self.remaining() == 0 {
            // h2 keeps a written frame until it writes the next.
            self.payload = Bytes::new();
            self.busy = None;
        }
    }
}

impl fmt::Debug for Piece {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Piece").field("remaining", &self.remaining()).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn frame(payload: usize) -> pb::Frame {
        let header = pb::Header { tag: 7, count: 3, lr: Some(0.5), ..Default::default() };
        let bytes: Vec<u8> = (0..payload).map(|k| (k % 251) as u8).collect();
        pb::Frame { header: Some(header), payload: bytes.into() }
    }

    #[test]
    fn the_bytes_are_those_of_the_generated_encoder() {
        for payload in [0, 1, MAX_COPIED_BYTES - 1, MAX_COPIED_BYTES, MAX_COPIED_BYTES + 1, 1 << 20] {
            let frame = frame(payload);
            let encoded = frame.encode_to_vec();
            let mut gathered = BytesMut::new();
            Piece::append(&frame, &mut gathered);
            for mut piece in [Piece::new(frame), Piece::from(gathered.freeze())] {
                let bytes = piece.copy_to_bytes(piece.remaining());
                assert_eq!(bytes[0], 0);
                assert_eq!(bytes[1..PREFIX_BYTES], (encoded.len() as u32).to_be_bytes());
                assert!(bytes[PREFIX_BYTES..] == encoded, "{payload}");
            }
        }
        let empty = Piece::new(pb::Frame::default());
        assert_eq!(empty.chunk(), [0; PREFIX_BYTES]);
    }

    #[test]
    fn the_payload_goes_with_its_last_byte() {
        let payload = frame(1 << 16).payload;
        let mut piece = Piece::new(pb::Frame { payload: payload.clone(), ..pb::Frame::default() });
        assert!(!payload.is_unique());
        piece.advance(piece.remaining() - 1);
        assert!(!payload.is_unique());
        piece.advance(1);
        assert!(payload.is_unique());
    }
}
