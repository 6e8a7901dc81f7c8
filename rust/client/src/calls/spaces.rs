//! Spaces of vectors at shard 0: opens, closes and lists them, seats coordinators, and waits for batches and
//! portions.

use crate::client::Client;
use crate::link::state::Link;
use crate::link::unary::{Control, call, request};
use crate::state::run::RunNames;
use crate::state::runtime::lock;
use crate::state::time::after;
use fastps_core::batch::BatchTask;
use fastps_core::error::{Error, Kind, Result};
use fastps_core::spaces::{BatchReport, ReplicaAnswer, ReplicaRequest, Seat, SeatRequest, SpaceSpec};
use fastps_core::tensor::{Space, SpaceId};
use fastps_core::verbs::{OpenedSpace, SpaceInfo};
use fastps_proto::v1 as pb;
use fastps_transport::convert::{self, Retry, retry};
use futures_util::future::{join_all, try_join_all};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};
use tonic::{Response, Status};

/// How long to wait for a link's new session.
const SESSION_RENEWAL_PAUSE: Duration = Duration::from_millis(100);
/// Limit on notifying the other shards that a space is closed: one that is not notified asks shard 0.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(5);

/// Makes a call under a session; repeats it while the session is being renewed.
async fn in_session<T, F>(
    link: &Link,
    deadline: Instant,
    send: impl Fn(Control, u64, Duration) -> F,
) -> Result<T>
where
    F: Future<Output = Result<Response<T>, Status>>,
{
    loop {
        match call(link, deadline, |control, left| send(control, link.client(), left)).await {
            Err(error)
                if retry(error.kind) == Retry::Session
                    && Instant::now() + SESSION_RENEWAL_PAUSE < deadline =>
            {
                tokio::time::sleep(SESSION_RENEWAL_PAUSE).await;
            }
            answer => return answer,
        }
    }
}

async fn open(link: &Link, deadline: Instant, ask: &pb::OpenSpaceRequest) -> Result<pb::OpenSpaceResponse> {
    in_session(link, deadline, |mut control, client, left| {
        let ask = pb::OpenSpaceRequest { client, ..ask.clone() };
        async move { control.open_space(request(ask, left)).await }
    })
    .await
}

async fn close(link: &Link, deadline: Instant, space: SpaceId) -> Result<()> {
    in_session(link, deadline, |mut control, client, left| {
        let ask = pb::CloseSpaceRequest { client, space: space.0 };
        async move { control.close_space(request(ask, left)).await }
    })
    .await
    .map(|_| ())
}

/// Closes a space at shard 0, then at the others.
async fn close_all(links: &[Arc<Link>], deadline: Instant, space: SpaceId) -> Result<()> {
    let Some((first, others)) = links.split_first() else { return Ok(()) };
    close(first, deadline, space).await?;
    let soon = deadline.min(after(CLOSE_TIMEOUT));
    for closed in join_all(others.iter().map(|link| close(link, soon, space))).await {
        if let Err(error) = closed {
            tracing::debug!(%error, "a shard was not notified that a space is closed");
        }
    }
    Ok(())
}

/// The report with the tensors' names within the run.
fn here(run: &RunNames, mut report: BatchReport) -> BatchReport {
    for failure in &mut report.failures {
        failure.tensor = run.here(&failure.tensor).map_or_else(|| failure.tensor.clone(), Arc::from);
    }
    report
}

impl Client {
    pub(crate) fn open_space_at_all(
        &self,
        name: &Arc<str>,
        tensors: &[Arc<str>],
        vectors: &[Arc<str>],
        keep_for: Duration,
        deadline: Instant,
    ) -> Result<OpenedSpace> {
        let (_, entries) = self.look_up(tensors.iter(), deadline)?;
        let mut slices = vec![Vec::new(); self.links.len()];
        for (slice, shard) in entries.iter().flat_map(|entry| &entry.slices) {
            slices[*shard].push(slice.0);
        }
        let (run, links) = (self.map.run(), self.links.clone());
        let keep_for_ms = u64::try_from(keep_for.as_millis()).unwrap_or(u64::MAX);
        let ask = pb::OpenSpaceRequest {
            name: run.there(name),
            tensors: tensors.iter().map(|name| run.there(name)).collect(),
            vectors: vectors.iter().map(ToString::to_string).collect(),
            keep_for_ms,
            ..Default::default()
        };
        let opened = self.block(async move {
            let of = |shard: usize, space: u64| pb::OpenSpaceRequest {
                slices: slices[shard].clone(),
                space,
                ..ask.clone()
            };
            let first = open(&links[0], deadline, &of(0, 0)).await?;
            let others = (1..links.len()).filter(|shard| !slices[*shard].is_empty());
            let asked = others.map(|shard| {
                let (link, ask) = (&links[shard], of(shard, first.space));
                async move { open(link, deadline, &ask).await }
            });
            match try_join_all(asked).await {
                Ok(others) => Ok(others.into_iter().fold(first, |all, one| pb::OpenSpaceResponse {
                    term: all.term.max(one.term),
                    last: all.last.max(one.last),
                    ..all
                })),
                Err(error) => {
                    if first.new {
                        close_all(&links, deadline, SpaceId(first.space)).await?;
                    }
                    Err(error)
                }
            }
        })?;
        let pb::OpenSpaceResponse { space, new, term, last } = opened;
        lock(&self.spaces).insert(SpaceId(space), name, tensors);
        let space = Arc::new(Space { id: SpaceId(space), name: name.clone(), vectors: vectors.to_vec() });
        let spec = SpaceSpec { space, tensors: tensors.to_vec(), keep_for_ms };
        Ok(OpenedSpace { spec, new, term, last })
    }

    pub(crate) fn close_space_at_all(&self, space: SpaceId, deadline: Instant) -> Result<()> {
        self.alive()?;
        lock(&self.spaces).remove(space);
        let links = self.links.clone();
        self.block(async move { close_all(&links, deadline, space).await })
    }

    /// The open spaces of the client's run.
    pub(crate) fn list_spaces(&self, deadline: Instant) -> Result<Vec<SpaceInfo>> {
        self.alive()?;
        let (link, run) = (self.links[0].clone(), self.map.run());
        let (mut all, mut after) = (Vec::new(), String::new());
        loop {
            let ask = pb::ListSpacesRequest { after: after.clone() };
            let link = link.clone();
            let page: pb::ListSpacesResponse = self.block(async move {
                call(&link, deadline, |mut control: Control, left| {
                    let ask = ask.clone();
                    async move { control.list_spaces(request(ask, left)).await }
                })
                .await
            })?;
            let here = |mut entry: pb::SpaceEntry| {
                entry.name = run.here(&entry.name)?;
                entry.tensors = entry.tensors.iter().map(|name| run.here(name)).collect::<Option<_>>()?;
                Some(convert::space_from_wire(entry))
            };
            all.extend(page.spaces.into_iter().filter_map(here));
            if page.next.is_empty() {
                return Ok(all);
            }
            if page.next <= after {
                return Err(Error::new(Kind::Frame, "bad spaces from the server: their pages do not end"));
            }
            after = page.next;
        }
    }

    /// The tensors of a space.
    pub(crate) fn tensors_of(&self, space: SpaceId, deadline: Instant) -> Result<Arc<[Arc<str>]>> {
        let known = || lock(&self.spaces).tensors(space);
        if let Some(tensors) = known() {
            return Ok(tensors);
        }
        for info in self.list_spaces(deadline)? {
            lock(&self.spaces).insert(info.spec.space.id, &info.spec.space.name, &info.spec.tensors);
        }
        known()
            .ok_or_else(|| Error::new(Kind::Config, "no such space is open: it was closed, or never opened"))
    }

    pub(crate) fn ask_for_seat(
        &self,
        space: SpaceId,
        wanted: &SeatRequest,
        deadline: Instant,
    ) -> Result<Seat> {
        self.alive()?;
        self.has_portions.store(true, Ordering::Relaxed);
        let (link, wanted) = (self.links[0].clone(), wanted.clone());
        let answer = self.block(async move {
            in_session(&link, deadline, |mut control, client, left| {
                let ask = convert::seat_request_to_wire(client, space, &wanted);
                async move { control.coordinate(request(ask, left)).await }
            })
            .await
        })?;
        Ok(Seat { term: answer.term, state: answer.state[..].into() })
    }

    /// Asks for a batch; the server may delay the answer for `wait`, and half of the time that is left.
    pub(crate) fn ask_for_batch(
        &self,
        (space, term): (SpaceId, u64),
        task: &BatchTask,
        wait: Duration,
        deadline: Instant,
    ) -> Result<BatchReport> {
        self.alive()?;
        let (link, task) = (self.links[0].clone(), convert::batch_to_wire(task));
        let report = self.block(async move {
            let (mut report, mut first, mut was_over) = (BatchReport::default(), 0, false);
            loop {
                let wait = if first == 0 { wait } else { Duration::ZERO };
                let page = in_session(&link, deadline, |mut control, client, left| {
                    let wait_ms = u32::try_from(wait.min(left / 2).as_millis()).unwrap_or(u32::MAX);
                    let (space, task) = (space.0, Some(task));
                    let ask = pb::BatchRequest { client, space, term, task, wait_ms, first };
                    async move { control.batch(request(ask, left)).await }
                });
                let next = convert::report_from_wire(page.await?, &mut report)?;
                if first > 0 && report.over != was_over {
                    // The batch has ended since the first page.
                    (report, first) = (BatchReport::default(), 0);
                    continue;
                }
                was_over = report.over;
                match next {
                    Some(next) => first = next,
                    None => return Ok(report),
                }
            }
        })?;
        Ok(here(self.map.run(), report))
    }

    /// Reports a replica's portion and asks for the next one; the server may delay the answer for `wait`, and
    /// half of the time that is left.
    pub(crate) fn ask_for_batch_portion(
        &self,
        asked: &ReplicaRequest,
        wait: Duration,
        deadline: Instant,
    ) -> Result<ReplicaAnswer> {
        self.alive()?;
        self.has_portions.store(true, Ordering::Relaxed);
        let (link, name) = (self.links[0].clone(), asked.space.clone());
        let known = lock(&self.spaces).newest(&name);
        let there = ReplicaRequest { space: self.map.run().there(&name).into(), ..self.there(asked) };
        let answer = self.block(async move {
            in_session(&link, deadline, |mut control, client, left| {
                let ask = convert::replica_to_wire(&there, client, known, wait.min(left / 2));
                async move { control.batch_portion(request(ask, left)).await }
            })
            .await
        })?;
        let Some(mut given) = convert::given_portion_from_wire(answer)? else { return Ok(None) };
        if known == Some(given.space) {
            given.tensors = self.tensors_of(given.space, deadline)?.to_vec();
        } else {
            let here = |name: &Arc<str>| self.map.run().here(name).map(Arc::from);
            let foreign = || Error::new(Kind::Frame, "the space has tensors of another run");
            given.tensors = given.tensors.iter().map(here).collect::<Option<_>>().ok_or_else(foreign)?;
            lock(&self.spaces).insert(given.space, &name, &given.tensors);
        }
        Ok(Some(given))
    }

    /// The request with the tensors' full names.
    fn there(&self, asked: &ReplicaRequest) -> ReplicaRequest {
        let mut there = asked.clone();
        if let Some(Err((_, tensor))) = there.report.as_mut().map(|report| &mut report.outcome)
            && !tensor.is_empty()
        {
            *tensor = self.map.run().there(tensor).into();
        }
        there
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use fastps_core::batch::{FailureKind, PortionFailure};

    #[test]
    fn failures_name_tensors_as_users_know_them() {
        let report = |tensors: [&str; 2]| {
            let failure = |tensor: &str| PortionFailure {
                replica: "r".into(),
                portion: 0,
                kind: FailureKind::NotFinite,
                tensor: tensor.into(),
            };
            BatchReport { failures: tensors.map(failure).into(), ..BatchReport::default() }
        };
        let run = RunNames::new(Some("a")).unwrap();
        // A loss that is not finite has no name.
        assert_eq!(here(&run, report(["run:a/w", ""])), report(["w", ""]));
        assert_eq!(here(&RunNames::default(), report(["w", ""])), report(["w", ""]));
    }
}
