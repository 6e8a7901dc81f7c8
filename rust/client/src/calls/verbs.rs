//! Implements the core's verbs, each in a few lines over the other modules.

use crate::calls::pull::{PullTicket, rounded, versions};
use crate::calls::receipts::{PushTicket, names, pushed};
use crate::calls::sparse::{Scatter, in_order};
use crate::client::Client;
use crate::link::call::payload::Payload;
use crate::link::refresh::NAMES_ASKED;
use crate::link::state::Link;
use crate::link::unary::{call, request};
use crate::link::wait::CallHandle;
use crate::state::map::Entry;
use crate::state::time::after;
use fastps_core::error::{Error, Kind, Lost, Result};
use fastps_core::mode::{Clocks, Joined, MembershipRequest};
use fastps_core::outgoing;
use fastps_core::portions::{Ask, PortionAnswer};
use fastps_core::sparse::Plan;
use fastps_core::tensor::TensorSpec;
use fastps_core::verbs::{
    Caller, Gradient, Listener, NewTensor, OptimizerState, ParameterServer, Patient, PullOptions,
    PullTensors, Pulled, PushError, PushOptions, PushTensors, Pushed, Receipt, Rows, Stats, TensorRegistry,
    Ticket, TrainTogether, Versions, WorkerReport,
};
use fastps_proto::v1 as pb;
use fastps_transport::convert::{self, Read};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

impl Client {
    /// A shard's counters, and the time of these tensors' last changes there.
    fn ask_stats(
        &self,
        link: &Arc<Link>,
        changed: Vec<String>,
        deadline: Instant,
    ) -> Result<pb::StatsResponse> {
        let link = link.clone();
        self.block(async move {
            let asked = pb::StatsRequest { changed };
            let ask = |mut client: pb::control_client::ControlClient<_>, left| {
                let asked = asked.clone();
                async move { client.stats(request(asked, left)).await }
            };
            call(&link, deadline, ask).await
        })
    }

    /// Waits for a call. If its caller leaves, the call continues in the background.
    pub(crate) fn finish(&self, call: &CallHandle, caller: &mut dyn Caller) -> Result<()> {
        if call.wait(Duration::MAX, Some(caller))? {
            return Ok(());
        }
        self.leave_alone(call);
        Err(Error::new(Kind::Internal, "the caller no longer waits"))
    }

    /// Leaves a call to the background.
    fn leave_alone(&self, call: &CallHandle) {
        self.deadlines.watch(&call.call);
        self.driver.nudge();
    }

    fn one(receipts: Pushed) -> Result<Receipt, PushError> {
        receipts?.pop().ok_or_else(|| Error::new(Kind::Internal, "an assignment without a receipt").into())
    }
}

impl TensorRegistry for Client {
    fn register_all(&self, tensors: Vec<NewTensor<'_>>, timeout: Duration) -> Result<()> {
        self.register_tensors(tensors, timeout)
    }

    fn unregister(&self, name: &str, timeout: Duration) -> Result<()> {
        self.unregister_tensor(name, timeout)
    }

    fn spec(&self, name: &str, timeout: Duration) -> Result<Arc<TensorSpec>> {
        let name: Arc<str> = name.into();
        let (_, entries) = self.look_up(std::iter::once(&name), after(timeout))?;
        let entry = entries.first().ok_or_else(|| Error::new(Kind::Internal, "a tensor without an entry"))?;
        Ok(entry.spec.clone())
    }

    fn doubt_specs(&self) {
        self.doubt();
    }

    fn names(&self, timeout: Duration) -> Result<Vec<Arc<str>>> {
        self.alive()?;
        self.shared.lost.raise()?;
        self.refresh(Vec::new(), after(timeout))?;
        Ok(self.map.names())
    }

    fn last_changes(&self, names: &[Arc<str>], timeout: Duration) -> Result<Vec<Option<Duration>>> {
        self.alive()?;
        let deadline = after(timeout);
        let mut last = vec![None; names.len()];
        for (names, last) in names.chunks(NAMES_ASKED).zip(last.chunks_mut(NAMES_ASKED)) {
            let there: Vec<_> = names.iter().map(|name| self.map.run().there(name)).collect();
            for link in self.links.iter() {
                let changed = self.ask_stats(link, there.clone(), deadline)?.changed_ms_ago;
                for (name, last) in there.iter().zip(last.iter_mut()) {
                    let ago = changed.get(name).map(|ms| Duration::from_millis(*ms));
                    *last = (*last).into_iter().chain(ago).min();
                }
            }
        }
        Ok(last)
    }
}

impl PushTensors for Client {
    fn push_for(&self, caller: &mut dyn Caller, gradients: &[Gradient], options: &PushOptions) -> Pushed {
        let call = self.start_push(gradients, options, None)?;
        self.finish(&call, caller)?;
        pushed(&self.shared, &call, &names(gradients))
    }

    fn push_async(&self, gradients: Vec<Gradient>, options: PushOptions) -> Result<Arc<dyn Ticket<Pushed>>> {
        let ticket = self.begin_push(gradients, options)?;
        self.driver.nudge();
        Ok(ticket)
    }

    fn begin_push(&self, gradients: Vec<Gradient>, options: PushOptions) -> Result<Arc<dyn Ticket<Pushed>>> {
        let call = self.start_push(&gradients, &options, None)?;
        self.deadlines.watch(&call.call);
        Ok(Arc::new(PushTicket { shared: self.shared.clone(), call, names: names(&gradients) }))
    }

    fn push_pull(
        &self,
        gradients: &[Gradient],
        options: &PushOptions,
        caller: &mut dyn Caller,
    ) -> Result<(Vec<Receipt>, Versions), PushError> {
        let id = self.versions_id();
        let call = self.start_push(gradients, options, Some(caller))?;
        self.finish(&call, caller)?;
        Ok((pushed(&self.shared, &call, &names(gradients))?, versions(&call, id)))
    }

    fn assign_all(&self, values: &[Gradient], timeout: Duration) -> Pushed {
        let call = self.start_assign_all(values, timeout)?;
        call.wait(Duration::MAX, None)?;
        pushed(&self.shared, &call, &names(values))
    }

    fn load_state(
        &self,
        name: &str,
        state: &OptimizerState,
        timeout: Duration,
    ) -> Result<Receipt, PushError> {
        let name: Arc<str> = name.into();
        let (epoch, entries, bodies) =
            self.look_up_for(std::iter::once(&name), after(timeout), |entries| {
                outgoing::state_bodies(&entries[0].spec, state)
            })?;
        let entry = &entries[0];
        let assign = |(body, step): (Vec<u8>, &u64)| (Some(*step), Payload::Owned(body.into()));
        let bodies = bodies.into_iter().zip(&state.steps).map(assign).collect();
        let call = self.start_assign(entry, bodies, Vec::new(), epoch, timeout);
        call.wait(Duration::MAX, None)?;
        Self::one(pushed(&self.shared, &call, std::slice::from_ref(&entry.spec.name)))
    }
}

impl PullTensors for Client {
    fn pull_as(
        &self,
        names: &[Arc<str>],
        options: &PullOptions,
        timeout: Duration,
        caller: &mut dyn Caller,
    ) -> Result<Versions> {
        let deadline = after(timeout);
        let (epoch, entries) = self.look_up(names.iter(), deadline)?;
        let id = self.versions_id();
        let (call, rounds) = self.doubted(self.start_pull_as(&entries, epoch, options, deadline))?;
        self.finish_pull(&call, &mut rounded(rounds, options, &entries, caller)?)?;
        Ok(versions(&call, id))
    }

    fn pull_rows(&self, rows: &[Rows], timeout: Duration, caller: &mut dyn Caller) -> Result<Versions> {
        let deadline = after(timeout);
        let plan = |(entry, rows): (&Arc<Entry>, &Rows)| Plan::new(&entry.spec, &rows.indices);
        let (epoch, entries) = self.look_up(rows.iter().map(|rows| &rows.name), deadline)?;
        let plans = self.doubted(entries.iter().zip(rows).map(plan).collect::<Result<Vec<_>>>())?;
        let id = self.versions_id();
        let call = self.start_pull_rows(&entries, &plans, epoch, deadline);
        self.finish_pull(&call, &mut Scatter { plans: &plans, caller })?;
        Ok(in_order(versions(&call, id), rows))
    }

    fn pull_async_as(
        &self,
        names: Vec<Arc<str>>,
        options: PullOptions,
        timeout: Duration,
    ) -> Result<Arc<dyn Ticket<Result<Pulled>>>> {
        let deadline = after(timeout);
        let (epoch, entries) = self.look_up(names.iter(), deadline)?;
        let client = self.versions_id();
        let (call, rounds) = self.doubted(self.start_pull_as(&entries, epoch, &options, deadline))?;
        self.leave_alone(&call);
        Ok(Arc::new(PullTicket {
            shared: self.shared.clone(),
            call,
            client,
            options,
            rounds,
            entries,
            taken: Mutex::new(false),
        }))
    }

    fn state(&self, name: &str, timeout: Duration) -> Result<OptimizerState> {
        let deadline = after(timeout);
        let name: Arc<str> = name.into();
        let (epoch, entries) = self.look_up(std::iter::once(&name), deadline)?;
        self.pull_state(&entries[0], epoch, deadline)
    }

    fn versions(&self, names: &[Arc<str>], timeout: Duration) -> Result<Versions> {
        let deadline = after(timeout);
        let (epoch, entries) = self.look_up(names.iter(), deadline)?;
        let id = self.versions_id();
        let call = self.start_pull(&entries, epoch, (Read::Version, &[]), deadline);
        self.finish_pull(&call, &mut Patient)?;
        Ok(versions(&call, id))
    }
}

impl TrainTogether for Client {
    fn join(&self, group: &str, seat: &MembershipRequest, timeout: Duration) -> Result<Joined> {
        self.join_group(group, seat, timeout)
    }

    fn leave(&self, group: &str, warm: bool, timeout: Duration) -> Result<()> {
        self.leave_group(group, warm, timeout)
    }

    fn advance(&self, group: &str, warm: bool, steps: u64, timeout: Duration) -> Result<Clocks> {
        self.advance_in(group, warm, steps, timeout)
    }

    fn listen(&self, name: &Arc<str>, at: &Versions, timeout: Duration) -> Result<Listener> {
        self.listen_for_quorum(name, at, timeout)
    }

    fn portion(&self, ask: &Ask, wait: Duration, timeout: Duration) -> Result<PortionAnswer> {
        self.ask_for_portion(ask, wait, timeout)
    }
}

impl ParameterServer for Client {
    fn client(&self) -> u64 {
        self.shared.client
    }

    fn another(&self) -> Result<Arc<dyn ParameterServer>> {
        self.another_within(None, self.options.timeout)
    }

    fn another_within(&self, name: Option<&str>, timeout: Duration) -> Result<Arc<dyn ParameterServer>> {
        Ok(self.again(name, timeout)?)
    }

    fn stats(&self, timeout: Duration) -> Result<Stats> {
        self.alive()?;
        let deadline = after(timeout);
        let mut stats = Stats { client: self.shared.counters.list(), ..Stats::default() };
        for link in self.links.iter() {
            let answer = self.ask_stats(link, Vec::new(), deadline)?;
            let mut counters: Vec<_> = answer.counters.into_iter().collect();
            counters.sort();
            stats.shards.push((link.address(), counters));
            if link.shard() == 0 {
                stats.workers = answer.sessions.into_iter().map(convert::worker_state_from_wire).collect();
                stats.groups = answer.groups.into_iter().map(convert::group_state_from_wire).collect();
            }
        }
        Ok(stats)
    }

    fn mark(&self, name: &str, timeout: Duration) -> Result<()> {
        self.mark_moment(name, timeout)
    }

    fn report(&self, report: WorkerReport) -> Result<()> {
        report.check()?;
        self.is_open()?;
        self.shared.report.set(report);
        Ok(())
    }

    fn lost(&self) -> Vec<Lost> {
        self.shared.lost.ask()
    }

    fn has_lost(&self) -> bool {
        self.shared.lost.any()
    }

    fn known_tensors(&self) -> usize {
        self.map.names().len()
    }

    fn transport(&self) -> Vec<(String, String)> {
        self.links.iter().map(|link| (link.address(), link.route().present())).collect()
    }

    fn close(&self, within: Duration) {
        let end = after(within);
        self.leave_portions(within);
        self.shut(end.saturating_duration_since(Instant::now()));
    }
}
