//! Asks shard 0, which owns the list of registered tensors, about reservations (`SettleRequest`), groups
//! and spaces.

use crate::auth::scope::Scope;
use crate::cluster::map::Map;
use crate::cluster::node::Node;
use crate::cluster::node::owners::{KnownOwners, OwnerRecords};
use crate::cluster::peers::Peers;
use fastps_core::error::{Error, Kind, Result};
use fastps_core::portions::Portions;
use fastps_core::tensor::SpaceId;
use fastps_core::verbs::SpaceInfo;
use fastps_proto::v1 as pb;
use fastps_proto::v1::control_client::ControlClient;
use fastps_transport::convert;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};
use tonic::transport::Channel;
use tonic::{Request, Response, Status};

/// Retry delay of a call that depends on shard 0.
const RETRY_AFTER_MS: u64 = 500;
/// Least time between two looks at the record of shard 0's owner while that does not answer, and limit of one.
const LOOK_INTERVAL: Duration = Duration::from_secs(1);
const LOOK_TIMEOUT: Duration = Duration::from_secs(2);
/// Likely cause when TLS refuses.
const SERVERS_TRUST: &str = "servers trust the CAs of --tls-ca or, without it, those behind their own \
                             certificate in --tls-cert, and check the name of shard 0 in --cluster";
/// Likely cause when shard 0 does not know the caller.
const SERVERS_PROVE: &str = "servers show a certificate of role server (fastps certs issue --server) or, with \
                             --tokens, a token of that role in --server-token-file";

/// Shard 0, as a shard reaches it.
#[derive(Debug)]
pub(crate) enum Coordinator {
    /// The shard is it.
    Own(Box<OwnCoordinator>),
    /// It is in this process.
    Local(Arc<Node>),
    Remote(Box<RemoteCoordinator>),
}

/// What shard 0 alone has.
#[derive(Debug)]
pub(crate) struct OwnCoordinator {
    pub(crate) map: Mutex<Map>,
    /// The portions of samples.
    pub(crate) portions: Mutex<Portions>,
    /// Who owns the shards, if their servers have records of that.
    pub(crate) owners: Option<Arc<KnownOwners>>,
}

/// A shard 0 that is reached over the network.
#[derive(Debug)]
pub(crate) struct RemoteCoordinator {
    peers: Peers,
    place: Mutex<Place>,
    /// Where the record of its owner lies, if its servers have one.
    records: Option<OwnerRecords>,
}

/// Where shard 0 is.
#[derive(Debug)]
struct Place {
    address: String,
    /// The connection, once there is one.
    channel: Option<Channel>,
    /// When the record was read last.
    looked: Option<Instant>,
}

impl RemoteCoordinator {
    fn place(&self) -> MutexGuard<'_, Place> {
        self.place.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn channel(&self) -> Result<(Channel, String)> {
        let Place { address, channel, .. } = &mut *self.place();
        if channel.is_none() {
            *channel = Some(self.peers.channel(address)?);
        }
        let channel = channel.clone().ok_or_else(|| Error::new(Kind::Internal, "no connection"))?;
        Ok((channel, address.clone()))
    }

    /// One call, and another one if the owner's record names another address than that which does not answer.
    async fn call<Q: Clone, A>(
        &self,
        message: Q,
        send: impl AsyncFn(ControlClient<Channel>, Request<Q>) -> Result<Response<A>, Status>,
    ) -> Result<A> {
        let (channel, address) = self.channel()?;
        let answer = self.peers.call(channel, &address, message.clone(), &send).await;
        let is_away =
            |error: &Error| matches!(error.kind, Kind::Connection | Kind::Deadline | Kind::Unavailable);
        if !answer.as_ref().is_err_and(is_away) || !self.has_moved(&address).await {
            return answer;
        }
        let (channel, address) = self.channel()?;
        self.peers.call(channel, &address, message, &send).await
    }

    /// Returns whether the owner of shard 0 is elsewhere, and goes on there.
    async fn has_moved(&self, from: &str) -> bool {
        let Some(OwnerRecords(ask)) = &self.records else { return false };
        {
            let mut place = self.place();
            if place.address != from {
                return true;
            }
            if place.looked.is_some_and(|looked| looked.elapsed() < LOOK_INTERVAL) {
                return false;
            }
            place.looked = Some(Instant::now());
        }
        let Ok(Some(pb::ShardOwner { address, .. })) = tokio::time::timeout(LOOK_TIMEOUT, ask(0)).await
        else {
            return false;
        };
        if address == from {
            return false;
        }
        tracing::info!(from, to = address, "shard 0 has moved");
        let mut place = self.place();
        (place.address, place.channel) = (address, None);
        true
    }

    async fn ask(&self, question: pb::SettleRequest) -> Result<pb::SettleResponse> {
        self.call(question, async |mut control: ControlClient<Channel>, ask| control.settle(ask).await).await
    }
}

impl Coordinator {
    /// Shard 0 of these nodes of the process or, without it, of the cluster.
    pub(crate) fn of_others(
        nodes: &[Arc<Node>],
        cluster: &[String],
        peers: Peers,
        records: Option<OwnerRecords>,
    ) -> Self {
        if let Some(first) = nodes.iter().find(|node| node.is_coordinator()) {
            return Self::Local(first.clone());
        }
        let address = cluster.first().cloned().unwrap_or_default();
        let place = Mutex::new(Place { address, channel: None, looked: None });
        Self::Remote(Box::new(RemoteCoordinator { peers, place, records }))
    }

    /// What this shard has as shard 0.
    pub(crate) fn own(&self) -> Option<&OwnCoordinator> {
        match self {
            Self::Own(own) => Some(own),
            Self::Local(_) | Self::Remote(_) => None,
        }
    }
}

impl Node {
    /// Asks shard 0, local or remote.
    pub(crate) async fn ask_coordinator(&self, question: pb::SettleRequest) -> Result<pb::SettleResponse> {
        let answer = self.ask_for_list(question).await?;
        self.hear(answer.cluster_id)?;
        Ok(answer)
    }

    /// Asks shard 0 without checking the cluster's identity.
    pub(crate) async fn ask_for_list(&self, question: pb::SettleRequest) -> Result<pb::SettleResponse> {
        match &self.coordinator {
            Coordinator::Own(_) => self.answer_settle(&question),
            Coordinator::Local(first) => {
                first.check_serving()?;
                first.files.check_steps()?;
                let answer = first.answer_settle(&question)?;
                first.files.safe_to(first.files.steps()).await?;
                Ok(answer)
            }
            Coordinator::Remote(first) => first.ask(question).await,
        }
    }

    /// Removes a tensor at shard 0. Returns the shards that may still store its slices.
    pub(crate) async fn unregister_at_coordinator(&self, name: &str) -> Result<pb::Placement> {
        let first = match &self.coordinator {
            Coordinator::Own(_) => self,
            Coordinator::Local(first) => first,
            Coordinator::Remote(first) => {
                let ask = pb::UnregisterRequest { name: name.to_owned() };
                let send = async |mut control: ControlClient<Channel>, ask| control.unregister(ask).await;
                let removed = first.call(ask, send);
                return Ok(removed.await?.placement.unwrap_or_default());
            }
        };
        first.check_no_space(name)?;
        let placement = first.map()?.unregister(name, Instant::now(), &Scope::Everything)?;
        first.files.safe_to(first.files.steps()).await?;
        Ok(placement)
    }

    /// Frees slices that no tensor of the map has, at another shard.
    pub(crate) async fn drop_at(&self, shard: u32, slices: Vec<u64>) -> Result<()> {
        let address = self.cluster.get(shard as usize).map_or("", String::as_str);
        let ask = pb::DropRequest { slices };
        let send = async |mut control: ControlClient<Channel>, ask| control.drop(ask).await;
        let peers = &self.security.peers;
        peers.call(peers.channel(address)?, address, ask, send).await.map(|_| ())
    }

    /// Asks for a waiting client. A refusal of this server is final, so the client is not asked to retry.
    pub(crate) async fn ask_coordinator_for(
        &self,
        question: pb::SettleRequest,
    ) -> Result<pb::SettleResponse> {
        self.ask_coordinator(question).await.map_err(|error| self.unanswered(&error))
    }

    /// Logs why shard 0 does not answer; the error for a client that waits for it.
    pub(crate) fn unanswered(&self, error: &Error) -> Error {
        tracing::warn!(shard = self.index(), %error, "shard 0 does not answer");
        let why = format!("shard {} cannot ask shard 0: {error}", self.index());
        match error.kind {
            Kind::Unauthenticated => Error::new(Kind::Denied, format!("{why}; {SERVERS_PROVE}")),
            // A handler of shard 0 refuses; otherwise TLS does.
            Kind::Denied if error.shard.is_some() => {
                Error::new(Kind::Denied, format!("{why}; {SERVERS_PROVE}"))
            }
            Kind::Denied => Error::new(Kind::Denied, format!("{why}; {SERVERS_TRUST}")),
            _ => Error::new(Kind::Unavailable, why).retry_after_ms(RETRY_AFTER_MS),
        }
    }

    /// Shard 0's answer.
    pub(crate) fn answer_settle(&self, question: &pb::SettleRequest) -> Result<pb::SettleResponse> {
        let mut map = self.map()?;
        let mut answer = map.settle(&question.reservations, question.abandon, Instant::now());
        answer.registration = map.registration(question.describe);
        answer.registrations = map.registrations(&question.describe_each);
        answer.groups = question.groups.iter().copied().filter(|group| map.has_group(*group)).collect();
        answer.closed_spaces = self.closed_of(&question.spaces)?;
        if question.describe_space != 0 {
            answer.space = self
                .spaces()?
                .spec(SpaceId(question.describe_space))
                .ok()
                .map(|spec| convert::space_to_wire(&SpaceInfo { spec, coordinator: None }));
        }
        answer.seat = question.seat.as_ref().map(|claim| self.judge(claim)).transpose()?;
        answer.binding = (question.binding_of != 0).then(|| {
            let mode = self.shard.groups().mode(question.binding_of);
            let group = map.group_name(question.binding_of).map_or_else(String::new, |name| name.to_string());
            pb::Binding { mode: mode.map(convert::mode_to_wire), group }
        });
        answer.cluster_id = self.membership.id();
        if let Some(shard) = question.listed_on {
            (answer.listed, answer.next) = map.listed_on(shard, &question.after);
        }
        Ok(answer)
    }
}
