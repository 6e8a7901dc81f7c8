//! The steps of a registration, for many tensors at a time: pages of tensors, and all shards at the same time.
//! Servers without the capability `registrations` get one tensor at a time.

use crate::client::Client;
use crate::link::state::Link;
use crate::link::unary::{call, request};
use crate::state::map::Entry;
use fastps_core::dtype::View;
use fastps_core::error::{Error, Kind, Result};
use fastps_core::tensor::TensorSpec;
use fastps_proto::v1 as pb;
use fastps_transport::convert::{self, MAX_RESERVATIONS, Retry, retry};
use futures_util::future::try_join_all;
use std::collections::HashSet;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

/// How long to wait for a link's new session.
const SESSION_RENEWAL_PAUSE: Duration = Duration::from_millis(100);

/// A tensor to be registered, also as the servers name it.
pub(crate) struct Wanted<'a> {
    pub(crate) spec: Arc<TensorSpec>,
    pub(crate) there: pb::TensorSpec,
    pub(crate) values: View<'a>,
    /// Its message bytes, which divide a registration into pages.
    bytes: usize,
}

impl<'a> Wanted<'a> {
    pub(crate) fn new(spec: TensorSpec, there: pb::TensorSpec, values: View<'a>) -> Self {
        let bytes = convert::registered_bytes(&there, spec.slice_count());
        Self { spec: Arc::new(spec), there, values, bytes }
    }
}

/// A tensor that has places and is not committed.
#[derive(Clone, Debug)]
pub(crate) struct Placed {
    /// Its index among those wanted.
    pub(crate) wanted: usize,
    pub(crate) reservation: u64,
    pub(crate) entry: Arc<Entry>,
}

impl Placed {
    fn is_on(&self, shard: usize) -> bool {
        self.entry.slices.iter().any(|(_, place)| *place == shard)
    }
}

/// Outcome of the first step for several tensors.
#[derive(Debug, Default)]
pub(crate) struct Places {
    pub(crate) placed: Vec<Placed>,
    /// Those that exist.
    pub(crate) exist: Vec<usize>,
    /// The first that another client registers, and when to ask again.
    pub(crate) under_way: Option<(usize, Duration)>,
}

/// Reservations that are sealed already, by shard.
pub(crate) type Sealed = HashSet<(usize, u64)>;

impl Client {
    /// Most tensors that are registered together.
    pub(crate) fn most_registered(&self) -> usize {
        let can = self.links.iter().all(|link| link.registrations.load(Ordering::Relaxed));
        if can { MAX_RESERVATIONS } else { 1 }
    }

    /// First step, at shard 0: places for `open`, some of those wanted. Repeats renew what is placed.
    pub(crate) fn place(
        &self,
        wanted: &[Wanted<'_>],
        open: &[usize],
        places: &mut Places,
        deadline: Instant,
    ) -> Result<()> {
        for page in convert::pages(open.iter().map(|k| wanted[*k].bytes)) {
            let page = &open[page];
            let answers = self.ask_places(wanted, page, deadline)?;
            for (k, answer) in page.iter().zip(answers) {
                if answer.exists {
                    places.exist.push(*k);
                } else if answer.under_way {
                    let pause = Duration::from_millis(u64::from(answer.retry_after_ms.max(1)));
                    places.under_way.get_or_insert((*k, pause));
                } else {
                    let spec = wanted[*k].spec.clone();
                    let entry = Entry::new(spec, answer.placement.as_ref(), self.links.len())?;
                    places.placed.push(Placed { wanted: *k, reservation: answer.reservation, entry });
                }
            }
        }
        Ok(())
    }

    /// Asks for the places of one page.
    fn ask_places(
        &self,
        wanted: &[Wanted<'_>],
        page: &[usize],
        deadline: Instant,
    ) -> Result<Vec<pb::RegisterResponse>> {
        let link = self.links[0].clone();
        let mut ask = pb::RegisterRequest::default();
        match page {
            [one] => ask.spec = Some(wanted[*one].there.clone()),
            several => ask.specs = several.iter().map(|k| wanted[*k].there.clone()).collect(),
        }
        let is_one = ask.spec.is_some();
        let mut answer = self.block(async move {
            loop {
                let ask = pb::RegisterRequest { client: link.client(), ..ask.clone() };
                let answer = call(&link, deadline, |mut client, left| {
                    let ask = ask.clone();
                    async move { client.register(request(ask, left)).await }
                })
                .await;
                match answer {
                    // The session ended while we were suspended; the link is about to open a new one.
                    Err(error)
                        if retry(error.kind) == Retry::Session
                            && Instant::now() + SESSION_RENEWAL_PAUSE < deadline =>
                    {
                        tokio::time::sleep(SESSION_RENEWAL_PAUSE).await;
                    }
                    answer => return answer,
                }
            }
        })?;
        let outcomes = std::mem::take(&mut answer.outcomes);
        let outcomes = if is_one { vec![answer] } else { outcomes };
        if outcomes.len() == page.len() {
            return Ok(outcomes);
        }
        let error =
            Error::new(Kind::Frame, "bad answer from the server: an outcome for each tensor is missing");
        Err(error.shard(0).expected(page.len(), outcomes.len()))
    }

    /// Second step: takes the memory on all shards. Returns what is sealed already.
    pub(crate) fn reserve(
        &self,
        wanted: &[Wanted<'_>],
        placed: &[Placed],
        deadline: Instant,
    ) -> Result<Sealed> {
        let shards = self.links.iter().enumerate().map(|(shard, link)| {
            let here: Vec<_> = placed.iter().filter(|placed| placed.is_on(shard)).collect();
            let pages = convert::pages(here.iter().map(|placed| wanted[placed.wanted].bytes));
            let requests: Vec<_> =
                pages.into_iter().map(|page| reservations(wanted, &here[page], shard)).collect();
            let link = link.clone();
            async move {
                let mut sealed = Vec::new();
                for ask in requests {
                    sealed
                        .extend(reserve_page(&link, ask, deadline).await?.into_iter().map(|id| (shard, id)));
                }
                Ok::<_, Error>(sealed)
            }
        });
        let sealed = self.block(try_join_all(shards.collect::<Vec<_>>()))?;
        Ok(sealed.into_iter().flatten().collect())
    }

    /// Third step: confirms on all shards that the values are there.
    pub(crate) fn seal(&self, placed: &[Placed], deadline: Instant) -> Result<()> {
        let shards = self.links.iter().enumerate().filter_map(|(shard, link)| {
            let here: Vec<_> = placed.iter().filter(|placed| placed.is_on(shard)).collect();
            let (reservation, reservations) = numbers(here.iter().map(|placed| placed.reservation))?;
            let (ask, link) = (pb::SealRequest { reservation, reservations }, link.clone());
            Some(async move {
                let sealed: pb::SealResponse = call(&link, deadline, |mut client, left| {
                    let ask = ask.clone();
                    async move { client.seal(request(ask, left)).await }
                })
                .await?;
                Ok(sealed.refused)
            })
        });
        let refused = self.block(try_join_all(shards.collect::<Vec<_>>()))?;
        refused.into_iter().flatten().next().map_or(Ok(()), |refused| Err(named(refused, placed)))
    }

    /// Last step, at shard 0: the tensors exist from here on.
    pub(crate) fn commit(&self, placed: &[Placed], deadline: Instant) -> Result<()> {
        let Some((reservation, reservations)) = numbers(placed.iter().map(|placed| placed.reservation))
        else {
            return Ok(());
        };
        let link = self.links[0].clone();
        let committed: pb::CommitResponse = self.block(async move {
            let ask = pb::CommitRequest { reservation, client: link.client(), reservations };
            call(&link, deadline, |mut client, left| {
                let ask = ask.clone();
                async move { client.commit(request(ask, left)).await }
            })
            .await
        })?;
        committed.refused.map_or(Ok(()), |refused| Err(named(refused, placed)))
    }
}

/// The reservations of a step, in the fields for one and for several; `None`: there is none.
fn numbers(reservations: impl Iterator<Item = u64>) -> Option<(u64, Vec<u64>)> {
    let all: Vec<_> = reservations.collect();
    match all[..] {
        [] => None,
        [one] => Some((one, Vec::new())),
        _ => Some((0, all)),
    }
}

/// A request for a shard's slices of these tensors.
fn reservations(wanted: &[Wanted<'_>], page: &[&Placed], shard: usize) -> pb::ReserveRequest {
    let one = |placed: &&Placed| {
        let here = |(_, (_, place)): &(usize, &(_, usize))| *place == shard;
        let slices = placed.entry.slices.iter().enumerate().filter(here);
        let (indices, slices) = slices.map(|(k, (slice, _))| (k as u64, slice.0)).unzip();
        let spec = Some(wanted[placed.wanted].there.clone());
        pb::Reservation { reservation: placed.reservation, spec, slices, indices, group: placed.entry.group }
    };
    let mut all: Vec<_> = page.iter().map(one).collect();
    if all.len() > 1 {
        return pb::ReserveRequest { reservations: all, ..Default::default() };
    }
    let pb::Reservation { reservation, spec, slices, indices, group } = all.pop().unwrap_or_default();
    pb::ReserveRequest { reservation, spec, slices, indices, group, ..Default::default() }
}

/// Reserves one page. Returns the reservations that are sealed already.
async fn reserve_page(link: &Link, mut ask: pb::ReserveRequest, deadline: Instant) -> Result<Vec<u64>> {
    ask.client = link.client();
    let reserved: pb::ReserveResponse = call(link, deadline, |mut client, left| {
        let ask = ask.clone();
        async move { client.reserve(request(ask, left)).await }
    })
    .await?;
    let one = (ask.reservations.is_empty() && reserved.lease_ms == 0).then_some(ask.reservation);
    Ok(reserved.sealed.into_iter().chain(one).collect())
}

/// The error of a refused reservation, with the name of its tensor.
fn named(refused: pb::RefusedReservation, placed: &[Placed]) -> Error {
    let error = convert::error_from_refusal(refused.refusal.unwrap_or_default());
    match placed.iter().find(|placed| placed.reservation == refused.reservation) {
        Some(placed) => error.tensor(placed.entry.spec.name.clone()),
        None => error,
    }
}
