//! Resolves pushes in doubt. A push that was not applied is fenced before the slice says so, so that the
//! outcome stays true even if the frame arrives later. Clients ask when an answer was lost.

use super::round;
use super::slice::{Slice, SliceMemory};
use crate::base::error::{Error, Kind, Result};
use crate::base::fault::fault;
use crate::base::sync::lock;
use crate::slice::context::Counters;
use crate::slice::frame::Identity;
use crate::slice::identity::{Completion, IdentityTable, Outcome, Seen, Settled};
use crate::tensor::Apply;

/// A slice's knowledge of a push in doubt.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Resolved {
    /// It was applied.
    Applied(Settled),
    /// It was not applied and never will be.
    Fenced,
    /// The slice no longer remembers it.
    Unknown,
}

impl Slice {
    /// Resolves a push in doubt; if it was not applied, it is fenced. `None`: the gradient waits for those of
    /// other workers; the completion from `later` then gets the push's result. If this is an error, the
    /// caller resolves the push again.
    pub fn resolve_later(
        &self,
        identity: Identity,
        later: impl FnOnce() -> Completion,
    ) -> Option<Result<Resolved>> {
        if let SliceMemory::Exact(memory) = &self.memory
            && let Seen::Before(Outcome::Shared(waiting)) = memory.lock().identities.look_up(identity)
        {
            waiting.push(later());
            return None;
        }
        Some(self.resolve(identity))
    }

    /// As [`Slice::resolve_later`], but answers at once: with an error while the gradient waits for other
    /// workers.
    pub fn resolve(&self, identity: Identity) -> Result<Resolved> {
        let (resolved, waiting) = match &self.memory {
            SliceMemory::Exact(memory) => self.settle(&mut memory.lock().identities, identity)?,
            SliceMemory::Hogwild(memory) => self.settle(&mut lock(&memory.identities), identity)?,
        };
        for done in waiting {
            done(Err(self.name(Error::new(Kind::Fenced, "the push was fenced"))));
        }
        Ok(resolved)
    }

    fn settle(&self, table: &mut IdentityTable, identity: Identity) -> Result<(Resolved, Vec<Completion>)> {
        match table.look_up(identity) {
            Seen::Before(Outcome::Applied(applied)) => Ok((Resolved::Applied(*applied), Vec::new())),
            Seen::Before(Outcome::Fenced) => Ok((Resolved::Fenced, Vec::new())),
            Seen::Before(Outcome::Applying(_)) => {
                let error = Error::new(Kind::Unavailable, "the push is being applied");
                Err(self.name(error).retry_after_ms(1))
            }
            Seen::Before(Outcome::Shared(_)) => {
                let why = "the gradient waits for those of other workers, to make a version together";
                Err(self.name(Error::new(Kind::Unavailable, why)).retry_after_ms(100))
            }
            Seen::New | Seen::Unmet | Seen::Before(Outcome::Held(_)) if fault("fence_forgotten") => {
                Ok((Resolved::Fenced, Vec::new()))
            }
            Seen::Unmet | Seen::New => {
                table.make_room(identity.client, &self.home()).map_err(|error| self.name(error))?;
                Ok((Resolved::Fenced, self.fence(table, identity)))
            }
            Seen::Before(Outcome::Held(_)) => Ok((Resolved::Fenced, self.fence(table, identity))),
            Seen::Forgotten => Ok((Resolved::Unknown, Vec::new())),
        }
    }

    fn fence(&self, table: &mut IdentityTable, identity: Identity) -> Vec<Completion> {
        if let (Apply::Exact, Some(sink)) = (self.spec.apply, &self.sink) {
            sink.fenced(self.id, identity);
        }
        Counters::count(&self.counters.pushes_fenced);
        table.note(identity, Outcome::Fenced)
    }

    /// Drops everything known about a client whose lease ended.
    pub(crate) fn forget_client(&self, client: u64) {
        match &self.memory {
            SliceMemory::Exact(memory) => {
                let completions = memory.lock().forget(self, client);
                round::tell(completions);
            }
            SliceMemory::Hogwild(memory) => lock(&memory.identities).forget(client),
        }
    }
}
