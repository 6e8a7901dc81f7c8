//! Encoding frames into a buffer. [`super::seal`] adds the checksums later.

use crate::catalog::Event;
use crate::frame::content::{
    FLAG_BASE, FLAG_BETA1, FLAG_HOGWILD, FLAG_MORE, FLAG_ONCE, FLAG_OWN, FLAG_ROWS, FLAG_SHARED, KIND_ARRAY,
    KIND_DURABLE, KIND_END, KIND_EVENT, KIND_FENCE, KIND_MARK, KIND_PROGRAM, KIND_PUSH, KIND_SEGMENT,
    KIND_SLICE, KIND_SPACE, KIND_TIME, KIND_VECTORS, MORE_ACKNOWLEDGED, MORE_NOTE, Mark, NOBODY, SliceEntry,
    UNKNOWN_STALENESS, VectorsEntry,
};
use crate::frame::origin::{Author, Origin};
use crate::frame::{FORMAT, frame};
use fastps_core::asynchrony::Gradient;
use fastps_core::frame::{Action, Base, Identity};
use fastps_core::identity::{Remembered, Settled};
use fastps_core::record::{ProgramRecord, Record};
use fastps_core::rows::Indices;
use fastps_core::slice::VectorsStanding;
use fastps_core::tensor::{Apply, SliceId, Space, SpaceId};

fn put(to: &mut Vec<u8>, numbers: &[u64]) {
    for number in numbers {
        to.extend_from_slice(&number.to_le_bytes());
    }
}

pub(crate) fn segment(to: &mut Vec<u8>, number: u64, after_gap: bool, origin: Origin, author: Author) {
    frame(to, |to| {
        to.push(KIND_SEGMENT);
        to.extend_from_slice(&FORMAT.to_le_bytes());
        put(to, &[number, origin.id, u64::from(origin.shard), u64::from(origin.shards)]);
        to.push(u8::from(after_gap));
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
    let more = flag(!record.note.is_empty(), MORE_NOTE) | flag(record.acknowledged > 0, MORE_ACKNOWLEDGED);
    let flags = flag(record.indices.is_some(), FLAG_ROWS)
        | flag(record.base.is_some(), FLAG_BASE)
        | flag(base.own.is_some(), FLAG_OWN)
        | flag(record.once, FLAG_ONCE)
        | flag(record.apply == Apply::Hogwild, FLAG_HOGWILD)
        | flag(!record.shared_by.is_empty(), FLAG_SHARED)
        | flag(record.beta1.is_some(), FLAG_BETA1)
        | flag(more > 0, FLAG_MORE);
    let rows = record.indices.map_or(&[][..], Indices::bytes);
    frame(to, |to| {
        to.extend_from_slice(&[KIND_PUSH, action, record.codec as u8, flags]);
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
        if let Some(beta1) = record.beta1 {
            put(to, &[beta1.to_bits()]);
        }
        if more > 0 {
            to.push(more);
        }
        if !record.note.is_empty() {
            // The slice has checked its length.
            to.push(record.note.len() as u8);
            to.extend_from_slice(record.note.as_bytes());
        }
        if record.acknowledged > 0 {
            put(to, &[record.acknowledged]);
        }
        to.extend_from_slice(record.body);
    })
}

pub(crate) fn fence(to: &mut Vec<u8>, slice: SliceId, identity: Identity) {
    frame(to, |to| {
        to.push(KIND_FENCE);
        put(to, &[slice.0, identity.client, identity.sequence]);
    });
}

pub(crate) fn event(to: &mut Vec<u8>, event: &Event) -> bool {
    let Ok(json) = serde_json::to_vec(event) else { return false };
    frame(to, |to| {
        to.push(KIND_EVENT);
        to.extend_from_slice(&json);
    })
}

pub(crate) fn durable(to: &mut Vec<u8>, offset: u64) {
    frame(to, |to| {
        to.push(KIND_DURABLE);
        put(to, &[offset]);
    });
}

pub(crate) fn time(to: &mut Vec<u8>, milliseconds: u64) {
    frame(to, |to| {
        to.push(KIND_TIME);
        put(to, &[milliseconds]);
    });
}

pub(crate) fn mark(to: &mut Vec<u8>, mark: Mark<'_>) -> bool {
    frame(to, |to| {
        to.push(KIND_MARK);
        put(to, &[mark.id]);
        to.extend_from_slice(mark.name.as_bytes());
    })
}

pub(crate) fn end(to: &mut Vec<u8>, next: u64) {
    frame(to, |to| {
        to.push(KIND_END);
        put(to, &[next]);
    });
}

pub(crate) fn slice(to: &mut Vec<u8>, entry: &SliceEntry) -> bool {
    let SliceEntry { slice, values, state, standing } = entry;
    frame(to, |to| {
        to.push(KIND_SLICE);
        put(to, &[*slice, standing.version, standing.step, standing.assigns]);
        for extent in [values, state] {
            put(to, &[extent.offset, extent.bytes, u64::from(extent.crc32c)]);
        }
        let gradients = gradients_as_client(&standing.gradients);
        let clients = || gradients.iter().chain(&standing.clients);
        put(to, &[clients().count() as u64]);
        for Remembered { client, own, assigned: _, forgotten, outcomes } in clients() {
            put(to, &[*client, *own, *forgotten, outcomes.len() as u64]);
            for (sequence, applied) in outcomes {
                to.push(u8::from(applied.is_some()));
                put(to, &[*sequence]);
                if let Some(applied) = applied {
                    put(to, &[applied.version, applied.own, applied.staleness.unwrap_or(UNKNOWN_STALENESS)]);
                    to.extend_from_slice(&applied.scale.to_bits().to_le_bytes());
                }
            }
        }
        let assigned = || clients().map(|remembered| remembered.assigned);
        if assigned().any(|count| count > 0) {
            assigned().for_each(|count| put(to, &[count]));
        }
    })
}

/// A slice's last gradients as the pushes of client 0, which is nobody: earlier versions refuse an entry that
/// has more than they know, but take one client more.
fn gradients_as_client(gradients: &[Gradient]) -> Option<Remembered> {
    let outcome = |(sequence, (sender, staleness)): (u64, &Gradient)| {
        let staleness = Some(u64::from(*staleness));
        (sequence, Some(Settled { version: *sender, own: 0, staleness, scale: 0.0 }))
    };
    let outcomes: Vec<_> = (1..).zip(gradients).map(outcome).collect();
    (!outcomes.is_empty()).then_some(Remembered {
        client: NOBODY,
        own: 0,
        assigned: 0,
        forgotten: 0,
        outcomes,
    })
}

/// Appends a length and the bytes.
fn put_bytes(to: &mut Vec<u8>, bytes: &[u8]) {
    to.extend_from_slice(&(bytes.len() as u32).to_le_bytes());
    to.extend_from_slice(bytes);
}

/// Appends the identifier and the names of a space.
fn put_space(to: &mut Vec<u8>, space: &Space) {
    put(to, &[space.id.0]);
    put_bytes(to, space.name.as_bytes());
    to.extend_from_slice(&(space.vectors.len() as u32).to_le_bytes());
    space.vectors.iter().for_each(|name| put_bytes(to, name.as_bytes()));
}

pub(crate) fn program(to: &mut Vec<u8>, record: &ProgramRecord<'_>) -> bool {
    let ProgramRecord { slice, version, command, program, sum } = record;
    frame(to, |to| {
        to.push(KIND_PROGRAM);
        put(to, &[slice.0, *version, command.space.0, command.term, command.number]);
        put_bytes(to, &program.to_bytes());
        to.push(u8::from(sum.is_some()));
        if let Some(sum) = sum {
            put(to, &[sum.largest.to_bits()]);
            to.extend_from_slice(sum.values);
        }
    })
}

pub(crate) fn space_opened(to: &mut Vec<u8>, slice: SliceId, space: &Space) -> bool {
    frame(to, |to| {
        to.extend_from_slice(&[KIND_SPACE, 1]);
        put(to, &[slice.0]);
        put_space(to, space);
    })
}

pub(crate) fn space_closed(to: &mut Vec<u8>, slice: SliceId, space: SpaceId) -> bool {
    frame(to, |to| {
        to.extend_from_slice(&[KIND_SPACE, 0]);
        put(to, &[slice.0, space.0]);
    })
}

pub(crate) fn vectors(to: &mut Vec<u8>, entry: &VectorsEntry) -> bool {
    let VectorsEntry { slice, space, standing } = entry;
    let VectorsStanding { term, number, results, batch, open, largest, grid } = standing;
    frame(to, |to| {
        to.push(KIND_VECTORS);
        put(to, &[*slice]);
        put_space(to, space);
        put(to, &[*term, *number, *batch, largest.to_bits()]);
        to.extend_from_slice(&[u8::from(*open), u8::from(grid.is_some())]);
        to.extend_from_slice(&grid.unwrap_or(0).to_le_bytes());
        for result in results {
            put(to, &[result.to_bits()]);
        }
    })
}

pub(crate) fn array(to: &mut Vec<u8>, values: &[u8]) -> bool {
    frame(to, |to| {
        to.push(KIND_ARRAY);
        to.extend_from_slice(values);
    })
}
