//! The calls that change tensors of a store. Each begins its change and settles it, or returns a ticket that
//! does.

use super::Store;
use super::later::Later;
use super::places::Places;
use super::settle::Begun;
use crate::base::dtype::View;
use crate::base::error::{Error, Kind, Result};
use crate::base::sync::Arc;
use crate::kernel::codec::CodecId;
use crate::push::outcome::Collect;
use crate::push::outgoing;
use crate::push::sparse::{Gathered, RowPart};
use crate::slice::Slice;
use crate::slice::frame::{Action, Push};
use crate::tensor::Versions;
use crate::verbs::{
    Caller, Done, Gradient, OptimizerState, PullTensors, PushError, PushOptions, PushTensors, Pushed,
    Receipt, Ticket,
};
use std::borrow::Cow;
use std::sync::OnceLock;
use std::time::Duration;

impl Store {
    /// Replaces values or state of tensors, or values of some rows; `actions` has those of each slice that the
    /// call touches.
    pub(super) fn change(
        &self,
        places: &Places,
        actions: &[(Action, Cow<'_, [u8]>)],
        timeout: Duration,
    ) -> Pushed {
        let _ends = self.shared.deadlines.end_complete_at_last();
        let identity = self.identity();
        let late = OnceLock::new();
        let mut sent = vec![0; places.tensors.len()];
        // The tensor, and the number of its first part.
        let mut of = (0, 0);
        let change = |(part, (k, slice)): (usize, (usize, &Arc<Slice>))| {
            if k != of.0 {
                of = (k, part);
            }
            let ((action, body), spec) = (&actions[part], slice.spec());
            sent[k] += body.len() as u64;
            let dtype = match action {
                Action::AssignState { .. } => spec.dtype.computed(),
                Action::Assign | Action::Gradient => spec.dtype,
            };
            let rows = places.rows(k).map(|rows| rows.plan.indices(&rows.plan.parts()[part - of.1]));
            let push = Push {
                action: *action,
                indices: rows,
                once: true,
                ..Push::gradient(
                    slice.id(),
                    identity,
                    rows.map_or(slice.len(), |_| body.len() / dtype.size()) as u64,
                    CodecId::plain(dtype),
                    body,
                )
            };
            self.shared.shard.push_to(slice, &push, || late.get_or_init(Arc::<Collect>::default).expect(part))
        };
        let answers = places.parts().enumerate().map(change).collect();
        let late = late.into_inner();
        let begun = Begun { identity, answers, late, residues: Vec::new(), sent: Some(sent) };
        self.settle(places, begun, timeout)
    }
}

impl PushTensors for Store {
    fn push_for(&self, caller: &mut dyn Caller, gradients: &[Gradient], options: &PushOptions) -> Pushed {
        let _ends = self.shared.deadlines.end_complete_at_last();
        let borrowed: Vec<_> = gradients.iter().map(Gradient::borrow).collect();
        let (places, begun) = self.begin(&borrowed, options)?;
        if begun.late.is_none() {
            return self.settle(&places, begun, options.timeout);
        }
        self.count(&places, &begun);
        Later::start(&self.shared.deadlines, places, begun, options.timeout).wait_for(caller)
    }

    fn push_async(&self, gradients: Vec<Gradient>, options: PushOptions) -> Result<Arc<dyn Ticket<Pushed>>> {
        let _ends = self.shared.deadlines.end_complete_at_last();
        let borrowed: Vec<_> = gradients.iter().map(Gradient::borrow).collect();
        let (places, begun) = self.begin(&borrowed, &options)?;
        if begun.late.is_some() {
            self.count(&places, &begun);
            return Ok(Later::start(&self.shared.deadlines, places, begun, options.timeout));
        }
        match self.settle(&places, begun, options.timeout) {
            // As over the network, the error of a check is returned by the call and not by the ticket.
            Err(PushError::Refused(error)) => Err(error),
            pushed => Ok(Arc::new(Done(pushed))),
        }
    }

    fn push_pull(
        &self,
        gradients: &[Gradient],
        options: &PushOptions,
        caller: &mut dyn Caller,
    ) -> Result<(Vec<Receipt>, Versions), PushError> {
        for gradient in gradients {
            self.tensor(&gradient.name)?.spec.need_float32("push_pull")?;
        }
        let receipts = self.push_for(caller, gradients, options)?;
        let names: Vec<_> = gradients.iter().map(|g| g.name.clone()).collect();
        Ok((receipts, self.pull(&names, options.timeout, caller)?))
    }

    fn assign_all(&self, given: &[Gradient], timeout: Duration) -> Pushed {
        let isa = self.shared.isa;
        let mut places = self.look_up(given.iter().map(|values| &*values.name))?;
        let specs = places.tensors.iter().map(|tensor| &*tensor.spec);
        places.sparse = outgoing::check_assigned(isa, given.iter().map(Gradient::borrow).zip(specs))?;
        let mut actions = Vec::new();
        for (k, (given, tensor)) in given.iter().zip(&places.tensors).enumerate() {
            let (spec, values) = (&tensor.spec, given.values.view());
            let assign = |values| (Action::Assign, outgoing::assigned_body(isa, values, spec));
            match places.rows(k) {
                None => actions.extend(spec.slices().map(|range| assign(values.get(range)))),
                Some(Gathered { plan, values }) => {
                    let values = |part: &RowPart| View::Float32(&values[part.elements.clone()]);
                    actions.extend(plan.parts().iter().map(|part| assign(values(part))));
                }
            }
        }
        self.change(&places, &actions, timeout)
    }

    fn load_state(
        &self,
        name: &str,
        state: &OptimizerState,
        timeout: Duration,
    ) -> Result<Receipt, PushError> {
        let tensor = self.tensor(name)?;
        let bodies = outgoing::state_bodies(&tensor.spec, state)?;
        let assign = |(body, step): (_, &u64)| (Action::AssignState { step: *step }, Cow::Borrowed(body));
        let actions: Vec<_> = bodies.iter().map(Vec::as_slice).zip(&state.steps).map(assign).collect();
        let mut receipts = self.change(&Places::new(0, vec![tensor]), &actions, timeout)?;
        receipts.pop().ok_or_else(|| Error::new(Kind::Internal, "a change without a receipt").into())
    }
}
