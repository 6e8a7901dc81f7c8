//! Vectors: programs on the slices of a space, and portions of their sums.

use super::{Exchange, READER_CHECK_INTERVAL, READER_TIMEOUT, owed};
use crate::answers::AnswerSlot;
use fastps_core::error::{Error, Kind, Result};
use fastps_core::program::Program;
use fastps_core::shard::Purpose;
use fastps_core::slice::Slice;
use fastps_core::spaces::no_space;
use fastps_core::tensor::SliceId;
use fastps_transport::convert::{self, PortionOf, Route, Run};
use std::sync::Arc;
use std::time::Instant;

/// Memory of an answer per part, beside its results: a short refusal.
const ANSWER_PART_BYTES: u64 = 256;

impl Exchange {
    /// Runs a program on each of its slices, whole or not at all. Programs take turns: between two slices the
    /// shard's thread does all its other work, however many programs run.
    pub(crate) async fn run_program(&self, tag: u64, route: Route, run: Run<'_>, slot: AnswerSlot) {
        let command = run.command;
        // A caller of another group learns nothing about the space.
        if !self.caller.principal.scope.is_everything()
            && let Some(error) = run.slices().find_map(|slice| self.slice(slice).err())
        {
            return self.refuse_program(tag, run, error, slot);
        }
        let secret = self.caller.secret.as_ref();
        match self.node.check_coordinator((command.space, command.term), secret).await {
            Ok(()) => {}
            // The client repeats the whole program.
            Err(error) if error.kind == Kind::Unavailable => return self.refuse(slot, tag, error),
            Err(error) => {
                // As above, also for a caller that names slices of its own.
                let is_open = |slice| {
                    let slice = self.slice(slice).ok();
                    slice.and_then(|slice| slice.space()).is_some_and(|(open, _)| open.id == command.space)
                };
                let hides = !self.caller.principal.scope.is_everything() && !run.slices().all(is_open);
                return self.refuse_program(tag, run, if hides { no_space() } else { error }, slot);
            }
        }
        let (program, memory) = match self.prepare(&run).await {
            Ok(prepared) => prepared,
            Err(error) => return self.refuse(slot, tag, error),
        };
        let mut outcomes = Vec::with_capacity(run.len());
        let begin = Instant::now();
        for slice in run.slices() {
            self.node.gate.pass().await;
            // If the program ends a sum, its record holds the values.
            self.node.files.wait_for_space().await;
            let ran = self.run_on(slice, (route, run), &program, begin).await;
            outcomes.push(ran.map_err(|error| self.node.sign(error)));
            tokio::task::yield_now().await;
        }
        let mut answer = convert::scalars(tag, &outcomes);
        answer.payload = convert::keeping(answer.payload, memory);
        slot.send(Ok(owed(answer)));
    }

    /// Answers every slice of a program with the same refusal.
    fn refuse_program(&self, tag: u64, run: Run<'_>, error: Error, slot: AnswerSlot) {
        let refused = vec![Err(self.node.sign(error)); run.len()];
        slot.send(Ok(owed(convert::scalars(tag, &refused))));
    }

    /// Reads the program, and takes the memory of its answer.
    async fn prepare(&self, run: &Run<'_>) -> Result<(Arc<Program>, impl Send + 'static + use<>)> {
        let program = run.program()?;
        let pin = self.pin().await?;
        let part = ANSWER_PART_BYTES + (size_of::<f64>() * program.results()) as u64;
        let charge = self.node.shard.meter().take(Purpose::Answers, part * run.len() as u64)?;
        Ok((Arc::new(program), (pin, charge)))
    }

    /// Runs a program on a slice. Retries while readers pin vectors and no memory is left for copies.
    async fn run_on(
        &self,
        slice: SliceId,
        (route, run): (Route, Run<'_>),
        program: &Program,
        begin: Instant,
    ) -> Result<Vec<f64>> {
        loop {
            let slice = self.admit_vectors(slice, route)?;
            let turn = self.node.programs.acquire().await;
            let ran = slice.run_program(run.command, program);
            drop(turn);
            match ran {
                Err(error) if error.kind == Kind::Capacity && begin.elapsed() < READER_TIMEOUT => {
                    tokio::time::sleep(READER_CHECK_INTERVAL).await;
                }
                ran => return ran,
            }
        }
    }

    /// A slice of the group of a request, unless it is still being registered.
    fn admit_vectors(&self, slice: SliceId, route: Route) -> Result<Arc<Slice>> {
        let slice = self.admit_to(slice, route, None)?;
        self.admit_reserved(&slice, None, route.client, Instant::now())?;
        Ok(slice)
    }

    /// Adds a portion to the sum of its batch.
    pub(super) fn push_portion(
        &self,
        (tag, slice, route): (u64, SliceId, Route),
        of: PortionOf,
        (count, body): (u64, &[u8]),
        slot: AnswerSlot,
    ) {
        let PortionOf { space, batch, portion } = of;
        let added = self.admit_vectors(slice, route).and_then(|slice| {
            if count != slice.len() as u64 {
                let error = Error::new(Kind::Shape, "the portion differs in length from its slice");
                return Err(error.tensor(slice.spec().name.clone()).expected(slice.len(), count));
            }
            slice.push_portion(space, batch, portion, body)
        });
        match added {
            Ok(is_new) => slot.send(Ok(owed(convert::portion_receipt(tag, is_new)))),
            Err(error) => self.refuse(slot, tag, error),
        }
    }
}
