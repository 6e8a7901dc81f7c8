//! Assignments: new values of tensors, or of rows, queued at the links to their shards.

use crate::calls::small::{Body, Kinship, SmallSlice, SmallSlices};
use crate::calls::submit::{Draft, next};
use crate::client::Client;
use crate::link::call::payload::{Memory, Payload};
use crate::link::wait::CallHandle;
use crate::state::map::Entry;
use crate::state::time::after;
use fastps_core::codec::CodecId;
use fastps_core::error::Result;
use fastps_core::frame::Base;
use fastps_core::isa::Isa;
use fastps_core::outgoing;
use fastps_core::verbs::Gradient;
use fastps_proto::v1 as pb;
use fastps_transport::convert::header;
use std::borrow::Cow;
use std::time::Duration;

impl Client {
    /// Checks and queues assignments: one frame per large slice, shared ones for small slices.
    pub(crate) fn start_assign_all(&self, values: &[Gradient], timeout: Duration) -> Result<CallHandle> {
        let (isa, deadline) = (Isa::get()?, after(timeout));
        let names = values.iter().map(|values| &values.name);
        let (epoch, entries, rows) = self.look_up_for(names, deadline, |entries| {
            let specs = entries.iter().map(|entry| &*entry.spec);
            outgoing::check_assigned(isa, values.iter().map(Gradient::borrow).zip(specs))
        })?;
        let (mut drafts, mut memories) = (Vec::new(), Vec::new());
        let mut small = SmallSlices::new(small_header(epoch));
        for (tensor, (entry, rows)) in entries.iter().zip(&rows).enumerate() {
            if let Some(rows) = rows {
                drafts.extend(Self::row_assignment(isa, (tensor, entry), rows, epoch));
                continue;
            }
            let (given, dtype) = (&values[tensor].values, entry.spec.dtype);
            let mut memory = None;
            for (k, range) in entry.spec.slices().enumerate() {
                let count = range.len() as u64;
                let view = given.view();
                let body = outgoing::assigned_body(isa, view.get(range.clone()), &entry.spec);
                if self.is_small(entry, k, body.len(), None) {
                    drafts.extend(small.add(small_slice((tensor, entry, k), &body, 0)));
                    continue;
                }
                let payload = match body {
                    // The caller's array is sent without a copy.
                    Cow::Borrowed(_) => {
                        let memory = memory.get_or_insert_with(|| Memory::new(given.clone()));
                        Payload::Lent(memory.clone(), range)
                    }
                    Cow::Owned(body) => Payload::Owned(body.into()),
                };
                let header = header::assignment(entry.target(k, epoch), dtype, count, None, 0);
                drafts.push(Draft::new(tensor, entry, k, header, None, payload));
            }
            memories.extend(memory);
        }
        drafts.extend(small.finish());
        let mut last = self.lock_sequence();
        let sequence = next(&mut last);
        Ok(self.submit(drafts, memories, deadline, Some(sequence)))
    }
}

/// Headers of the messages of small slices.
pub(super) fn small_header(epoch: u64) -> impl Fn(Kinship, Vec<pb::Part>, &[Option<Base>]) -> pb::Header {
    move |kin, parts, _| header::whole_assignments(kin.target(epoch), kin.dtype, parts)
}

/// A small slice to be assigned; `reservation`: that of its initial values, or 0.
pub(super) fn small_slice<'a>(
    (tensor, entry, k): (usize, &'a Entry, usize),
    body: &'a [u8],
    reservation: u64,
) -> SmallSlice<'a> {
    let codec = Some(CodecId::plain(entry.spec.dtype));
    let body = Body::Ready(body);
    SmallSlice { tensor, entry, k, codec, bfloat16: false, base: None, reservation, body, answer_bytes: None }
}
