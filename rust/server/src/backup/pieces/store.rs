//! Pieces of a shard's log as objects: immutable, in a folder of their own beside those of the snapshots.

use crate::backup::bucket::Bucket;
use crate::backup::upload::remove;
use fastps_core::error::{Error, Kind, Result};
use fastps_durable::owner::Piece;
use futures_util::TryStreamExt;
use object_store::path::Path;
use object_store::{ObjectStoreExt, PutPayload};

/// Most bytes of a piece: one frame may be longer than others.
const MAX_PIECE_BYTES: u64 = 128 << 20;

impl Bucket {
    /// Folder of a shard's pieces.
    pub(super) fn log(&self, shard: u32) -> Path {
        self.prefix.clone().join(format!("log-{shard}"))
    }

    fn piece_place(&self, shard: u32, piece: Piece) -> Path {
        self.log(shard).join(piece.name())
    }

    /// The pieces of a shard, in no order. Skips objects of other names.
    pub(in crate::backup) async fn pieces(&self, shard: u32) -> Result<Vec<Piece>> {
        let (place, mut pieces) = (self.log(shard), Vec::new());
        let mut objects = self.store.list(Some(&place));
        while let Some(object) =
            objects.try_next().await.map_err(|error| self.failed("list", &place, &error))?
        {
            pieces.extend(object.location.filename().and_then(Piece::parse));
        }
        Ok(pieces)
    }

    /// Writes a piece. The same piece has the same bytes, whoever writes it again.
    pub(in crate::backup) async fn put_piece(
        &self,
        shard: u32,
        piece: Piece,
        bytes: PutPayload,
    ) -> Result<()> {
        let place = self.piece_place(shard, piece);
        let put = self.store.put(&place, bytes).await;
        put.map(drop).map_err(|error| self.failed("write", &place, &error))
    }

    /// Reads a piece.
    pub(in crate::backup) async fn piece(&self, shard: u32, piece: Piece) -> Result<Vec<u8>> {
        let place = self.piece_place(shard, piece);
        match self.read(&place, MAX_PIECE_BYTES).await? {
            Some((bytes, _)) => Ok(bytes),
            None => Err(Error::new(Kind::Internal, format!("{} is missing", self.name(&place)))),
        }
    }

    pub(super) async fn remove_pieces(&self, shard: u32, pieces: impl Iterator<Item = Piece>) -> Result<()> {
        let places: Vec<_> = pieces.map(|piece| self.piece_place(shard, piece)).collect();
        let removed = remove(self, places.into_iter()).await;
        removed.map_err(|error| self.failed("remove older pieces of the log from", &self.log(shard), &error))
    }
}
