//! Sparse messages: each part is applied or refused by itself, and one answer tells of all.

use super::{Exchange, owed};
use crate::answers::{Owed, Place};
use crate::convert::{self, Parts, Route};
use fastps_core::dtype::DType;
use fastps_core::error::{Error, Kind, Result};
use fastps_core::frame::Applied;
use fastps_core::identity::Completion;
use fastps_core::shard::{Charge, Purpose};
use fastps_core::slice::{Slice, Snapshot};
use fastps_core::tensor::SliceId;
use fastps_core::verbs::SliceVersion;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Instant;
use tokio::sync::OwnedSemaphorePermit;
use tokio::sync::mpsc::{UnboundedReceiver, unbounded_channel};

/// What an answer takes for each part: its place in the tables, and a refusal in short.
const PART_BYTES: u64 = 256;

/// One of the connection's pins, so that it owes few large answers, and their memory.
type RoomToAnswer = (OwnedSemaphorePermit, Charge);

/// The outcomes of parts that a policy holds.
type Late = UnboundedReceiver<(usize, Result<Applied>)>;

impl Exchange {
    /// What can be said against a part before its slice is touched.
    fn admit_part(
        &self,
        slice: SliceId,
        route: Route,
        dtype: Option<DType>,
        now: Instant,
    ) -> Result<Arc<Slice>> {
        let slice = self.admit_to(slice, route, dtype)?;
        self.admit_reserved(&slice, None, route.client, now)?;
        Ok(slice)
    }

    /// Sparse gradients.
    pub(super) async fn push_parts(
        &self,
        tag: u64,
        route: Route,
        parts: Parts<'_>,
        dtype: DType,
        place: Place,
    ) {
        let (pin, charge) = match self.room_to_answer(parts).await {
            Ok(room) => room,
            Err(error) => return self.refuse(place, tag, error),
        };
        let (late, answers) = unbounded_channel();
        let (mut outcomes, begin) = (Vec::with_capacity(parts.len()), Instant::now());
        for (k, part) in parts.iter().enumerate() {
            let slice = self.admit_part(part.slice, route, Some(dtype), begin);
            let (Ok(slice), Some(push)) = (&slice, parts.push(k, part)) else {
                outcomes.push(slice.err().map(Err));
                continue;
            };
            outcomes.push(loop {
                let later = || -> Completion {
                    let late = late.clone();
                    Box::new(move |outcome| drop(late.send((k, outcome))))
                };
                match self.node.shard.push_to(slice, &push, later) {
                    Some(Err(error))
                        if error.kind == Kind::Capacity && self.wait_for_readers(push.slice, begin).await => {
                    }
                    outcome => break outcome,
                }
            });
        }
        drop(late);
        if outcomes.iter().all(Option::is_some) {
            return self.answer_parts(tag, route.client, outcomes, (pin, charge), place);
        }
        // Other answers need the pin while a policy holds parts of this one.
        drop(pin);
        let stream = self.clone();
        tokio::spawn(async move {
            stream.await_parts(answers, &mut outcomes).await;
            match stream.pin().await {
                Ok(pin) => stream.answer_parts(tag, route.client, outcomes, (pin, charge), place),
                Err(error) => stream.refuse(place, tag, error),
            }
        });
    }

    /// Waits for the parts that a policy holds.
    async fn await_parts(&self, mut answers: Late, outcomes: &mut [Option<Result<Applied>>]) {
        while let Some((k, outcome)) = answers.recv().await {
            outcomes[k] = Some(outcome);
        }
    }

    fn answer_parts(
        &self,
        tag: u64,
        client: u64,
        outcomes: Vec<Option<Result<Applied>>>,
        room: RoomToAnswer,
        place: Place,
    ) {
        let lost = || Err(Error::new(Kind::Internal, "a push was not completed"));
        let index = self.node.index();
        let told = |outcome: Option<Result<Applied>>| {
            outcome.unwrap_or_else(lost).map_err(|error| error.shard(index))
        };
        let outcomes: Vec<_> = outcomes.into_iter().map(told).collect();
        let new = outcomes.iter().flatten().filter(|applied| !applied.duplicate).count();
        self.node.sessions.count_applied(client, new as u64);
        let refused = outcomes.iter().filter(|outcome| outcome.is_err()).count();
        self.node.frames_refused.fetch_add(refused as u64, Ordering::Relaxed);
        let mut answer = convert::receipts(tag, &outcomes);
        answer.payload = convert::keeping([], room);
        place.send(Ok(owed(answer)));
    }

    /// Takes what the answer to many parts needs.
    async fn room_to_answer(&self, parts: Parts<'_>) -> Result<RoomToAnswer> {
        let pin = self.pin().await?;
        let charge = self.node.shard.meter().take(Purpose::Answers, PART_BYTES * parts.len() as u64)?;
        Ok((pin, charge))
    }

    /// Rows of many slices, in one answer.
    pub(super) async fn pull_parts(&self, tag: u64, route: Route, parts: Parts<'_>, place: Place) {
        let (pin, charge) = match self.room_to_answer(parts).await {
            Ok(room) => room,
            Err(error) => return self.refuse(place, tag, error),
        };
        match self.gather(route, parts) {
            Ok((outcomes, values)) => {
                let elements = values.as_ref().len() / values.dtype.size();
                let header = convert::rows_header(tag, values.dtype, elements, &outcomes);
                let pin = self.node.pins.add(values, &self.shared, pin);
                place.send(Ok(Owed::Rows { header: Box::new(header), pin, charge }));
            }
            Err(error) => self.refuse(place, tag, error),
        }
    }

    /// What became of each part, and the values of all.
    fn gather(&self, route: Route, parts: Parts<'_>) -> Result<(Vec<Result<SliceVersion>>, Snapshot)> {
        let (now, dtype) = (Instant::now(), DType::Float32);
        let mut elements = 0;
        let slices: Vec<_> = parts
            .iter()
            .map(|part| {
                let slice = self.admit_part(part.slice, route, None, now)?;
                elements += slice.row_elements(part.indices)?;
                Ok((slice, part.indices))
            })
            .collect();
        if elements > dtype.slice_len() {
            let error = Error::new(Kind::Frame, "the rows of one message have too many elements");
            return Err(error.expected(format!("at most {}", dtype.slice_len()), elements));
        }
        let bytes = dtype.size() * elements;
        let charge = self.node.shard.meter().take(Purpose::Copies, bytes as u64)?;
        self.shared.make_room(bytes)?;
        let mut values = Vec::with_capacity(bytes);
        let index = self.node.index();
        let pull = |part: Result<(Arc<Slice>, _)>| {
            let pulled =
                part.and_then(|(slice, indices)| slice.pull_rows(route.client, indices, &mut values));
            pulled.map_err(|error: Error| error.shard(index))
        };
        let outcomes = slices.into_iter().map(pull).collect();
        Ok((outcomes, Snapshot::of_rows(dtype, values, charge)))
    }
}
