//! Reading and swapping a shard's record, and the trial that shows whether a store can swap.

use crate::backup::bucket::Bucket;
use fastps_core::error::{Error, Kind, Result};
use fastps_durable::owner::{MAX_RECORD_BYTES, Record, Stage};
use object_store::path::Path;
use object_store::{ObjectStoreExt, PutMode, PutOptions, PutPayload, UpdateVersion};

/// Name of the object that says who owns a shard.
const OWNER: &str = "owner";

/// A number that nobody has drawn before.
pub(super) fn random() -> Result<u64> {
    let mut bytes = [0; 8];
    let failed = |error| Error::new(Kind::Internal, format!("no random numbers: {error}"));
    getrandom::fill(&mut bytes).map_err(failed)?;
    Ok(u64::from_ne_bytes(bytes))
}

/// Returns whether a store refused a write because of its condition.
fn is_refused(error: &object_store::Error) -> bool {
    matches!(error, object_store::Error::AlreadyExists { .. } | object_store::Error::Precondition { .. })
}

impl Bucket {
    /// Place of a shard's record.
    pub(super) fn owner_place(&self, shard: u32) -> Path {
        self.shard(shard).join(OWNER)
    }

    /// The record of a shard, and the version to swap it by.
    pub(super) async fn owner(&self, shard: u32) -> Result<Option<(Box<Record>, UpdateVersion)>> {
        let place = self.owner_place(shard);
        let Some((text, version)) = self.read(&place, MAX_RECORD_BYTES).await? else { return Ok(None) };
        Ok(Some((Box::new(Record::parse(&text, &self.name(&place))?), version)))
    }

    /// The record of a shard, if a server owns and serves it.
    pub(crate) async fn open_owner(&self, shard: u32) -> Result<Option<Record>> {
        let record = self.owner(shard).await?.map(|(record, _)| *record);
        Ok(record.filter(|record| record.stage == Stage::Open))
    }

    /// Replaces the record, if it has this version. Whatever the failure, it may have been replaced.
    pub(super) async fn swap_owner(
        &self,
        record: &Record,
        before: Option<UpdateVersion>,
    ) -> Result<UpdateVersion> {
        let place = self.owner_place(record.shard);
        let mode = before.map_or(PutMode::Create, PutMode::Update);
        let put = self.put(&place, record.text()?, mode).await;
        put.map_err(|error| self.failed("write", &place, &error))
    }

    async fn put(&self, place: &Path, text: Vec<u8>, mode: PutMode) -> object_store::Result<UpdateVersion> {
        let options = PutOptions { mode, ..PutOptions::default() };
        self.store.put_opts(place, PutPayload::from(text), options).await.map(UpdateVersion::from)
    }

    /// Fails unless the store writes conditionally: with a trial object that is created, created again, swapped,
    /// and swapped by its old version.
    pub(super) async fn try_conditions(&self) -> Result<()> {
        let place = self.prefix.clone().join(format!("trial-{:016x}", random()?));
        let tried = self.try_at(&place).await;
        // One that stays does no harm.
        let _ = self.store.delete(&place).await;
        tried
    }

    async fn try_at(&self, place: &Path) -> Result<()> {
        let failed = |error: object_store::Error| {
            let error = match error {
                object_store::Error::NotImplemented { .. } => {
                    return self.lacks_conditions("refuses conditions");
                }
                error => self.failed("write", place, &error),
            };
            error.expected("a store that --owner-lease can write a trial object to", "a failure")
        };
        let refuses = |put: object_store::Result<UpdateVersion>, what| match put {
            Err(error) if is_refused(&error) => Ok(()),
            Err(error) => Err(failed(error)),
            Ok(_) => Err(self.lacks_conditions(what)),
        };
        let first = self.put(place, b"1".to_vec(), PutMode::Create).await.map_err(failed)?;
        let again = self.put(place, b"2".to_vec(), PutMode::Create).await;
        refuses(again, "creates an object that exists")?;
        self.put(place, b"3".to_vec(), PutMode::Update(first.clone())).await.map_err(failed)?;
        let late = self.put(place, b"4".to_vec(), PutMode::Update(first)).await;
        refuses(late, "replaces a version that is no longer there")
    }

    /// Refusal of a store without conditional writes.
    pub(super) fn lacks_conditions(&self, does: &str) -> Error {
        let message = format!("{} {does}, so two servers could own one shard there", self.url);
        Error::new(Kind::Config, message).expected(
            "a store with conditional writes (If-Match, If-None-Match), such as S3; or no --owner-lease",
            "one without",
        )
    }
}
