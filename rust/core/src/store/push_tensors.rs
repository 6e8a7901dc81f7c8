//! The calls that change tensors of a store. Each begins its change and settles it, or returns a ticket that
//! does.

use super::later::Later;
use super::places::Places;
use super::settle::Begun;
use super::{Store, Tensor};
use crate::base::error::{Error, Kind, Result};
use crate::base::sync::Arc;
use crate::kernel::codec::CodecId;
use crate::push::check;
use crate::push::outcome::Collect;
use crate::slice::Slice;
use crate::slice::frame::{Action, Push};
use crate::tensor::Versions;
use crate::verbs::{
    Caller, Done, Gradient, OptimizerState, PullTensors, PushError, PushOptions, PushTensors, Pushed,
    Receipt, Ticket,
};
use std::sync::OnceLock;
use std::time::Duration;

impl Store {
    /// Replaces values or state of a whole tensor.
    pub(super) fn change(
        &self,
        tensor: &Arc<Tensor>,
        actions: &[(Action, &[u8])],
        timeout: Duration,
    ) -> Result<Receipt, PushError> {
        let identity = self.identity();
        let late = OnceLock::new();
        let change = |(part, slice): (usize, &Arc<Slice>)| {
            let (action, body) = actions[part];
            let push = Push {
                slice: slice.id(),
                action,
                identity,
                base: None,
                lr: None,
                scale: None,
                momentum: None,
                correction: None,
                count: slice.len() as u64,
                indices: None,
                codec: CodecId::plain(tensor.spec.dtype),
                body,
                trusted: false,
                once: true,
            };
            self.shared.shard.push_to(slice, &push, || late.get_or_init(Arc::<Collect>::default).expect(part))
        };
        let answers = tensor.slices.iter().enumerate().map(change).collect();
        let bytes = actions.iter().map(|(_, body)| body.len() as u64).sum();
        let places = Places::new(0, vec![tensor.clone()]);
        let late = late.into_inner();
        let begun = Begun { identity, answers, late, residues: Vec::new(), sent: Some(vec![bytes]) };
        let mut receipts = self.settle(&places, begun, timeout)?;
        receipts.pop().ok_or_else(|| Error::new(Kind::Internal, "a change without a receipt").into())
    }
}

impl PushTensors for Store {
    fn push_for(&self, caller: &mut dyn Caller, gradients: &[Gradient], options: &PushOptions) -> Pushed {
        let borrowed: Vec<_> = gradients.iter().map(Gradient::borrow).collect();
        let (places, begun) = self.begin(&borrowed, options)?;
        if begun.late.is_none() {
            return self.settle(&places, begun, options.timeout);
        }
        self.count(&places, &begun);
        Later::start(places, begun, options.timeout).wait_for(caller)
    }

    fn push_async(&self, gradients: Vec<Gradient>, options: PushOptions) -> Result<Arc<dyn Ticket<Pushed>>> {
        let borrowed: Vec<_> = gradients.iter().map(Gradient::borrow).collect();
        let (places, begun) = self.begin(&borrowed, &options)?;
        if begun.late.is_some() {
            self.count(&places, &begun);
            return Ok(Later::start(places, begun, options.timeout));
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
        let receipts = self.push_for(caller, gradients, options)?;
        let names: Vec<_> = gradients.iter().map(|g| g.name.clone()).collect();
        Ok((receipts, self.pull(&names, options.timeout, caller)?))
    }

    fn assign(&self, gradient: &Gradient, timeout: Duration) -> Result<Receipt, PushError> {
        let tensor = self.tensor(&gradient.name)?;
        check::check_shape(gradient.borrow(), &tensor.spec)?;
        let values = gradient.values.view();
        check::check_values(self.shared.isa, values, &tensor.spec)?;
        let actions: Vec<(Action, &[u8])> =
            tensor.spec.slices().map(|range| (Action::Assign, values.get(range).bytes())).collect();
        self.change(&tensor, &actions, timeout)
    }

    fn load_state(
        &self,
        name: &str,
        state: &OptimizerState,
        timeout: Duration,
    ) -> Result<Receipt, PushError> {
        let tensor = self.tensor(name)?;
        let bodies = check::state_bodies(&tensor.spec, state)?;
        let actions: Vec<(Action, &[u8])> = bodies
            .iter()
            .zip(&state.steps)
            .map(|(body, step)| (Action::AssignState { step: *step }, body.as_slice()))
            .collect();
        self.change(&tensor, &actions, timeout)
    }
}
