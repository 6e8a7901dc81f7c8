//! Spaces of vectors on one shard: shard 0 lists them, the others ask it.

use crate::cluster::node::Node;
use fastps_core::error::{Error, Kind, Result};
use fastps_core::spaces::{SeatKey, Spaces};
use fastps_core::tensor::SpaceId;
use fastps_core::verbs::SpaceInfo;
use fastps_durable::{Event, SecretHash};
use fastps_proto::v1 as pb;
use fastps_transport::convert;
use std::collections::BTreeSet;
use std::sync::MutexGuard;
use std::time::Instant;

impl Node {
    /// The spaces; only shard 0 lists them.
    pub(crate) fn spaces(&self) -> Result<MutexGuard<'_, Spaces>> {
        if !self.is_coordinator() {
            return Err(self.not_coordinator("only shard 0 lists spaces of vectors"));
        }
        Ok(self.space_table.lock())
    }

    /// Removes a space from the list, and its vectors from this shard's slices.
    pub(crate) fn close_space(&self, space: SpaceId) {
        let listed = self.spaces().ok().and_then(|mut spaces| spaces.close(space));
        if listed.is_some() {
            self.files.step(|| Event::SpaceClosed(space.0));
        }
        self.shard.close_space(space);
        self.space_table.forget(space);
    }

    /// Fails unless the client with this secret was the last to take the space's seat, with this term.
    pub(crate) async fn check_coordinator(
        &self,
        (space, term): (SpaceId, u64),
        shown: Option<&SecretHash>,
    ) -> Result<()> {
        let key = shown.map(SecretHash::bytes).unwrap_or_default();
        if self.is_coordinator() {
            return self.spaces()?.check_seat(space, term, &key);
        }
        if self.space_table.is_confirmed(space, (term, key)) {
            return Ok(());
        }
        let claim = pb::SeatClaim { space: space.0, term, secret_hash: key.to_vec().into() };
        let question = pb::SettleRequest { seat: Some(claim), ..Default::default() };
        let answer = self.ask_coordinator_for(question).await?;
        if let Some(refusal) = answer.seat.and_then(|verdict| verdict.refusal) {
            return Err(convert::error_from_refusal(refusal));
        }
        self.space_table.confirm(space, (term, key));
        Ok(())
    }

    /// Checks a claim that another shard's client makes; only shard 0 can.
    pub(crate) fn judge(&self, claim: &pb::SeatClaim) -> Result<pb::SeatVerdict> {
        let pb::SeatClaim { space, term, secret_hash } = claim;
        let key = SeatKey::try_from(&secret_hash[..]).map_err(|_| {
            let error = Error::new(Kind::Frame, "the hash in a claim is not one of SHA-256");
            error.expected("32 bytes", format!("{} bytes", secret_hash.len()))
        })?;
        let refused = self.spaces()?.check_seat(SpaceId(*space), *term, &key).err();
        Ok(pb::SeatVerdict { refusal: refused.map(|error| convert::refusal(&error)) })
    }

    /// Gives up the client's seats, and removes its replicas.
    pub(crate) fn leave_spaces(&self, client: u64) -> Result<()> {
        let vacated = self.spaces()?.forget_client(client);
        for space in vacated {
            self.files.note(|| Event::SeatLeft(space.0));
        }
        Ok(())
    }

    /// Fails if a space is open over the tensor.
    pub(crate) fn check_no_space(&self, name: &str) -> Result<()> {
        let all = self.spaces()?.list();
        match all.iter().find(|(spec, _)| spec.tensors.iter().any(|tensor| **tensor == *name)) {
            None => Ok(()),
            Some((spec, _)) => {
                let message = format!("space {:?} is open over the tensor", spec.space.name);
                let error = Error::new(Kind::Precondition, message).tensor(name);
                Err(error.expected("a closed space", "an open one"))
            }
        }
    }

    /// The spaces after a name, in the order of names.
    pub(crate) fn spaces_after(&self, name: &str) -> Result<Vec<SpaceInfo>> {
        let all = self.spaces()?.list();
        let after = all.into_iter().filter(|(spec, _)| *spec.space.name > *name);
        Ok(after.map(|(spec, coordinator)| SpaceInfo { spec, coordinator }).collect())
    }

    /// The closed ones of these spaces.
    pub(crate) fn closed_of(&self, spaces: &[u64]) -> Result<Vec<u64>> {
        let listed = self.spaces()?;
        Ok(spaces.iter().copied().filter(|id| listed.spec(SpaceId(*id)).is_err()).collect())
    }

    /// Closes spaces whose coordinator has been gone for too long.
    pub(crate) fn sweep_spaces(&self, now: Instant) {
        if !self.is_coordinator() {
            return;
        }
        self.space_table.drop_idle_replicas(now, self.sessions.lease());
        for spec in self.space_table.outdated(now, |client| self.sessions.is_live(client)) {
            let name = &spec.space.name;
            tracing::info!(shard = self.index(), %name, "the space is closed: its coordinator does not return");
            self.close_space(spec.space.id);
        }
    }

    /// The spaces open on slices here or still charged, to ask shard 0 about.
    pub(crate) fn spaces_to_ask_about(&self) -> Vec<u64> {
        let mut spaces: BTreeSet<_> = self.shard.open_spaces().into_iter().collect();
        spaces.extend(self.space_table.charged());
        spaces.into_iter().map(|space| space.0).collect()
    }
}
